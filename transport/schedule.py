"""Collectives as data: who sends which range to whom, in what order. Pure: no socket, no clock, no array.

A collective is a `Goal`: pieces of a row of elements, each with the ranks that *give* a term of it and those that
*take* the sum of the terms (a gather is a sum of one term). A `Schedule` is a list of *transfers* that reaches a goal.
Its steps only say in which order the frames of one link follow each other; a frame leaves as soon as what it carries
is there (`Progress`), so that segments of a large payload travel, are summed and travel on at the same time.

==========  ==========================================================================================  ==============
algorithm   how, for N ranks and S bytes                                                                sent per rank
==========  ==========================================================================================  ==============
one-shot    every giver sends its term to every taker                                                   (N-1) S (*)
two-shot    rank j owns a part: it gets it from all givers, sums it, sends the sum to all takers        2 S (N-1)/N
ring        segments travel 0 -> 1 -> ... -> N-1, each rank adds its term; the sums go on around        up to 2 S
            the ring N-1 -> 0 -> ... -> N-2; every rank talks to its two neighbours only
==========  ==========================================================================================  ==============

(*) of an all-reduce; a gather, a reduce-scatter or an all-to-all cannot send less than one-shot does.

The usual ring starts the sum of each range at another rank, which saves 2S/N bytes but makes the order of the terms
depend on the algorithm. Here all of them compute ``((x0 + x1) + x2) + ...``, so they agree to the last bit. On equal
links two-shot beats the ring; the ring wins on large payloads when links that are no neighbours are slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

SEGMENT_BYTES = 256 << 10
"""Large payloads are cut in segments of this size (fits a core's cache), so that sums and transfers overlap."""
SEGMENTS = 32
"""No rank's part is cut in more segments than this; they grow instead."""
FRAME_S = 4e-6
"""What sending or receiving one frame costs a rank's processor, until `connect_mesh` has measured it."""
SUM_S = 1 / 6e9
"""What reading a byte of a term and adding it costs a rank's processor."""

Matrix = Sequence[Sequence[float]]


class Crowd(NamedTuple):
    """Ranks of one machine that share too few cores."""

    ranks: Sequence[int]
    cores: int


@dataclass(frozen=True)
class Network:
    """What a forecast rests on; the same on all ranks, as algorithms are chosen by it.

    Attributes:
        latency: seconds one way, ``latency[a][b]`` between ranks a and b.
        bandwidth: bytes per second, likewise.
        frame_s: what sending or receiving one frame costs a rank's processor, in seconds...
        byte_s: ...and what each of its bytes adds to that, beyond what the bandwidth tells.
        crowds: the ranks that share cores; no rank is in two.
    """

    latency: Matrix
    bandwidth: Matrix
    frame_s: float = FRAME_S
    byte_s: float = 0.0
    crowds: Sequence[Crowd] = ()


class Operation(StrEnum):
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"


SUMMED = (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER)


class Algorithm(StrEnum):
    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"
    RING = "ring"


ALGORITHMS = {
    Operation.ALL_REDUCE: tuple(Algorithm),
    Operation.REDUCE_SCATTER: (Algorithm.ONE_SHOT,),
    Operation.ALL_GATHER: (Algorithm.ONE_SHOT, Algorithm.RING),
    Operation.BROADCAST: tuple(Algorithm),
    Operation.ALL_TO_ALL: (Algorithm.ONE_SHOT,),
}


# -- goals -------------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """The elements `part`: every rank of `givers` has a term, every rank of `takers` wants the sum of the terms."""

    part: range
    givers: range
    takers: range


@dataclass(frozen=True)
class Goal:
    """What a collective over `ranks` is to achieve; the pieces tile a row of elements, in order."""

    operation: Operation
    ranks: int
    pieces: Sequence[Piece]

    @property
    def elements(self) -> int:
        return self.pieces[-1].part.stop if self.pieces else 0


def tile(lengths: Iterable[int]) -> list[range]:
    """Ranges of these lengths, one after the other."""
    return [range(start, stop) for start, stop in pairwise(accumulate(lengths, initial=0))]


def even_parts(elements: int, ranks: int) -> list[range]:
    """Cut `elements` into one range per rank that differ by at most one; some are empty if there are too few."""
    return [range(elements * rank // ranks, elements * (rank + 1) // ranks) for rank in range(ranks)]


def all_reduce(elements: int, ranks: int) -> Goal:
    return Goal(Operation.ALL_REDUCE, ranks, [Piece(range(elements), range(ranks), range(ranks))])


def reduce_scatter(lengths: Sequence[int]) -> Goal:
    ranks = len(lengths)
    pieces = [Piece(part, range(ranks), _only(rank)) for rank, part in enumerate(tile(lengths))]
    return Goal(Operation.REDUCE_SCATTER, ranks, pieces)


def all_gather(lengths: Sequence[int]) -> Goal:
    ranks = len(lengths)
    pieces = [Piece(part, _only(rank), range(ranks)) for rank, part in enumerate(tile(lengths))]
    return Goal(Operation.ALL_GATHER, ranks, pieces)


def broadcast(elements: int, ranks: int, root: int) -> Goal:
    return Goal(Operation.BROADCAST, ranks, [Piece(range(elements), _only(root), range(ranks))])


def all_to_all(lengths: Sequence[Sequence[int]]) -> Goal:
    """``lengths[a][b]``: what rank a has for rank b. A rank that only plans for itself may leave other pairs at 0."""
    ranks = len(lengths)
    parts = iter(tile(length for row in lengths for length in row))
    pieces = [Piece(next(parts), _only(a), _only(b)) for a in range(ranks) for b in range(ranks)]
    return Goal(Operation.ALL_TO_ALL, ranks, pieces)


def _only(rank: int) -> range:
    return range(rank, rank + 1)


# -- schedules ---------------------------------------------------------------------------------------------------------


class Transfer(NamedTuple):
    """In `step`, `source` sends its values of `part` (elements) to `target`: the sum of the terms of ranks `terms`."""

    step: int
    source: int
    target: int
    part: range
    terms: range


@dataclass(frozen=True)
class Schedule:
    """How a goal is reached: transfers in order of steps."""

    goal: Goal
    algorithm: Algorithm
    transfers: Sequence[Transfer]

    def __str__(self) -> str:
        """A table of the first transfers, for people."""
        steps = len({t.step for t in self.transfers})
        lines = [
            f"{self.goal.operation} of {self.goal.elements} elements over {self.goal.ranks} ranks, {self.algorithm}: "
            f"{len(self.transfers)} transfers in {steps} steps",
            "step  from    to        elements  sum of ranks",
        ]
        for t in self.transfers[:40]:
            terms = f"{t.terms.start}" if len(t.terms) == 1 else f"{t.terms.start} to {t.terms.stop - 1}"
            lines.append(f"{t.step:4}  {t.source:4}  {t.target:4}  {f'{t.part.start}:{t.part.stop}':>14}  {terms}")
        if len(self.transfers) > 40:
            lines.append(f"... and {len(self.transfers) - 40} more")
        return "\n".join(lines)

    def steps(self) -> Iterator[list[Transfer]]:
        for _, transfers in groupby(self.transfers, lambda transfer: transfer.step):
            yield list(transfers)

    def check(self) -> None:
        """Replay the schedule without data.

        Raises:
            ValueError: a rank sends what it does not have, gets a term twice, sums out of rank order, or lacks a
                part of what it should have in the end.
        """
        if [t.step for t in self.transfers] != sorted(t.step for t in self.transfers):
            raise ValueError("the transfers are not in order of steps")
        pairs = [(t.step, t.source, t.target) for t in self.transfers]
        if len(pairs) != len(set(pairs)):
            raise ValueError("two transfers between the same ranks in one step")
        ends = {end for t in self.transfers for end in (t.part.start, t.part.stop)}
        if ends and (min(ends) < 0 or max(ends) > self.goal.elements):
            raise ValueError(f"parts reach outside the {self.goal.elements} elements")
        for piece in self.goal.pieces:
            bounds = sorted({piece.part.start, piece.part.stop} | {end for end in ends if end in piece.part})
            for start in bounds[:-1]:
                self._replay(start, piece)

    def _replay(self, element: int, piece: Piece) -> None:
        # The terms summed in each rank's buffer.
        held = [_only(rank) if rank in piece.givers else range(0) for rank in range(self.goal.ranks)]
        for transfers in self.steps():
            arriving: dict[int, list[range]] = {}
            for t in transfers:
                if element in t.part:
                    if t.source == t.target or held[t.source] != t.terms or not t.terms:
                        raise ValueError(f"{t}: the source holds the sum of {held[t.source]}")
                    arriving.setdefault(t.target, []).append(t.terms)
            for target, terms in arriving.items():
                held[target] = _add(held[target], terms, piece.givers)
        if any(held[rank] != piece.givers for rank in piece.takers):
            raise ValueError(f"element {element}: the ranks end with the sums of {held}")


def _add(own: range, arrived: list[range], whole: range) -> range:
    if arrived == [whole] and own != whole:
        return whole
    terms = sorted([own, *arrived], key=lambda terms: terms.start)
    if terms[0].start != 0 or any(a.stop != b.start for a, b in pairwise(terms)):
        raise ValueError(f"the terms {terms} do not follow each other in rank order")
    if any(len(term) > 1 for term in terms[1:]):
        raise ValueError(f"the terms {terms} would be summed in another order than rank order")
    return range(terms[-1].stop)


def one_shot(goal: Goal, segment: int) -> Schedule:
    """Every giver sends to every taker, even if it is nothing: the call still meets its peers.

    Pieces that are summed by one taker are cut in segments of so many elements, one per step.
    """
    transfers = []
    for piece in goal.pieces:
        cuts = _cut(piece.part, segment) if goal.operation is Operation.REDUCE_SCATTER else [piece.part]
        transfers += [
            Transfer(step, giver, taker, part, _only(giver))
            for step, part in enumerate(cuts)
            for giver in piece.givers
            for taker in piece.takers
            if giver != taker
        ]
    return _in_order(goal, Algorithm.ONE_SHOT, transfers)


def two_shot(goal: Goal, parts: Sequence[range], segment: int) -> Schedule:
    """Rank j sums ``parts[j]``; the parts tile the goal's only piece, may be unequal, and may be empty."""
    (piece,) = goal.pieces
    transfers = []
    for owner, part in enumerate(parts):
        for index, cut in enumerate(_cut(part, segment) if part else ()):
            # The next segment is on its way before this one's sum: its frame comes first. Even and odd steps keep
            # the two apart: never two frames between the same ranks in one step.
            for giver in piece.givers:
                if giver != owner:
                    transfers.append(Transfer(2 * index, giver, owner, cut, _only(giver)))
            for taker in piece.takers:
                if taker != owner and piece.givers != _only(taker):
                    transfers.append(Transfer(2 * index + 3, owner, taker, cut, piece.givers))
    return _in_order(goal, Algorithm.TWO_SHOT, transfers)


def ring(goal: Goal, segment: int) -> Schedule:
    """Segments travel up the ranks as partial sums, if there is something to sum, and then around the ring."""
    ranks, transfers = goal.ranks, []
    for piece in goal.pieces:
        summed = len(piece.givers) > 1
        first = ranks - 1 if summed else piece.givers.start
        for index, cut in enumerate(_cut(piece.part, segment)):
            for hop in range(ranks - 1):
                source = (first + hop) % ranks
                if summed:  # partial sums go in even steps and sums in odd ones
                    transfers.append(Transfer(2 * (index + hop), hop, hop + 1, cut, range(hop + 1)))
                    step = 2 * (index + ranks - 1 + hop) + 1
                else:
                    step = index * (ranks - 1) + hop
                transfers.append(Transfer(step, source, (source + 1) % ranks, cut, piece.givers))
    return _in_order(goal, Algorithm.RING, transfers)


def _cut(part: range, segment: int) -> list[range]:
    """Ranges of at most so many elements, at least one."""
    return [part[start : start + segment] for start in range(0, len(part) or 1, segment)]


def _in_order(goal: Goal, algorithm: Algorithm, transfers: list[Transfer]) -> Schedule:
    return Schedule(goal, algorithm, sorted(transfers, key=lambda t: t[:3]))


def build(goal: Goal, algorithm: Algorithm, itemsize: int) -> Schedule:
    """The schedule of an algorithm, with even parts and segments for elements of `itemsize` bytes.

    Raises:
        ValueError: the operation has no such algorithm.
    """
    if algorithm not in ALGORITHMS[goal.operation]:
        raise ValueError(f"{goal.operation} has no {algorithm} algorithm")
    segment = max(SEGMENT_BYTES // itemsize, goal.elements // SEGMENTS, 1)
    match algorithm:
        case Algorithm.ONE_SHOT:
            return one_shot(goal, segment)
        case Algorithm.TWO_SHOT:
            return two_shot(goal, _owners(goal), segment)
        case Algorithm.RING:
            return ring(goal, segment)


def _owners(goal: Goal) -> list[range]:
    """Even parts; the root of a broadcast owns nothing, as it has everything to send already."""
    if goal.operation is Operation.ALL_REDUCE or goal.ranks == 1:
        return even_parts(goal.elements, goal.ranks)
    root = goal.pieces[0].givers.start
    parts = even_parts(goal.elements, goal.ranks - 1)
    return [*parts[:root], range(0), *parts[root:]]


# -- running -----------------------------------------------------------------------------------------------------------

NOW = -1
"""The gate of what can leave at once, and the answer that an arrival opened no gate."""


class Gate(NamedTuple):
    """Frames that a rank has to have before it can go on with `part`; in order of their terms."""

    part: range
    arrivals: Sequence[Transfer]
    summed: bool
    """The arrivals are terms to be summed with the rank's own; otherwise the one arrival is the sum itself."""


class Duty:
    """One rank's part of a schedule: what it sends and receives, and what waits for what.

    Attributes:
        sends: in order of steps.
        send_gates: per send the gate that must open before; `NOW` if it sends the rank's own values.
        receives: in order of steps.
        receive_gates: per receive the gate that it helps to open.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.ranks = schedule.goal.ranks
        self.rank = rank
        self.sends: list[Transfer] = []
        self.send_gates: list[int] = []
        self.receives: list[Transfer] = []
        self.receive_gates: list[int] = []
        self.gates: list[Gate] = []
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
                    self.send_gates.append(NOW if t.terms == _only(rank) else latest[bounds])
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

    Whatever the order in which links deliver, this never stands still: of all the frames that are missing somewhere,
    the one of the lowest step waits for nothing but frames of lower steps.
    """

    __slots__ = ("_first", "_freed", "_gates", "_lanes", "_missing", "_needs", "_opened", "_positions", "_start")

    def __init__(self, duty: Duty) -> None:
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
        """A frame has come; returns the gate that this opens, or `NOW`."""
        gate = self._gates[receive]
        self._missing[gate] -= 1
        if self._missing[gate]:
            return NOW
        self._opened[gate] = True
        return gate

    def released(self, gate: int) -> Sequence[int]:
        """The sends that can leave after a gate has opened."""
        targets = self._freed[gate]
        return self._release(targets) if targets else ()

    def _release(self, targets: Iterable[int]) -> list[int]:
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


# -- cost --------------------------------------------------------------------------------------------------------------


def cost(schedule: Schedule, itemsize: float, network: Network) -> float:
    """Forecast a schedule's time in seconds, by running it on an imagined network.

    A rank has one processor, which works on each frame that it sends or receives and `SUM_S` on each byte it sums, and
    one port for each direction, through which its frames pass one after the other. In a crowd only as many ranks work
    at a time as there are cores.

    Args:
        itemsize: bytes that an element has on the wire.
    """
    latency, bandwidth = network.latency, network.bandwidth
    ranks = schedule.goal.ranks
    processor, outgoing, incoming = ([0.0] * ranks for _ in range(3))
    cores: list[list[float]] = [[] for _ in range(ranks)]  # until when those that a rank shares are busy
    for crowd in network.crowds:
        shared = [0.0] * crowd.cores
        for rank in crowd.ranks:
            cores[rank] = shared
    duties = [Duty(schedule, rank) for rank in range(ranks)]
    progress = [Progress(duty) for duty in duties]
    receives = {(t.step, t.source, t.target): index for duty in duties for index, t in enumerate(duty.receives)}
    flying: list[tuple[float, int, int, int]] = []

    def work(rank: int, ready: float, seconds: float) -> None:
        begin = max(ready, processor[rank])
        if shared := cores[rank]:  # it takes the core that became free last before, or that becomes free first
            free = max((until for until in shared if until <= begin), default=min(shared))
            begin = max(begin, free)
            shared[shared.index(free)] = begin + seconds
        processor[rank] = begin + seconds

    def send(rank: int, sends: Iterable[int]) -> None:
        for index in sends:
            t = duties[rank].sends[index]
            nbytes = len(t.part) * itemsize
            work(rank, 0.0, network.frame_s + nbytes * network.byte_s)
            seconds = nbytes / bandwidth[rank][t.target]
            outgoing[rank] = max(outgoing[rank], processor[rank]) + seconds
            arrives = outgoing[rank] + latency[rank][t.target]
            heappush(flying, (arrives, rank, t.target, receives[t.step, rank, t.target]))

    for rank in range(ranks):
        send(rank, progress[rank].start())
    while flying:
        arrives, source, rank, receive = heappop(flying)
        t = duties[rank].receives[receive]
        nbytes = len(t.part) * itemsize
        incoming[rank] = max(arrives, incoming[rank] + nbytes / bandwidth[source][rank])
        work(rank, incoming[rank], network.frame_s + nbytes * network.byte_s)
        gate = progress[rank].arrived(receive)
        if gate != NOW:
            if duties[rank].gates[gate].summed:
                terms = len(duties[rank].gates[gate].arrivals)
                work(rank, 0.0, terms * nbytes * SUM_S)
            send(rank, progress[rank].released(gate))
    return max(*processor, *outgoing)


class Choice(NamedTuple):
    """A schedule and the seconds that it is expected to take."""

    schedule: Schedule
    seconds: float


def choose(
    goal: Goal,
    itemsize: int,
    network: Network,
    *,
    wire_itemsize: float | None = None,
    algorithm: Algorithm | None = None,
) -> Choice:
    """The schedule with the lowest `cost`. All ranks must ask with the same numbers, so that they choose alike.

    Args:
        itemsize: bytes of an element; segments are cut by it.
        wire_itemsize: bytes of an element on the wire, if these are others.
        algorithm: the one to take in any case.

    Raises:
        ValueError: the operation has no such algorithm.
    """
    candidates = ALGORITHMS[goal.operation] if algorithm is None else (algorithm,)
    if algorithm is None and (goal.ranks == 1 or goal.elements < goal.ranks):
        candidates = (Algorithm.ONE_SHOT,)
    choices = []
    for candidate in candidates:
        schedule = build(goal, candidate, itemsize)
        choices.append(Choice(schedule, cost(schedule, wire_itemsize or itemsize, network)))
    return min(choices, key=lambda choice: choice.seconds)
