"""Which units of a model every rank gets, so that a token takes the least time and nobody's memory overflows.

Cost model. Decoding reads attention, vocabulary and dense MLPs once per token, of the routed experts those that the
token has chosen, and all ranks wait for the slowest at every collective: after the attention and after the MLP of every
layer, and after the head. With the speed of a rank's device in bytes/s, units as large as its own encoding makes them,
and of the MLP's bytes the part that a token reads,

    step    = max_r attention_r / speed_r + read * max_r mlp_r / speed_r + max_r vocabulary_r / speed_r + collectives
    memory_r = fixed_r + attention_r + cache_r * cache_tokens + mlp_r + vocabulary_r

Collectives do not depend on the shares. A rank that has too much attention can therefore not make up for it with
less MLP: the best plan follows speed in each kind of unit by itself, within every node's memory. Where memory binds,
the MLP gives way: a byte of it costs no more time than one of the others, and with experts a fraction of that.

1.  Attention comes in the largest pieces and carries the KV cache, so its units are placed first: by speed if the rest
    fits around them; else nearest to a fluid of all bytes that follows speed up to each rank's memory; else a search
    over all ways to cut the attention finds the one that leaves most room.
2.  The *fill* follows speed within the room that the attention leaves: vocabulary units first, then those of the MLP.

Ranks may hold the model in different encodings. Speeds and rooms of every rank are then told in bytes of the first
one's (`_Rates`), in which a unit is as large everywhere.

A plan is found whenever there is one, up to `_Costs.rounding` bytes per rank, the price of whole fill units (and, where
encodings differ, whenever there is one that parts vocabulary and MLP alike). Every test for memory only gets easier to
pass with more memory: adding some never makes a plan impossible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from motley.protocol.mesh_pb2 import ModelProfile, Range, Share
from motley.protocol.wording import human_bytes


class PlanError(Exception):
    """The model does not fit; the message says per node what there is and what is needed."""


@dataclass(frozen=True)
class Candidate:
    """A node's offer for one rank."""

    name: str
    """The node's name, for messages; with what is to be said of its memory."""
    speed: float
    """Bytes of weights that it reads per second; 0: it gets no units."""
    memory: int
    """Bytes the rank may use."""
    share: float | None = None
    """Its part of the model, relative to the others', given by hand: it is followed instead of the speed, as far as
    memory goes (`motley.orchestrator.planning.cutting.by_hand` keeps to it)."""
    row_speed: float = 0.0
    """Bytes of weights that it multiplies by one row each second, where a step has many rows; 0: not measured."""
    call_s: float = 0.0
    """Seconds that a product takes besides reading its weights."""
    host_s: float = 0.0
    """Seconds in which what is summed gets from its GPU to the host and back; 0: it computes there, or nobody knows."""
    cache_speed: float = 0.0
    """Bytes of caches that it reads per second; 0: as of weights."""

    @property
    def takes_part(self) -> bool:
        """Whether the rank gets units, beside what every rank has."""
        return (self.speed if self.share is None else self.share) > 0


@dataclass(frozen=True)
class RankPlan:
    """What one rank gets; ranges are in units and may be empty."""

    attention_split: int
    attention: range
    mlp: range
    vocabulary: range
    weight_bytes: int
    memory_bytes: int
    """Weights, all of the KV caches, and what every rank needs."""
    fixed_bytes: int
    """Of `memory_bytes`, what every rank needs, whatever its share is."""
    layers: range | None = None
    """Those that it has these units of; None: all. Ranks of the same layers are a stage."""

    def to_share(self, quantisation: str = "") -> Share:
        """The plan as the control plane tells it.

        Args:
            quantisation: in which the rank holds its share; empty: in the first of the model's.
        """
        return Share(
            quantisation=quantisation,
            attention_split=self.attention_split,
            attention=Range(start=self.attention.start, stop=self.attention.stop),
            mlp=Range(start=self.mlp.start, stop=self.mlp.stop),
            vocabulary=Range(start=self.vocabulary.start, stop=self.vocabulary.stop),
            layers=Range(start=self.layers.start, stop=self.layers.stop) if self.layers else None,
        )


