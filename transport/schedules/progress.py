"""One rank's part of a schedule, frame by frame: what it sends and receives, and what waits for what.

Pure: no socket, no clock, no array. The forecast, the plans that ranks run, and the tests all go by this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from .schedule import Schedule, Transfer

NOW = -1
"""In the place of a gate's number: there is none. A frame with this gate can leave at once; an arrival that is answered
with it has opened no gate."""


class Gate(NamedTuple):
    """What a rank has to have received before it can use or pass on its elements `part`."""

    part: range
    arrivals: Sequence[Transfer]
    """The frames that have to come, in the order of their terms."""
    summed: bool
    """The arrivals are terms to be summed with the rank's own; otherwise the one arrival is the sum itself."""


class Duty:
    """One rank's part of a schedule. Gates are known by their number, which is their place in `gates`.

    Attributes:
        ranks: how many there are...
        rank: ...and which one this is.
        sends: the frames to send, in order of steps.
        send_gates: per send the gate that must open before; `NOW` if it sends the rank's own values.
        receives: the frames that come, in order of steps.
        receive_gates: per receive the gate that it helps to open.
        gates: in order of steps.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        """The part of rank `rank`."""
        self.ranks = schedule.goal.ranks
        self.rank = rank
        self.sends: list[Transfer] = []
        self.send_gates: list[int] = []
        self.receives: list[Transfer] = []
        self.receive_gates: list[int] = []
        self.gates: list[Gate] = []
        own = range(rank, rank + 1)
        whole = schedule.goal.pieces[0].givers  # pieces have the same givers, or one each
        summed = len(whole) > 1
        latest: dict[tuple[int, int], int] = {}  # the gate by which a part has got its present value
        mine = (t for t in schedule.transfers if rank in (t.source, t.target))
        for _, transfers in groupby(mine, lambda t: t.step):
            sums: dict[tuple[int, int], list[Transfer]] = {}
            for t in transfers:
                bounds = (t.part.start, t.part.stop)
                if t.source == rank:
                    self.sends.append(t)
                    self.send_gates.append(NOW if t.terms == own else latest[bounds])
                elif summed and t.terms != whole:
                    sums.setdefault(bounds, []).append(t)
                else:
                    latest[bounds] = self._add_gate([t], summed=False)
            for bounds, terms in sums.items():
                latest[bounds] = self._add_gate(sorted(terms, key=lambda t: t.terms.start), summed=True)

    def _add_gate(self, arrivals: Sequence[Transfer], *, summed: bool) -> int:
        gate = len(self.gates)
        self.gates.append(Gate(arrivals[0].part, arrivals, summed))
        self.receives += arrivals
        self.receive_gates += [gate] * len(arrivals)
        return gate


class Progress:
    """Which frames a rank may send by now. Frames of one link keep the order of their steps, at both ends.

    Sends and receives are known by their place in the rank's `Duty`.

    Whatever the order in which links deliver, this never stands still: of all the frames that are missing somewhere,
    the one of the lowest step waits for nothing but frames of lower steps.
    """

    __slots__ = ("_first", "_freed", "_gates", "_lanes", "_missing", "_needs", "_opened", "_positions", "_start")

    def __init__(self, duty: Duty) -> None:
        """The rank has neither sent nor received anything of `duty`."""
        self._needs = [len(gate.arrivals) for gate in duty.gates]
        self._gates = duty.receive_gates
        self._lanes: list[list[tuple[int, int]]] = [[] for _ in range(duty.ranks)]
        freed: list[set[int]] = [set() for _ in duty.gates]
        for send, (transfer, gate) in enumerate(zip(duty.sends, duty.send_gates, strict=True)):
            self._lanes[transfer.target].append((gate, send))
            if gate != NOW:
                freed[gate].add(transfer.target)
        # Everyone begins with its next neighbour: frames that meet at one rank would wait for each other there.
        targets = [(duty.rank + distance) % duty.ranks for distance in range(1, duty.ranks)]
        self._freed = [[target for target in targets if target in each] for each in freed]
        # What leaves first is always the same; resetting is two copies.
        self._opened = [False] * len(duty.gates)
        self._positions = [0] * duty.ranks
        self._first = self._release(targets)
        self._start = self._positions.copy()
        self._missing = self._needs.copy()

    def start(self) -> Sequence[int]:
        """Begin anew; returns the sends that can leave at once."""
        self._missing[:] = self._needs
        self._positions[:] = self._start
        for gate in range(len(self._opened)):
            self._opened[gate] = False
        return self._first

    def arrived(self, receive: int) -> int:
        """Note that a frame has come whole; returns the gate that this opens, or `NOW` if it opens none."""
        gate = self._gates[receive]
        self._missing[gate] -= 1
        if self._missing[gate]:
            return NOW
        self._opened[gate] = True
        return gate

    def released(self, gate: int) -> Sequence[int]:
        """The sends that can leave now that this gate is open (and its sum, if it is one, taken)."""
        targets = self._freed[gate]
        return self._release(targets) if targets else ()

    def _release(self, targets: Iterable[int]) -> list[int]:
        """The sends to these ranks that can leave and have not been released yet."""
        sends = []
        for target in targets:
            lane, position = self._lanes[target], self._positions[target]
            while position < len(lane):
                gate, send = lane[position]
                if gate != NOW and not self._opened[gate]:
                    break
                sends.append(send)
                position += 1
            self._positions[target] = position
        return sends
