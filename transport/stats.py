"""Where the time of a rank goes: always on, a few clock readings per collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter_ns

from .links.wire import Op

RECORDS = 256
"""The last so many collectives are recorded one by one."""


@dataclass(frozen=True)
class Record:
    """Where the time of a rank went in one collective, in seconds."""

    sequence: int
    """Its number, the same on all ranks: their records can be laid side by side."""
    operation: Op
    compute_s: float
    """Since the collective before, and between its start and its finish."""
    wire_s: float
    wait_s: float
    """Until the last peer's first byte was there."""
    waited_for: int | None
    """The rank that was last, if it came after this one."""


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
    """The clocks of one rank, which its calls move. Times that are taken and given are those of `perf_counter_ns`."""

    __slots__ = (
        "_collectives",
        "_compute_ns",
        "_last_ns",
        "_left_ns",
        "_prompt",
        "_rank",
        "_records",
        "_wait_ns",
        "_waited_ns",
        "_wire_ns",
    )

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self._rank = rank
        self._waited_ns = [0] * size
        self._last_ns = [0] * size
        # What the clocks showed after the last collectives, and before: a record is a difference.
        self._records = [(0, 0, 0, 0, 0, 0)] * (RECORDS + 1)
        self.reset()

    def reset(self) -> None:
        """Begin to count anew, from now on."""
        self._compute_ns = self._wait_ns = self._wire_ns = self._collectives = self._prompt = 0
        for clocks in (self._waited_ns, self._last_ns):
            clocks[:] = [0] * len(clocks)
        self._records[-1] = (0, 0, 0, 0, 0, 0)
        self._left_ns = perf_counter_ns()

    def snapshot(self) -> StatsSnapshot:
        """What was counted since the last reset, until the end of the last call."""
        return StatsSnapshot(
            self._compute_ns / 1e9,
            self._wait_ns / 1e9,
            self._wire_ns / 1e9,
            self._collectives,
            tuple(nanoseconds / 1e9 for nanoseconds in self._waited_ns),
            tuple(nanoseconds / 1e9 for nanoseconds in self._last_ns),
            self._straggler(),
        )

    def records(self) -> list[Record]:
        """The last collectives since the last reset, up to `RECORDS`, oldest first; a rank that is alone has none."""
        kept = min(self._collectives, RECORDS)
        shown = [self._records[i % (RECORDS + 1)] for i in range(self._collectives - kept - 1, self._collectives)]
        return [
            Record(
                sequence,
                Op(op),
                compute_s=(compute - before[3]) / 1e9,
                wire_s=(wire - before[4]) / 1e9,
                wait_s=(wait - before[5]) / 1e9,
                waited_for=last if last >= 0 else None,
            )
            for before, (sequence, op, last, compute, wire, wait) in pairwise(shown)
            if op
        ]

    def _straggler(self) -> int | None:
        if 2 * self._prompt > self._collectives:
            return self._rank
        most = max(self._last_ns)
        return self._last_ns.index(most) if most else None

    def enter(self) -> int:
        """A call begins; returns the time. Until now the rank computed, and if the call is refused it still does."""
        now = perf_counter_ns()
        self._compute_ns += now - self._left_ns
        self._left_ns = now
        return now

    def pause(self, entered: int) -> None:
        """The rank computes while a collective, begun at `entered`, goes on; until now that was time on the wire."""
        self._left_ns = now = perf_counter_ns()
        self._wire_ns += now - entered

    def leave(
        self, entered: int, heard: Sequence[int] = (), *, prompt: bool = False, op: int = 0, sequence: int = 0
    ) -> None:
        """A collective ends: its time is divided into waiting for peers and moving bytes.

        Args:
            entered: what `enter` returned.
            heard: per rank, when its first byte was there; 0 if nothing was expected of it.
            prompt: all peers were there before this rank.
            op: which collective, for its record.
            sequence: its number.
        """
        self._left_ns = now = perf_counter_ns()
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
        record = (sequence, op, latest, self._compute_ns, self._wire_ns, self._wait_ns)
        self._records[self._collectives % (RECORDS + 1)] = record
        self._collectives += 1

    def restart(self) -> None:
        """The rank computes from now on; the time since the last call counts nowhere."""
        self._left_ns = perf_counter_ns()
