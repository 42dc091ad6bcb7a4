"""How long a schedule will take on a network, and so which algorithm to take. Pure: the network is imagined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from .progress import NOW, Duty, Progress
from .schedule import ALGORITHMS, Algorithm, Goal, Schedule, build

FRAME_S = 4e-6
"""What sending or receiving one frame costs a rank's processor, until `connect_mesh` has measured it."""
SUM_S = 1 / 6e9
"""What reading a byte of a term and adding it costs a rank's processor."""

Matrix = Sequence[Sequence[float]]
"""Of each pair of ranks, ``matrix[a][b]``."""


class Crowd(NamedTuple):
    """Ranks of one machine that share too few cores."""

    ranks: Sequence[int]
    cores: int


@dataclass(frozen=True)
class Network:
    """What a forecast rests on: the ranks' connections and processors. The same on all ranks: they choose by it.

    Attributes:
        latency: seconds one way, ``latency[a][b]`` between ranks a and b.
        bandwidth: bytes per second, likewise.
        frame_s: seconds of a rank's processor that sending or receiving one frame takes...
        byte_s: ...and that each of its bytes adds, beyond what the bandwidth tells.
        crowds: the ranks that share cores; no rank is in two.
    """

    latency: Matrix
    bandwidth: Matrix
    frame_s: float = FRAME_S
    byte_s: float = 0.0
    crowds: Sequence[Crowd] = ()

    def among(self, ranks: Sequence[int]) -> Network:
        """The network of some of the ranks alone, which are counted from 0 there."""

        def part(matrix: Matrix) -> Matrix:
            return [[matrix[one][other] for other in ranks] for one in ranks]

        crowds = [Crowd([ranks.index(rank) for rank in own.ranks if rank in ranks], own.cores) for own in self.crowds]
        dense = [crowd for crowd in crowds if len(crowd.ranks) > crowd.cores]
        return Network(part(self.latency), part(self.bandwidth), self.frame_s, self.byte_s, dense)


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