def plan_shares(profiles: Sequence[ModelProfile], candidates: Sequence[Candidate], cache_tokens: int) -> list[RankPlan]:
    """Give every candidate, in rank order, its share of the model.

    Args:
        profiles: of the model as each candidate would hold it; their units are the same.
        candidates: at least one; at least one takes part.
        cache_tokens: that the KV caches have room for, on every rank.

    Raises:
        PlanError: it does not fit.
    """
    split = attention_split(profiles[0], len(candidates))
    costs = [_Costs(profile, split, cache_tokens) for profile in profiles]
    room = [
        candidate.memory - profile.fixed_bytes if candidate.takes_part else 0
        for candidate, profile in zip(candidates, profiles, strict=True)
    ]
    if len(usable(profiles, candidates)) < len(candidates):
        raise PlanError(_explain(costs, candidates))
    attention = _place_attention(costs, candidates, room)
    if attention is not None:
        head, body = _pour_fill(costs, candidates, _fill_room(costs, room, attention))
    else:
        able = [rank for rank, own in enumerate(costs) if room[rank] >= own.whole_memory]
        if not able:
            raise PlanError(_explain(costs, candidates))
        speeds = _Rates.of([own.whole_memory for own in costs], candidates).speeds
        holder = max(able, key=lambda rank: (room[rank] - costs[rank].whole_memory, speeds[rank]))
        head = body = [float(rank == holder) for rank in range(len(room))]
        attention = consecutive(_apportion(costs[0].attention_units, head, speeds))
    units = profiles[0]
    by_body = _Rates.of([own.mlp_bytes for own in costs], candidates).speeds
    by_head = _Rates.of([own.vocabulary_bytes for own in costs], candidates).speeds
    of_layers = next((each for each in (body, head) if any(each)), [*map(float, map(len, attention))])
    mlp = consecutive(_apportion(units.mlp_units, of_layers, by_body))
    vocabulary = consecutive(_apportion(units.vocabulary_units, head, by_head))
    return [own.rank_plan(*ranges) for own, *ranges in zip(costs, attention, mlp, vocabulary, strict=True)]


def cut_in_units(
    profiles: Sequence[ModelProfile],
    cache_tokens: int,
    attention: Sequence[int],
    mlp: Sequence[int],
    vocabulary: Sequence[int],
) -> list[RankPlan]:
    """The plans of ranks that have so many units of each kind, whatever memory there is.

    Args:
        profiles: of the model as each rank holds it.
        attention: units of every rank, where each KV group is cut in `attention_split` for as many ranks.
    """
    split = attention_split(profiles[0], len(profiles))
    costs = [_Costs(profile, split, cache_tokens) for profile in profiles]
    ranges = zip(consecutive(attention), consecutive(mlp), consecutive(vocabulary), strict=True)
    return [own.rank_plan(*units) for own, units in zip(costs, ranges, strict=True)]


def attention_reads(profile: ModelProfile, units: range, split: int) -> tuple[int, int]:
    """What one token reads where a rank has some attention units, of all layers together: bytes of weights, and of the
    caches for every token that the sequence has already. Every KV group is cut in `split` units."""
    return _Costs(profile, split, 0).attention_bytes(units), cached_bytes(profile, units, split)


def attention_memory(profile: ModelProfile, units: range, split: int, cache_tokens: int) -> int:
    """Bytes that a rank needs for some attention units, caches for so many tokens among them. Every KV group is cut in
    `split` units."""
    return _Costs(profile, split, cache_tokens).attention_memory(units)


def cached_bytes(profile: ModelProfile, units: range, split: int, without_windows: bool = False) -> int:
    """Bytes that a token takes in the caches of a rank that has some attention units; perhaps without those of layers
    with a window."""
    costs = _Costs(profile, split, 0)
    windowed = profile.windowed_bytes_per_token * costs.kv_heads(units) if without_windows else 0
    return costs.cached_bytes(units) - windowed


