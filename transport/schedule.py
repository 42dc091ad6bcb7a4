"""All-reduce algorithms as data: who sends which range to whom, in what order. Pure; the executor is in `collectives`.

A schedule is a list of *transfers*. In every step a rank sends and receives all of its transfers of that step, then
sums, in rank order, the terms that arrived for a range with its own. Three algorithms for N ranks and S bytes:

==========  ===================================================================================  =======  ========
algorithm   how                                                                                  steps    sent per rank
==========  ===================================================================================  =======  ========
one-shot    everyone sends everything to everyone and sums                                       1        (N-1) S
two-shot    rank j owns range j: it gets it from all, sums it, sends the sum to all              2        2 S (N-1)/N
ring        pieces travel 0 -> 1 -> ... -> N-1, each rank adds its term; the sums go on around   pipeline up to 2 S
            the ring N-1 -> 0 -> ... -> N-2; every rank talks to its two neighbours only
==========  ===================================================================================  =======  ========

The usual ring starts the sum of each range at another rank, which saves 2S/N bytes but makes the order of the terms
depend on the algorithm. Here all three compute ``((x0 + x1) + x2) + ...``, so they agree to the last bit. On equal
links two-shot beats the ring; the ring wins on large payloads when links that are no neighbours are slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, pairwise

RING_PIECE_BYTES = 128 << 10
"""Pieces of this size keep the ring's pipeline full without paying its latency too often."""
TRANSFER_S = 5e-6
"""What sending and receiving one frame costs a rank besides the network."""


class Algorithm(StrEnum):
    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"
    RING = "ring"


@dataclass(frozen=True, slots=True)
class Transfer:
    """In `step`, `source` sends its values of `part` (elements) to `target`: the sum of the terms of ranks `terms`."""

    step: int
    source: int
    target: int
    part: range
    terms: range


@dataclass(frozen=True)
class Schedule:
    """An all-reduce of `elements` over `ranks`, in order of steps."""

    ranks: int
    elements: int
    transfers: Sequence[Transfer]

    def steps(self) -> Iterator[list[Transfer]]:
        for _, transfers in groupby(self.transfers, lambda transfer: transfer.step):
            yield list(transfers)

    def is_final(self, transfer: Transfer) -> bool:
        """The transfer carries the sum over all ranks."""
        return len(transfer.terms) == self.ranks

    def check(self) -> None:
        """Replay the schedule without data.

        Raises:
            ValueError: a rank sends what it does not have, gets a term twice, sums out of rank order, or lacks a
                part of the sum in the end.
        """
        bounds = sorted({0, self.elements} | {b for t in self.transfers for b in (t.part.start, t.part.stop)})
        if bounds[0] < 0 or bounds[-1] > self.elements:
            raise ValueError(f"parts reach outside the {self.elements} elements")
        if [t.step for t in self.transfers] != sorted(t.step for t in self.transfers):
            raise ValueError("the transfers are not in order of steps")
        for atom in (range(start, stop) for start, stop in pairwise(bounds)):
            held = [range(rank, rank + 1) for rank in range(self.ranks)]  # the terms summed in each rank's buffer
            for transfers in self.steps():
                arriving: dict[int, list[range]] = {}
                for t in transfers:
                    if atom.start in t.part:
                        if t.source == t.target or held[t.source] != t.terms:
                            raise ValueError(f"{t}: the source holds the sum of {held[t.source]}")
                        arriving.setdefault(t.target, []).append(t.terms)
                for target, terms in arriving.items():
                    held[target] = self._add(held[target], terms)
            if any(len(terms) != self.ranks for terms in held):
                raise ValueError(f"elements {atom}: the ranks end with the sums of {held}")
        pairs = [(t.step, t.source, t.target) for t in self.transfers]
        if len(pairs) != len(set(pairs)):
            raise ValueError("two transfers between the same ranks in one step")

    def _add(self, own: range, arrived: list[range]) -> range:
        if len(arrived) == 1 and len(arrived[0]) == self.ranks and len(own) < self.ranks:
            return arrived[0]
        terms = sorted([own, *arrived], key=lambda terms: terms.start)
        if terms[0].start != 0 or any(a.stop != b.start for a, b in pairwise(terms)):
            raise ValueError(f"the terms {terms} do not follow each other in rank order")
        if any(len(term) > 1 for term in terms[1:]):
            raise ValueError(f"the terms {terms} would be summed in another order than rank order")
        return range(terms[-1].stop)


