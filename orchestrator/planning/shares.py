"""Which units of a model every rank gets, so that a token takes the least time and nobody's memory overflows.

Cost model. Decoding reads every weight once per token, and all ranks wait for the slowest at every collective:
after the attention and after the MLP of every layer, and after the head. With the speed of a rank in bytes/s,

    step    = max_r attention_r / speed_r + max_r mlp_r / speed_r + max_r vocabulary_r / speed_r + collectives
    memory_r = fixed + attention_r + cache_r * context + mlp_r + vocabulary_r

Collectives do not depend on the shares. A rank that has too much attention can therefore not make up for it with
less MLP: the best plan follows speed in each kind of unit by itself, within every node's memory.

1.  Shares are treated as a fluid that follows speed up to each rank's memory; the others take what is left over.
2.  Attention comes in the largest pieces and carries the KV cache, so its units are placed first, nearest to the
    fluid. If the rest does not fit around them, a search over all ways to cut the attention finds the one that
    leaves most room.
3.  The *fill* (MLP and vocabulary units) follows speed within the room that the attention leaves.

A plan is found whenever there is one, up to `_Costs.rounding` bytes per rank, the price of whole fill units. Every
test for memory only gets easier to pass with more memory: adding some never makes a plan impossible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from motley.protocol.mesh_pb2 import ModelProfile, Range, Share


class PlanError(Exception):
    """The model does not fit; the message says per node what there is and what is needed."""


@dataclass(frozen=True)
class Candidate:
    """A node's offer for one rank."""

    name: str
    speed: float
    """Bytes of weights per second, or any weight that the share should follow; 0: no units."""
    memory: int
    """Bytes the rank may use."""


@dataclass(frozen=True)
class RankPlan:
    """What one rank gets; ranges are in units and may be empty."""

    attention_split: int
    attention: range
    mlp: range
    vocabulary: range
    weight_bytes: int
    memory_bytes: int
    """Weights, KV cache at full context, and what every rank needs."""

    def to_share(self) -> Share:
        return Share(
            attention_split=self.attention_split,
            attention=Range(start=self.attention.start, stop=self.attention.stop),
            mlp=Range(start=self.mlp.start, stop=self.mlp.stop),
            vocabulary=Range(start=self.vocabulary.start, stop=self.vocabulary.stop),
        )


def plan_shares(profile: ModelProfile, candidates: Sequence[Candidate], context: int) -> list[RankPlan]:
    """Give every candidate, in rank order, its share of the model.

    Args:
        candidates: at least one; at least one with a speed above 0.
        context: longest sequence, in tokens, whose KV cache must fit.

    Raises:
        PlanError: it does not fit.
    """
    costs = _Costs(profile, _attention_split(profile, len(candidates)), context)
    room = [candidate.memory - profile.fixed_bytes if candidate.speed > 0 else 0 for candidate in candidates]
    if min(candidate.memory for candidate in candidates) < profile.fixed_bytes:
        raise PlanError(_explain(costs, candidates))
    speeds = [candidate.speed for candidate in candidates]
    attention = _place_attention(costs, speeds, room)
    if attention is not None:
        fill = _pour(costs.fill_bytes, speeds, costs.fill_room(room, attention))
    else:
        holder = max(range(len(room)), key=lambda rank: (room[rank], speeds[rank]))
        if room[holder] < costs.whole_memory:
            raise PlanError(_explain(costs, candidates))
        fill = [float(rank == holder) for rank in range(len(room))]
        attention = _cut(_apportion(costs.attention_units, fill, speeds))
    mlp = _cut(_apportion(profile.mlp_units, fill, speeds))
    vocabulary = _cut(_apportion(profile.vocabulary_units, fill, speeds))
    return [costs.rank_plan(*ranges) for ranges in zip(attention, mlp, vocabulary, strict=True)]


