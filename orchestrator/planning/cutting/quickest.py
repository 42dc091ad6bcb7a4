"""The shares with which some nodes take the least time for a token, in whole units and within everyone's memory. Pure.

A token takes the time of the slowest rank in the attention, in the MLPs and in the head, one after the other
(`motley.orchestrator.planning.cost`), so each kind of unit is given out by itself: every next unit to the rank that is
the soonest done with one more, which is exact. Where a KV group is cut in parts, a rank's time also depends on where
its range begins, and the best cut is found by dynamic programming.

If that fits everybody's memory, nothing is quicker. Else, where there are few ways to cut attention and vocabulary, all
of them are tried, and for each the MLP's units go, by the same rule as above, where there is still memory. Where there
are many, one begins with the shares of `plan_shares`, which misses only what fits to the byte, and attention and
vocabulary units are moved between two ranks as long as that helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate, combinations, islice, pairwise, product
from math import comb, floor, fsum, inf
from typing import NamedTuple

from motley.orchestrator.planning.cost import Pace, Workload
from motley.orchestrator.planning.cutting.shares import (
    Candidate,
    RankPlan,
    attention_memory,
    attention_split,
    consecutive,
    cut_in_units,
    plan_shares,
)
from motley.protocol.mesh_pb2 import ModelProfile

FEW_CUTS = 2000
"""So many ways to cut attention and vocabulary are all tried."""
TRIES = 400
"""Moves that are tried at most, where there are more."""

Counts = tuple[int, ...]
"""Units of one kind, by rank."""
Cut = tuple[Counts, Counts, Counts]
"""Units of attention, of MLPs and of the vocabulary."""


class _Attending(NamedTuple):
    """What some attention units come to on a rank.

    Attributes:
        memory: bytes.
        seconds: of a step.
    """

    memory: int
    seconds: float


def quickest_shares(
    profiles: Sequence[ModelProfile], candidates: Sequence[Candidate], cache_tokens: int, work: Workload
) -> list[RankPlan]:
    """The share of every candidate, in rank order, with which a step takes the least time.

    Args:
        profiles: of the model as each candidate would hold it; their units are the same.
        candidates: at least one, each with a speed.
        cache_tokens: that the KV caches have room for, on every rank.
        work: what they are to compute.

    Raises:
        PlanError: the model does not fit.
    """
    cutting = _Cutting(profiles, candidates, cache_tokens, work)
    plans = cutting.free()
    if all(plan.memory_bytes <= candidate.memory for plan, candidate in zip(plans, candidates, strict=True)):
        return plans
    return cutting.squeezed()


class _Cutting:
    """Ways to cut a model for some candidates, and what each takes."""

    def __init__(
        self, profiles: Sequence[ModelProfile], candidates: Sequence[Candidate], cache_tokens: int, work: Workload
    ) -> None:
        first = profiles[0]
        split = attention_split(first, len(candidates))
        self._profiles, self._candidates, self._cache_tokens = profiles, candidates, cache_tokens
        self._paces = [
            Pace(profile, candidate, split, work.rows, work.position)
            for profile, candidate in zip(profiles, candidates, strict=True)
        ]
        self._split = split
        self._attention_units = first.kv_groups * split
        self._mlp_units, self._vocabulary_units = first.mlp_units, first.vocabulary_units
        self._room = [
            candidate.memory - profile.fixed_bytes for profile, candidate in zip(profiles, candidates, strict=True)
        ]
        self._known: dict[tuple[int, range], _Attending] = {}
        """By rank and units: the same ones are tried beside ever others."""
        _, self._mlp_calls_s, self._head_calls_s = zip(*(pace.calls_s for pace in self._paces), strict=True)

    def free(self) -> list[RankPlan]:
        """The quickest shares, whatever memory there is."""
        mlp = _give_out(self._mlp_units, [pace.mlp_s for pace in self._paces], self._mlp_calls_s)
        head = _give_out(self._vocabulary_units, [pace.head_s for pace in self._paces], self._head_calls_s)
        assert mlp is not None
        assert head is not None
        return self._plans((self._free_attention(), mlp, head))

    def _free_attention(self) -> Counts:
        units = self._attention_units
        if self._split == 1:
            calls = [pace.calls_s[0] for pace in self._paces]
            unit = [pace.attention_s(range(1)) - own for pace, own in zip(self._paces, calls, strict=True)]
            counts = _give_out(units, unit, calls)
            assert counts is not None
            return counts
        best: list[tuple[float, Counts]] = [(inf if placed else 0.0, ()) for placed in range(units + 1)]
        for pace in self._paces:
            longer: list[tuple[float, Counts]] = [(inf, ())] * (units + 1)
            for start, (seconds, counts) in enumerate(best):
                for stop in range(start, units + 1) if seconds < inf else ():
                    taken = max(seconds, pace.attention_s(range(start, stop)))
                    if taken < longer[stop][0]:
                        longer[stop] = taken, (*counts, stop - start)
            best = longer
        return best[units][1]

    def squeezed(self) -> list[RankPlan]:
        """Shares for where memory binds; errors as `quickest_shares`."""
        ranks = len(self._candidates)
        ways = comb(self._attention_units + ranks - 1, ranks - 1) * comb(self._vocabulary_units + ranks - 1, ranks - 1)
        if ways <= FEW_CUTS:
            every = (_ways(units, ranks) for units in (self._attention_units, self._vocabulary_units))
            tried = (self._filled(attention, vocabulary) for attention, vocabulary in product(*every))
            seconds, cut = min(tried, key=lambda found: found[0])
            if seconds < inf:
                return self._plans(cut)
        start = plan_shares(self._profiles, self._candidates, self._cache_tokens)
        attention, mlp, vocabulary = (
            tuple(len(getattr(plan, kind)) for plan in start) for kind in ("attention", "mlp", "vocabulary")
        )
        best = self._seconds(self._attending(attention), mlp, vocabulary), (attention, mlp, vocabulary)
        tries, moved = 0, True
        while moved and tries < TRIES:
            moved = False
            attention, _, vocabulary = best[1]
            for counts in islice(_neighbours(attention, vocabulary), TRIES - tries):
                tries += 1
                found = self._filled(*counts)
                if found[0] < best[0] * (1 - 1e-9):
                    best, moved = found, True
                    break
        return self._plans(best[1])

    def _plans(self, cut: Cut) -> list[RankPlan]:
        return cut_in_units(self._profiles, self._cache_tokens, *cut)

    def _filled(self, attention: Counts, vocabulary: Counts) -> tuple[float, Cut]:
        """What it takes with these units and the quickest MLPs beside them; infinitely long if they do not fit."""
        attending = self._attending(attention)
        left = [
            room - own.memory - units * profile.vocabulary_unit_bytes
            for room, own, units, profile in zip(self._room, attending, vocabulary, self._profiles, strict=True)
        ]
        mlp = None
        if min(left) >= 0:
            most = [room // max(1, profile.mlp_unit_bytes) for room, profile in zip(left, self._profiles, strict=True)]
            mlp = _give_out(self._mlp_units, [pace.mlp_s for pace in self._paces], self._mlp_calls_s, most)
        if mlp is None:
            return inf, (attention, (), vocabulary)
        return self._seconds(attending, mlp, vocabulary), (attention, mlp, vocabulary)

    def _attending(self, attention: Counts) -> list[_Attending]:
        """By rank."""
        return [self._attends(rank, units) for rank, units in enumerate(consecutive(attention))]

    def _attends(self, rank: int, units: range) -> _Attending:
        if (rank, units) not in self._known:
            memory = attention_memory(self._profiles[rank], units, self._split, self._cache_tokens)
            self._known[rank, units] = _Attending(memory, self._paces[rank].attention_s(units))
        return self._known[rank, units]

    def _seconds(self, attending: Sequence[_Attending], mlp: Counts, vocabulary: Counts) -> float:
        """The seconds of the ranks that are the slowest at each kind of unit."""
        return fsum(
            (
                max(own.seconds for own in attending),
                max(pace.mlps_s(units) for pace, units in zip(self._paces, mlp, strict=True)),
                max(pace.heads_s(units) for pace, units in zip(self._paces, vocabulary, strict=True)),
            )
        )


def _give_out(
    total: int, unit_s: Sequence[float], calls_s: Sequence[float], most: Sequence[int] | None = None
) -> Counts | None:
    """Give every unit to the rank that is the soonest done with one more; None: there is no room for all.

    Args:
        unit_s: seconds that a rank takes for one...
        calls_s: ...and besides, however many it has.
        most: that each rank may have; None: any number.
    """
    caps = most or [total] * len(unit_s)
    if sum(caps) < total:
        return None
    counts = [min(cap, floor(part)) for cap, part in zip(caps, _fluid(total, unit_s, calls_s), strict=True)]
    queue = [
        ((counts[rank] + 1) * unit_s[rank] + calls_s[rank], rank) for rank, cap in enumerate(caps) if counts[rank] < cap
    ]
    heapify(queue)
    for _ in range(total - sum(counts)):
        _, rank = queue[0]
        counts[rank] += 1
        full = counts[rank] == caps[rank]
        heapreplace(queue, (inf if full else (counts[rank] + 1) * unit_s[rank] + calls_s[rank], rank))
    return tuple(counts)


def _fluid(total: int, unit_s: Sequence[float], calls_s: Sequence[float]) -> list[float]:
    """Parts of a unit that each rank has when all are done at the same time; the best whole ones are no fewer."""
    if not min(unit_s):
        return [0.0] * len(unit_s)
    ranks: Sequence[int] = range(len(unit_s))
    while True:
        done = (total + fsum(calls_s[rank] / unit_s[rank] for rank in ranks)) / fsum(1 / unit_s[rank] for rank in ranks)
        late = {rank for rank in ranks if calls_s[rank] > done}
        if not late:
            parts = ((max(0.0, done - own) / unit) for own, unit in zip(calls_s, unit_s, strict=True))
            return [part * (1 - 1e-12) for part in parts]
        ranks = [rank for rank in ranks if rank not in late]


def _ways(units: int, ranks: int) -> Iterator[Counts]:
    """All ways to give out some units."""
    for cuts in combinations(range(units + ranks - 1), ranks - 1):
        yield tuple(stop - start - 1 for start, stop in pairwise((-1, *cuts, units + ranks - 1)))


def _neighbours(attention: Counts, vocabulary: Counts) -> Iterator[tuple[Counts, Counts]]:
    """What one move between two ranks makes of units: of attention, of vocabulary, or of both in opposite ways."""
    pairs = [(one, other) for one in range(len(attention)) for other in range(len(attention)) if one != other]
    sizes = list(accumulate([1] * 6, lambda size, _: 4 * size))
    for one, other in pairs:
        if attention[one]:
            moved = _moved(attention, one, other, 1)
            yield moved, vocabulary
            for size in sizes:
                if vocabulary[other] >= size:
                    yield moved, _moved(vocabulary, other, one, size)
        for size in sizes:
            if vocabulary[one] >= size:
                yield attention, _moved(vocabulary, one, other, size)


def _moved(counts: Counts, source: int, target: int, units: int) -> Counts:
    changed = list(counts)
    changed[source] -= units
    changed[target] += units
    return tuple(changed)