def even_parts(elements: int, ranks: int) -> list[range]:
    """Cut `elements` into one range per rank that differ by at most one; some are empty if there are too few."""
    return [range(elements * rank // ranks, elements * (rank + 1) // ranks) for rank in range(ranks)]


def one_shot(elements: int, ranks: int) -> Schedule:
    """Everyone sends everything to everyone, even if it is nothing: the call still meets its peers."""
    transfers = [
        Transfer(0, source, target, range(elements), range(source, source + 1))
        for source in range(ranks)
        for target in range(ranks)
        if source != target
    ]
    return Schedule(ranks, elements, transfers)


def two_shot(parts: Sequence[range]) -> Schedule:
    """Rank j reduces ``parts[j]``; the parts tile the elements, may be unequal, and may be empty."""
    ranks = len(parts)
    pairs = [(owner, other) for owner in range(ranks) for other in range(ranks) if owner != other and parts[owner]]
    scatter = [Transfer(0, other, owner, parts[owner], range(other, other + 1)) for owner, other in pairs]
    gather = [Transfer(1, owner, other, parts[owner], range(ranks)) for owner, other in pairs]
    return Schedule(ranks, parts[-1].stop, scatter + gather)


def ring(elements: int, ranks: int, piece: int) -> Schedule:
    """Pieces of `piece` elements travel up the ranks as partial sums and then once around the ring as sums."""
    transfers = []
    for index, start in enumerate(range(0, elements, piece)):
        part = range(start, min(start + piece, elements))
        for hop in range(ranks - 1):
            # Sums go in even steps and totals in odd ones: never two frames between the same ranks in one step.
            up = 2 * (index + hop)
            transfers.append(Transfer(up, hop, hop + 1, part, range(hop + 1)))
            around = 2 * (index + ranks - 1 + hop) + 1
            source = (ranks - 1 + hop) % ranks
            transfers.append(Transfer(around, source, (source + 1) % ranks, part, range(ranks)))
    return Schedule(ranks, elements, sorted(transfers, key=lambda transfer: transfer.step))


def build(algorithm: Algorithm, elements: int, ranks: int, itemsize: int = 4) -> Schedule:
    """The schedule of an algorithm with even parts."""
    match algorithm:
        case Algorithm.ONE_SHOT:
            return one_shot(elements, ranks)
        case Algorithm.TWO_SHOT:
            return two_shot(even_parts(elements, ranks))
        case Algorithm.RING:
            return ring(elements, ranks, RING_PIECE_BYTES // itemsize)


def cost(
    schedule: Schedule, itemsize: int, latency: Sequence[Sequence[float]], bandwidth: Sequence[Sequence[float]]
) -> float:
    """Forecast a schedule's time in seconds.

    A step lasts as long as its busiest rank: for what it sends and for what it receives, whichever is longer, the
    bytes over the bandwidth of each link plus `TRANSFER_S` per frame, plus the largest latency of its links.

    Args:
        latency: seconds one way, ``latency[a][b]`` between ranks a and b.
        bandwidth: bytes per second, likewise.
    """
    total = 0.0
    for transfers in schedule.steps():
        sending, receiving, delay = ([0.0] * schedule.ranks for _ in range(3))
        for t in transfers:
            seconds = TRANSFER_S + len(t.part) * itemsize / bandwidth[t.source][t.target]
            sending[t.source] += seconds
            receiving[t.target] += seconds
            delay[t.target] = max(delay[t.target], latency[t.source][t.target])
        total += max(max(sent, got) + wait for sent, got, wait in zip(sending, receiving, delay, strict=True))
    return total


def choose(
    size_bytes: int, ranks: int, latency: Sequence[Sequence[float]], bandwidth: Sequence[Sequence[float]]
) -> Algorithm:
    """The algorithm with the lowest `cost`. All ranks must ask with the same numbers, so that they choose alike."""
    if ranks <= 2 or size_bytes < ranks:
        return Algorithm.ONE_SHOT  # one exchange of everything is the least that two ranks can do
    return min(Algorithm, key=lambda algorithm: cost(build(algorithm, size_bytes, ranks, 1), 1, latency, bandwidth))
