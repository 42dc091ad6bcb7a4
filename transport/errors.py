"""Errors say whose fault it was: ours (`UsageError`), the peer's (`ProtocolError`), the network's (the others)."""

from __future__ import annotations


class TransportError(Exception):
    """Base of all errors of the transport. `rank` is the peer it is about, None if no peer is to blame."""

    rank: int | None = None


class UsageError(TransportError):
    """The transport was called wrongly; nothing was sent."""


class PeerLost(TransportError):
    """A rank is gone or cannot be reached: the mesh must be rebuilt without it or with its successor.

    It is the own rank where nothing, or no data, comes of several peers: the fault is here.

    Attributes:
        finder: the rank that cannot do with the lost one, where another one than this has found it. The fault may be
            at either of the two, or between them.
    """

    def __init__(self, rank: int, why: str, finder: int | None = None) -> None:
        super().__init__(rank, why, finder)  # all arguments, so that the error can be pickled
        self.rank = rank
        self.why = why
        self.finder = finder

    def __str__(self) -> str:
        return f"rank {self.rank} is lost: {self.why}"


class PeerTimeout(TransportError):
    """A rank did not come in time, dead or alive; `what` says what was being waited for."""

    rank: int

    def __init__(self, rank: int, seconds: float, what: str) -> None:
        super().__init__(rank, seconds, what)
        self.rank = rank
        self.seconds = seconds
        self.what = what

    def __str__(self) -> str:
        return f"rank {self.rank} was silent for {self.seconds:g} s: {self.what}"


class ProtocolError(TransportError):
    """A peer sent what it must not: it is in another call, has another version or plan, or is no peer at all."""

    def __init__(self, rank: int | None, why: str) -> None:
        super().__init__(rank, why)
        self.rank = rank
        self.why = why

    def __str__(self) -> str:
        peer = "an unknown peer" if self.rank is None else f"rank {self.rank}"
        return f"{peer} broke the protocol: {self.why}"