def mlp_reads(profile: ModelProfile, rows: int = 1) -> float:
    """Bytes of an MLP unit that a step of some rows reads: of routed experts, those that a row has chosen, as if every
    row chose by chance."""
    if not profile.expert_layers or not profile.expert_count:
        return profile.mlp_unit_bytes
    routed = profile.mlp_unit_bytes - profile.trunk_mlp_unit_bytes
    chosen = 1 - (1 - profile.experts_per_token / profile.expert_count) ** rows
    return profile.trunk_mlp_unit_bytes + routed * chosen


def trunk_profile(profile: ModelProfile) -> ModelProfile:
    """The same model without its routed experts: what the ranks of the trunk hold where experts are elsewhere."""
    trunk = ModelProfile()
    trunk.CopyFrom(profile)
    trunk.mlp_unit_bytes, trunk.fixed_bytes = profile.trunk_mlp_unit_bytes, profile.trunk_fixed_bytes
    return trunk


def usable(profiles: Sequence[ModelProfile], candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that can hold at least what every rank needs; the others can take no part."""
    return [
        candidate
        for candidate, profile in zip(candidates, profiles, strict=True)
        if candidate.memory >= profile.fixed_bytes
    ]


def attention_split(profile: ModelProfile, ranks: int) -> int:
    """Units that each KV group of the attention is cut in for so many ranks: the fewest that give every rank one, else
    the most there may be."""
    enough = [split for split in profile.attention_splits if profile.kv_groups * split >= ranks]
    return min(enough, default=max(profile.attention_splits))


class _Costs:
    """A model's costs in bytes in one encoding, at one attention split and size of the caches."""

    def __init__(self, profile: ModelProfile, split: int, cache_tokens: int) -> None:
        self.profile = profile
        self.split = split
        self.cache_tokens = cache_tokens
        self.attention_units = profile.kv_groups * split
        self.mlp_bytes = profile.mlp_units * profile.mlp_unit_bytes
        self.vocabulary_bytes = profile.vocabulary_units * profile.vocabulary_unit_bytes
        self.fill_bytes = self.mlp_bytes + self.vocabulary_bytes
        self.rounding = profile.mlp_unit_bytes + profile.vocabulary_unit_bytes + 1
        """Apportioning gives a rank less than one unit of each kind too much; one byte for the floats."""

    @cached_property
    def whole_memory(self) -> int:
        """Bytes of a rank that has everything, without what every rank needs."""
        return self.attention_memory(range(self.attention_units)) + self.fill_bytes

    def kv_heads(self, units: range, groups: int = 1) -> int:
        """KV heads a rank stores, each of so many KV groups: where it has unequal parts of several, some are stored
        more than once, because grouped-query kernels want equally many query heads for each."""
        if not units or not groups:
            return 0
        each = self.split * groups
        cuts = range((units.start // each + 1) * each, units.stop, each)
        parts = [stop - start for start, stop in pairwise([units.start, *cuts, units.stop])]
        return len(units) // math.gcd(*parts)

    def attention_bytes(self, units: range) -> int:
        query = -(-self.profile.attention_query_bytes * len(units) // self.split)
        shared = self.profile.shared_kv_bytes * self.kv_heads(units, self.profile.groups_per_shared_head)
        return query + self.profile.attention_kv_bytes * self.kv_heads(units) + shared

    def cached_bytes(self, units: range) -> int:
        shared = self.profile.shared_cache_bytes_per_token * self.kv_heads(units, self.profile.groups_per_shared_head)
        return self.profile.cache_bytes_per_token * self.kv_heads(units) + shared

    def attention_memory(self, units: range) -> int:
        cache = self.cached_bytes(units) * self.cache_tokens
        states = -(-self.profile.state_bytes * len(units) // self.split)
        return self.attention_bytes(units) + cache + states

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
            fixed_bytes=profile.fixed_bytes,
        )


@dataclass(frozen=True)
class _Rates:
    """Some part of the model on every rank, in bytes of the first rank's encoding.

    Attributes:
        whole: the part is as large.
        speeds: bytes/s, or shares given by hand.
        scale: of a rank's own bytes, to make them such bytes.
    """

    whole: int
    speeds: Sequence[float]
    scale: Sequence[float]

    @classmethod
    def of(cls, sizes: Sequence[int], candidates: Sequence[Candidate]) -> _Rates:
        """
        Args:
            sizes: bytes of the part, as each rank would hold it.
        """
        scale = [sizes[0] / size if size and sizes[0] else 1.0 for size in sizes]
        speeds = [
            candidate.speed * own if candidate.share is None else candidate.share
            for candidate, own in zip(candidates, scale, strict=True)
        ]
        return cls(sizes[0], speeds, scale)

    def pour(self, room: Sequence[float]) -> list[float] | None:
        """How much of the part each rank gets: by speed, within its room. None: there is not room for all of it.

        Args:
            room: of every rank, in bytes of its own encoding.
        """
        caps = [
            free * own if speed > 0 else 0.0 for free, own, speed in zip(room, self.scale, self.speeds, strict=True)
        ]
        return pour(self.whole, self.speeds, caps) if math.fsum(caps) >= self.whole else None


def _place_attention(
    costs: Sequence[_Costs], candidates: Sequence[Candidate], room: Sequence[int]
) -> list[range] | None:
    """The attention units of every rank; None if, however they are cut, the fill may not fit around them."""
    least = min(own.attention_memory(range(own.attention_units)) for own in costs)
    if sum(room) < least + min(own.fill_bytes for own in costs):
        return None
    units = costs[0].attention_units
    speeds = _Rates.of([own.attention_bytes(range(units)) for own in costs], candidates).speeds
    fluid = _Rates.of([own.whole_memory for own in costs], candidates).pour(room)
    for weights in (speeds, fluid):
        if weights is None:
            continue
        ideal = consecutive(_apportion(units, weights, speeds))
        if _fits(costs, room, ideal):
            return ideal
    roomiest = _roomiest_attention(costs, room, [len(own) for own in ideal])
    return roomiest if roomiest is not None and _fits(costs, room, roomiest) else None


def _fill_room(costs: Sequence[_Costs], room: Sequence[int], attention: Sequence[range]) -> list[int]:
    """Bytes of fill that fit on each rank beside its attention, however units are rounded."""
    return [
        max(0, free - own.attention_memory(units) - own.rounding)
        for own, free, units in zip(costs, room, attention, strict=True)
    ]


def _fill_parts(costs: Sequence[_Costs]) -> tuple[int, list[int]]:
    """The fill in parts so small that a byte of each rank is a whole number of them: how many, and these numbers."""
    whole = math.lcm(*(max(1, own.fill_bytes) for own in costs))
    return whole, [whole // max(1, own.fill_bytes) for own in costs]


def _fits(costs: Sequence[_Costs], room: Sequence[int], attention: Sequence[range]) -> bool:
    each = all(own.attention_memory(units) <= free for own, free, units in zip(costs, room, attention, strict=True))
    whole, parts = _fill_parts(costs)
    left = _fill_room(costs, room, attention)
    return each and sum(free * part for free, part in zip(left, parts, strict=True)) >= whole


def _pour_fill(
    costs: Sequence[_Costs], candidates: Sequence[Candidate], left: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Weights of the vocabulary and of the MLP on every rank, within the bytes that are left for both."""
    vocabulary = _Rates.of([own.vocabulary_bytes for own in costs], candidates)
    head = vocabulary.pour(left)
    if head is not None:
        below = [free - taken / own for free, taken, own in zip(left, head, vocabulary.scale, strict=True)]
        body = _Rates.of([own.mlp_bytes for own in costs], candidates).pour(below)
        if body is not None:
            return head, body
    both = _Rates.of([own.fill_bytes for own in costs], candidates)
    alike = pour(both.whole, both.speeds, [free * own for free, own in zip(left, both.scale, strict=True)])
    return alike, alike


def _roomiest_attention(costs: Sequence[_Costs], room: Sequence[int], ideal: Sequence[int]) -> list[range] | None:
    """The cut of the attention that leaves most room for the fill, and is nearest to `ideal` among equals.

    Exact, by dynamic programming over ranks and units placed so far. None: some unit finds no place at all.
    """
    units = costs[0].attention_units
    whole, parts = _fill_parts(costs)
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for own, part, free, wanted in zip(costs, parts, room, ideal, strict=True):
        extended: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for start, (fill_room, misfit, counts) in best.items():
            for stop in range(start, units + 1):
                left = free - own.attention_memory(range(start, stop))
                if left < 0:
                    continue
                score = (
                    min(whole, fill_room + max(0, left - own.rounding) * part),
                    misfit - (stop - start - wanted) ** 2,
                    (*counts, stop - start),
                )
                extended[stop] = max(score, extended.get(stop, score))
        best = extended
    return consecutive(best[units][2]) if units in best else None


def pour(total: float, speeds: Sequence[float], caps: Sequence[float]) -> list[float]:
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
    if not total:
        return [0] * len(weights)
    whole = math.fsum(weights)
    quotas = [total * weight / whole for weight in weights]
    counts = [math.floor(quota) for quota in quotas]
    takers = [rank for rank, quota in enumerate(quotas) if quota > counts[rank]]
    takers.sort(key=lambda rank: ((counts[rank] + 1) / speeds[rank], rank))
    for rank in takers[: total - sum(counts)]:
        counts[rank] += 1
    return counts


def consecutive(counts: Sequence[int]) -> list[range]:
    """Consecutive ranges of the given lengths: they tile by construction."""
    return [range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]


def _explain(costs: Sequence[_Costs], candidates: Sequence[Candidate]) -> str:
    """What is missing where, if every node took its part by speed, or by the shares given by hand."""
    rates = _Rates.of([own.whole_memory for own in costs], candidates)
    speeds = math.fsum(rates.speeds)
    by = "speed" if candidates[0].share is None else "shares"
    fixed = [own.profile.fixed_bytes for own in costs]
    needed = [
        own.profile.fixed_bytes + math.ceil(own.whole_memory * speed / speeds)
        for own, speed in zip(costs, rates.speeds, strict=True)
    ]
    over = [candidate.memory - own for candidate, own in zip(candidates, fixed, strict=True)]
    units = rates.whole - math.fsum(
        max(0, own) * scale
        for candidate, own, scale in zip(candidates, over, rates.scale, strict=True)
        if candidate.takes_part
    )
    missing = max(0.0, units) - sum(min(0, own) for own in over)
    if missing > 0:
        verdict = f"{human_bytes(missing)} are missing in total"
        if len({own.whole_memory for own in costs}) > 1:
            verdict += f" (as {candidates[0].name} would hold it)"
    else:
        unit = max(own.attention_memory(range(1)) for own in costs)
        verdict = (
            f"the total would do, but not in whole pieces: an attention unit takes {human_bytes(unit)} and every"
            f" node needs {human_bytes(max(fixed))} for itself"
        )
    lines = [
        f"  {candidate.name}: {human_bytes(candidate.memory)} available, {human_bytes(need)} needed"
        + (f", {human_bytes(need - candidate.memory)} missing" if need > candidate.memory else "")
        for candidate, need in zip(candidates, needed, strict=True)
    ]
    return "\n".join(
        [
            f"{costs[0].profile.name} with caches of {costs[0].cache_tokens} tokens does not fit: {verdict}. By {by}:",
            *lines,
            "Free memory, or add a node.",
        ]
    )
