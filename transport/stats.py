"""Where the time of a rank goes: always on, a few clock readings per collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns


@dataclass(frozen=True)
class StatsSnapshot:
    """Where the time of a rank went since the last reset, in seconds."""

    compute_s: float
    """Between collectives, from the end of one call to the begin of the next; waiting for a step is no compute."""
    wait_s: float
    """In collectives, until the last peer's first byte was there."""
    wire_s: float
    """The rest of the collectives."""
    collectives: int
    waited_for_s: tuple[float, ...]
    """Per rank: in collectives, until this peer's first byte was there. Peers are waited for at the same time."""
    last_s: tuple[float, ...]
    """Per rank: how much sooner all peers would have been there without this one, when it was the last."""
    straggler: int | None
    """The rank that holds the others up, as seen from here: this one, if its peers were there before it in most
    collectives; otherwise the one with the largest `last_s`. In a ring a rank sees its neighbour only: compare the
    ranks' `wait_s` there, the straggler waits least."""


class Stats:
    """Cumulative clocks of a communicator."""

    __slots__ = (
        "_collectives",
        "_compute_ns",
        "_last_ns",
        "_left_ns",
        "_prompt",
        "_rank",
        "_wait_ns",
        "_waited_ns",
        "_wire_ns",
    )

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self._rank = rank
        self._waited_ns = [0] * size
        self._last_ns = [0] * size
        self.reset()

    def reset(self) -> None:
        self._compute_ns = self._wait_ns = self._wire_ns = self._collectives = self._prompt = 0
        for clocks in (self._waited_ns, self._last_ns):
            clocks[:] = [0] * len(clocks)
        self._left_ns = perf_counter_ns()

    def snapshot(self) -> StatsSnapshot:
        return StatsSnapshot(
            self._compute_ns / 1e9,
            self._wait_ns / 1e9,
            self._wire_ns / 1e9,
            self._collectives,
            tuple(nanoseconds / 1e9 for nanoseconds in self._waited_ns),
            tuple(nanoseconds / 1e9 for nanoseconds in self._last_ns),
            self._straggler(),
        )

    def _straggler(self) -> int | None:
        if 2 * self._prompt > self._collectives:
            return self._rank
        most = max(self._last_ns)
        return self._last_ns.index(most) if most else None

    def enter(self) -> int:
        """The rank stops computing."""
        now = perf_counter_ns()
        self._compute_ns += now - self._left_ns
        return now

    def leave(self, entered: int, heard: Sequence[int] = (), *, prompt: bool = False) -> None:
        """A collective ends.

        Args:
            entered: what `enter` returned.
            heard: per rank, when its first byte was there; 0 if nothing was expected of it.
            prompt: all peers were there before this rank.
        """
        self._left_ns = now = perf_counter_ns()
        self._collectives += 1
        last = second = entered
        latest = -1
        for rank, at in enumerate(heard):
            if at > entered:
                self._waited_ns[rank] += at - entered
                if at > last:
                    last, second, latest = at, last, rank
                elif at > second:
                    second = at
        if prompt:
            self._prompt += 1
        elif latest >= 0:
            self._last_ns[latest] += last - second
        self._wait_ns += last - entered
        self._wire_ns += now - last

    def restart(self) -> None:
        """The rank computes from now on; what came before counts nowhere."""
        self._left_ns = perf_counter_ns()
