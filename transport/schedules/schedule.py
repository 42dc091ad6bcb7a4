"""Collectives as data: who sends which range to whom, in what order. Pure: no socket, no clock, no array.

A collective is a `Goal`: pieces of a row of elements, each with the ranks that *give* a term of it and those that
*take* the sum of the terms (a gather is a sum of one term). A `Schedule` is a list of *transfers* that reaches a goal.
Its steps only say in which order the frames of one link follow each other; a frame leaves as soon as what it carries is
there (`motley.transport.schedules.progress`), so that segments of a large payload travel, are summed and travel on at
the same time. Which algorithm is the fastest for a goal, `motley.transport.schedules.forecast` tells.

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
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

SEGMENT_BYTES = 256 << 10
"""Large payloads are cut in segments of this size (fits a core's cache), so that sums and transfers overlap."""
SEGMENTS = 32
"""No rank's part is cut in more segments than this; they grow instead."""


class Operation(StrEnum):
    """What a collective does."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"


SUMMED = (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER)
"""The operations that sum; the others only move values."""


class Algorithm(StrEnum):
    """How an operation is done; see the table above."""

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
"""By operation, the algorithms that it has."""


# -- goals -------------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """The elements `part`: every rank of `givers` has a term, every rank of `takers` wants the sum of the terms."""

    part: range
    givers: range
    takers: range


@dataclass(frozen=True)
class Goal:
    """What a collective over `ranks` ranks is to achieve; the pieces tile a row of elements, in order."""

    operation: Operation
    ranks: int
    pieces: Sequence[Piece]

    @property
    def elements(self) -> int:
        """How many elements the row has."""
        return self.pieces[-1].part.stop if self.pieces else 0


def tile(lengths: Iterable[int]) -> list[range]:
    """Ranges of these lengths, one after the other."""
    return [range(start, stop) for start, stop in pairwise(accumulate(lengths, initial=0))]


def even_parts(elements: int, ranks: int) -> list[range]:
    """Cut `elements` into one range per rank that differ by at most one; some are empty if there are too few."""
    return [range(elements * rank // ranks, elements * (rank + 1) // ranks) for rank in range(ranks)]


def all_reduce(elements: int, ranks: int) -> Goal:
    """Every rank gets the sum of all ranks' rows of `elements`."""
    return Goal(Operation.ALL_REDUCE, ranks, [Piece(range(elements), range(ranks), range(ranks))])


def reduce_scatter(lengths: Sequence[int]) -> Goal:
    """Rank r gets the sum of part r of all ranks' rows; the parts have these `lengths`, one per rank."""
    ranks = len(lengths)
    pieces = [Piece(part, range(ranks), _only(rank)) for rank, part in enumerate(tile(lengths))]
    return Goal(Operation.REDUCE_SCATTER, ranks, pieces)


def all_gather(lengths: Sequence[int]) -> Goal:
    """Every rank gets the parts of all ranks, one after the other; rank r gives ``lengths[r]`` elements."""
    ranks = len(lengths)
    pieces = [Piece(part, _only(rank), range(ranks)) for rank, part in enumerate(tile(lengths))]
    return Goal(Operation.ALL_GATHER, ranks, pieces)


def broadcast(elements: int, ranks: int, root: int) -> Goal:
    """Every rank gets the row of rank `root`."""
    return Goal(Operation.BROADCAST, ranks, [Piece(range(elements), _only(root), range(ranks))])


def all_to_all(lengths: Sequence[Sequence[int]]) -> Goal:
    """Rank b gets ``lengths[a][b]`` elements of each rank a. Who plans for itself may leave other pairs at 0."""
    ranks = len(lengths)
    parts = iter(tile(length for row in lengths for length in row))
    pieces = [Piece(next(parts), _only(a), _only(b)) for a in range(ranks) for b in range(ranks)]
    return Goal(Operation.ALL_TO_ALL, ranks, pieces)


def _only(rank: int) -> range:
    """One rank, as givers, takers and terms are written."""
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
        """The transfers of one step after the other."""
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
        """Follow one element of a piece through all steps; raises as `check`."""
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
    """The terms that a rank has summed after the sums of `arrived` have come to those of `own`; raises as `check`."""
    if arrived == [whole] and own != whole:
        return whole
    terms = sorted([own, *arrived], key=lambda terms: terms.start)
    if terms[0].start != 0 or any(a.stop != b.start for a, b in pairwise(terms)):
        raise ValueError(f"the terms {terms} do not follow each other in rank order")
    if any(len(term) > 1 for term in terms[1:]):
        raise ValueError(f"the terms {terms} would be summed in another order than rank order")
    return range(terms[-1].stop)


def one_shot(goal: Goal, segment: int) -> Schedule:
    """Every giver sends its term to every taker, also of an empty piece: the ranks still wait for each other then.

    Pieces that are summed by one taker are cut in segments of `segment` elements, one per step.
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
    """Rank j gets all terms of ``parts[j]``, in segments of `segment` elements, and sends their sums to all takers.

    The parts tile the goal's only piece, may be unequal, and may be empty.
    """
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
    """Segments of `segment` elements travel up the ranks as partial sums, if there is something to sum, and then around
    the ring of ranks.
    """
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
    """Cut a range in ranges of at most `segment` elements; an empty one stays one range."""
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
    """The part that each rank sums or passes on in two-shot: even ones, but none for the root of a broadcast, as it
    sends everything already.
    """
    if goal.operation is Operation.ALL_REDUCE or goal.ranks == 1:
        return even_parts(goal.elements, goal.ranks)
    root = goal.pieces[0].givers.start
    parts = even_parts(goal.elements, goal.ranks - 1)
    return [*parts[:root], range(0), *parts[root:]]