def usable(profile: ModelProfile, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that can hold at least what every rank needs; the others can take no part."""
    return [candidate for candidate in candidates if candidate.memory >= profile.fixed_bytes]


def human_bytes(count: float) -> str:
    """``1.50 GB``: for messages; decimal units."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} bytes"


def _attention_split(profile: ModelProfile, ranks: int) -> int:
    """The smallest split that gives every rank a unit, else the largest there is."""
    enough = [split for split in profile.attention_splits if profile.kv_groups * split >= ranks]
    return min(enough, default=max(profile.attention_splits))


class _Costs:
    """A model's costs in bytes at one attention split and context."""

    def __init__(self, profile: ModelProfile, split: int, context: int) -> None:
        self.profile = profile
        self.split = split
        self.context = context
        self.attention_units = profile.kv_groups * split
        self.fill_bytes = (
            profile.mlp_units * profile.mlp_unit_bytes + profile.vocabulary_units * profile.vocabulary_unit_bytes
        )
        self.rounding = profile.mlp_unit_bytes + profile.vocabulary_unit_bytes + 1
        """Apportioning gives a rank less than one unit of each kind too much; one byte for the floats."""
        self.whole_memory = self.attention_memory(range(self.attention_units)) + self.fill_bytes

    def kv_heads(self, units: range) -> int:
        """KV heads a rank stores: where it has unequal parts of several groups, some are stored more than once,
        because grouped-query kernels want equally many query heads for each."""
        if not units:
            return 0
        cuts = range((units.start // self.split + 1) * self.split, units.stop, self.split)
        parts = [stop - start for start, stop in pairwise([units.start, *cuts, units.stop])]
        return len(units) // math.gcd(*parts)

    def attention_bytes(self, units: range) -> int:
        query = -(-self.profile.attention_query_bytes * len(units) // self.split)
        return query + self.profile.attention_kv_bytes * self.kv_heads(units)

    def attention_memory(self, units: range) -> int:
        cache = self.profile.cache_bytes_per_token * self.context * self.kv_heads(units)
        return self.attention_bytes(units) + cache

    def fill_room(self, room: Sequence[int], attention: Sequence[range]) -> list[int]:
        """Bytes of fill that surely fit beside the attention, whatever the rounding."""
        return [
            max(0, free - self.attention_memory(units) - self.rounding)
            for free, units in zip(room, attention, strict=True)
        ]

    def fits(self, room: Sequence[int], attention: Sequence[range]) -> bool:
        each = all(self.attention_memory(units) <= free for free, units in zip(room, attention, strict=True))
        return each and sum(self.fill_room(room, attention)) >= self.fill_bytes

    def rank_plan(self, attention: range, mlp: range, vocabulary: range) -> RankPlan:
        profile = self.profile
        fill = len(mlp) * profile.mlp_unit_bytes + len(vocabulary) * profile.vocabulary_unit_bytes
        return RankPlan(
            attention_split=self.split,
            attention=attention,
            mlp=mlp,
            vocabulary=vocabulary,
            weight_bytes=self.attention_bytes(attention) + fill,
            memory_bytes=profile.fixed_bytes + self.attention_memory(attention) + fill,
        )


def _place_attention(costs: _Costs, speeds: Sequence[float], room: Sequence[int]) -> list[range] | None:
    """Attention units of every rank, or None if the fill does not surely fit around any way to cut them."""
    if sum(room) < costs.whole_memory:
        return None
    fluid = _pour(costs.whole_memory, speeds, room)
    ideal = _cut(_apportion(costs.attention_units, fluid, speeds))
    if costs.fits(room, ideal):
        return ideal
    roomiest = _roomiest_attention(costs, room, [len(units) for units in ideal])
    return roomiest if roomiest is not None and costs.fits(room, roomiest) else None


def _roomiest_attention(costs: _Costs, room: Sequence[int], ideal: Sequence[int]) -> list[range] | None:
    """The cut of the attention that leaves most room for the fill, and is nearest to `ideal` among equals.

    Exact, by dynamic programming over ranks and units placed so far. None: some unit finds no place at all.
    """
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for free, wanted in zip(room, ideal, strict=True):
        extended: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for start, (fill_room, misfit, counts) in best.items():
            for stop in range(start, costs.attention_units + 1):
                left = free - costs.attention_memory(range(start, stop))
                if left < 0:
                    continue
                score = (
                    min(costs.fill_bytes, fill_room + max(0, left - costs.rounding)),
                    misfit - (stop - start - wanted) ** 2,
                    (*counts, stop - start),
                )
                extended[stop] = max(score, extended.get(stop, score))
        best = extended
    return _cut(best[costs.attention_units][2]) if costs.attention_units in best else None


def _pour(total: int, speeds: Sequence[float], caps: Sequence[int]) -> list[float]:
    """`total` bytes in proportion to `speeds`, but at most `caps`; the caps hold the total."""
    poured = [0.0] * len(caps)
    open_ranks = {rank for rank, speed in enumerate(speeds) if speed > 0}
    while open_ranks:
        level = (total - math.fsum(poured)) / math.fsum(speeds[rank] for rank in open_ranks)
        full = {rank for rank in open_ranks if speeds[rank] * level >= caps[rank]}
        for rank in full or open_ranks:
            poured[rank] = min(float(caps[rank]), speeds[rank] * level)
        if not full:
            break
        open_ranks -= full
    return poured


def _apportion(total: int, weights: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """`total` units in proportion to `weights`, exactly; each rank's number is its quota rounded down or up.

    The units that rounding down leaves over go where they cost least time: to the ranks that are the soonest done
    with one more (ties to the lower rank).
    """
    whole = math.fsum(weights)
    quotas = [total * weight / whole for weight in weights]
    counts = [math.floor(quota) for quota in quotas]
    takers = [rank for rank, quota in enumerate(quotas) if quota > counts[rank]]
    takers.sort(key=lambda rank: ((counts[rank] + 1) / speeds[rank], rank))
    for rank in takers[: total - sum(counts)]:
        counts[rank] += 1
    return counts


def _cut(counts: Sequence[int]) -> list[range]:
    """Consecutive ranges of the given lengths: they tile by construction."""
    return [range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]


def _explain(costs: _Costs, candidates: Sequence[Candidate]) -> str:
    """What is missing where, if every node took its part by speed."""
    profile = costs.profile
    speeds = sum(candidate.speed for candidate in candidates)
    needed = [
        profile.fixed_bytes + math.ceil(costs.whole_memory * candidate.speed / speeds) for candidate in candidates
    ]
    room = [candidate.memory - profile.fixed_bytes for candidate in candidates if candidate.speed > 0]
    missing = costs.whole_memory - sum(max(0, free) for free in room)
    if missing > 0:
        verdict = f"{human_bytes(missing)} are missing in total"
    else:
        unit = costs.attention_memory(range(1))
        verdict = (
            f"the total would do, but not in whole pieces: an attention unit takes {human_bytes(unit)} and every"
            f" node needs {human_bytes(profile.fixed_bytes)} for itself"
        )
    lines = [
        f"  {candidate.name}: {human_bytes(candidate.memory)} available, {human_bytes(need)} needed"
        + (f", {human_bytes(need - candidate.memory)} missing" if need > candidate.memory else "")
        for candidate, need in zip(candidates, needed, strict=True)
    ]
    return "\n".join(
        [
            f"{profile.name} with a context of {costs.context} tokens does not fit: {verdict}. By speed:",
            *lines,
            "Free memory, add a node, shorten the context, or quantise further.",
        ]
    )
