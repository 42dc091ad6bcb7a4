"""Has every rank of a session get the files of adapters, a piece at a time, so that answers go on meanwhile.

Every rank looks on its own disk. Who finds an adapter sends it to those that do not, over the ranks' own links.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from motley.daemon.rank.adapters.messages import FindAdapter, FoundAdapter, Piece, ReadAdapter, WriteAdapter
from motley.daemon.rank.all_ranks import from_rank, trouble_of
from motley.daemon.rank.steps import Message, StepError, decode
from motley.daemon.weights.hub import is_hub_id

_Answer = TypeVar("_Answer", FoundAdapter, Piece)


@dataclass(frozen=True)
class Wanted:
    """An adapter whose files every rank is to have.

    Attributes:
        fingerprint: empty: whatever is found.
        source: a folder or a GGUF file where it may be, or a hub id.
        order: whoever wants it, as `Spread.wanted` tells it again.
    """

    fingerprint: str
    source: str
    order: str = ""


@dataclass(frozen=True)
class Spread:
    """What has become of it.

    Attributes:
        found: what the files hold; every rank has them, unless there is trouble.
        trouble: why not; empty: all is well.
    """

    wanted: Wanted
    found: FoundAdapter = field(default_factory=lambda: FoundAdapter(""))
    trouble: str = ""


@dataclass
class _Look:
    """An adapter that ranks are asked for.

    Attributes:
        asked: whether they were, and some of them still read.
        sent: its fingerprint, if those that had none have been sent it.
        fetch: whether rank 0 is asked to fetch it from the hub.
    """

    wanted: Wanted
    asked: bool = False
    sent: str = ""
    fetch: bool = False


@dataclass(frozen=True)
class _Sending:
    """An adapter that is sent to the ranks that lack it.

    Attributes:
        holder: the rank that has it.
        start: how much has been sent.
    """

    wanted: Wanted
    found: FoundAdapter
    holder: int
    start: int = 0


class Spreading:
    """The adapters that are being brought to all ranks: looked for by turns, as a disk may be slow, and sent one after
    another."""

    def __init__(self, told: Callable[[Message], list[bytes]]) -> None:
        """
        Args:
            told: has every rank execute a message, and gives what each of them tells, by rank.
        """
        self._told = told
        self._wanted: deque[_Look] = deque()
        self._sending: _Sending | None = None

    @property
    def busy(self) -> bool:
        """Whether there is something to `advance`."""
        return self._sending is not None or bool(self._wanted)

    def want(self, wanted: Wanted) -> None:
        """Have an adapter brought to all ranks; once, if it is wanted again."""
        known = [each.wanted for each in self._wanted] + ([self._sending.wanted] if self._sending else [])
        if wanted not in known:
            self._wanted.append(_Look(wanted))

    def advance(self) -> Spread | None:
        """Do the next piece of work; an adapter with which that is all, or for which there is no hope.

        Raises:
            StepError: a rank tells something else than it was asked for.
            TransportError, EngineError: a rank is lost.
        """
        return self._send(self._sending) if self._sending else self._look(self._wanted.popleft())

    def _look(self, look: _Look) -> Spread | None:
        wanted, fingerprint = look.wanted, look.sent or look.wanted.fingerprint
        told = found_adapters(self._told(FindAdapter(fingerprint, wanted.source, look.asked, look.fetch)))
        if any(each.pending for each in told):
            look.asked = True
            self._wanted.append(look)
            return None
        there = {rank: each for rank, each in enumerate(told) if each.fingerprint}
        if not there and not look.fetch and is_hub_id(wanted.source):
            self._wanted.append(_Look(wanted, fetch=True))
            return None
        if not there:
            return Spread(wanted, trouble="; ".join(dict.fromkeys(each.trouble for each in told)))
        holder, found = next(iter(there.items()))
        if unlike := [rank for rank, each in there.items() if each.fingerprint != found.fingerprint]:
            return Spread(
                wanted,
                trouble=f"ranks {holder} and {unlike[0]} have unlike files in {wanted.source}: give all nodes the same,"
                " or only one of them any",
            )
        if len(there) == len(told):
            return Spread(wanted, found)
        if look.sent:
            lacking = (f"rank {rank}: {each.trouble}" for rank, each in enumerate(told) if not each.fingerprint)
            return Spread(wanted, found, "; ".join(lacking))
        self._sending = _Sending(wanted, found, holder)
        return None

    def _send(self, sending: _Sending) -> Spread | None:
        found, start = sending.found, sending.start
        self._sending = None
        told = _read(self._told(ReadAdapter(sending.holder, found.fingerprint, start)), Piece)
        piece = told[sending.holder]
        if piece.pending:
            self._sending = sending
            return None
        if piece.trouble or not piece.data:
            why = piece.trouble or "its files have become shorter"
            return Spread(sending.wanted, trouble=f"rank {sending.holder}: {why}")
        end = start + len(piece.data)
        if trouble := trouble_of(self._told(WriteAdapter(found.fingerprint, start, found.size, piece.data))):
            return Spread(sending.wanted, trouble=trouble)
        if end < found.size:
            self._sending = replace(sending, start=end)
        else:  # whoever got it is to say whether it is right
            self._wanted.appendleft(_Look(sending.wanted, sent=found.fingerprint))
        return None


def found_adapters(told: Sequence[bytes]) -> list[FoundAdapter]:
    """What ranks answer to a `FindAdapter`, by rank; errors as `Spreading.advance`."""
    return _read(told, FoundAdapter)


def _read(told: Sequence[bytes], kind: type[_Answer]) -> list[_Answer]:
    """What every rank tells, by rank.

    Raises:
        StepError: one tells something else; the message names it.
    """
    answers = []
    for rank, data in enumerate(told):
        with from_rank(rank):
            message = decode(data)
            if not isinstance(message, kind):
                raise StepError(f"asked about an adapter, it has said {message}")
        answers.append(message)
    return answers
