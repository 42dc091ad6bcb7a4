"""How long a token takes on some ranks: the cost model of the planner, and of the forecast that people see. Pure.

All ranks compute a part of every layer and wait for the slowest at each sum, twice in a layer:

    token      = attention + mlp + head + wire
    attention  = max_r (weights_r / speed_r + cached_r * position / speed_r) + layers * ATTENTION_CALLS * call_r
    mlp        = max_r  weights_r / speed_r                                  + layers * MLP_CALLS * call_r
    head       = max_r  weights_r / speed_r                                  + HEAD_CALLS * call_r
    wire       = 2 * layers * sum + lead

where weights_r are bytes of rank r's share that a token reads, in all layers together, speed_r the bytes/s that its
device reads in this format, and call_r what a product takes besides. Layers are alike, so the slowest rank of one
layer is that of all. A step of several rows, of several requests or of a prompt, reads the weights once and multiplies
them by every row: it takes max(weights / speed, rows * weights / row_speed). Of routed experts it reads those that some
row has chosen, and multiplies each row by its own.

A *sum* is priced by what would compute it: the schedules of `motley.transport` are run on a network of the pairs'
latency and bandwidth, and the quickest algorithm (one-shot, two-shot or ring) is taken, as ranks do. Before and after
it, what is summed goes from GPUs to their hosts and back; the slowest counts. *lead* is what comes between two steps:
rank 0 hears the best candidates of all ranks, chooses, and tells them.

Ranks may form *stages*, of some layers each. A stage takes what ranks take that have a model of its layers, and hands
its rows on: a *hop*, to every rank of the next stage from one of its own. If several requests are under way they form
*waves*, one for each stage at most, so that all stages compute at a time, each for another wave. Then

    stage   = attention + mlp + head (of the last one) + 2 * its layers * sum, for the rows of a wave
    token   = max(sum of all stages + hops + lead, waves * the slowest stage)

A prompt's chunks follow each other through the stages.

Of that time a rank computes a part (`compute_s`, the mean over the ranks), waits for slower ones and other stages
(`wait_s`), and the rest goes by on the wire (`wire_s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from motley.orchestrator.planning.choosing.stages import own_profile, ranks_by_stage
from motley.orchestrator.planning.cutting.shares import Candidate, RankPlan, attention_reads, mlp_reads
from motley.protocol.mesh_pb2 import ModelProfile
from motley.transport.schedules.forecast import Network, choose
from motley.transport.schedules.schedule import all_reduce

ATTENTION_CALLS = 24
"""What a layer's attention takes besides reading its weights, in small operations: norm, rotary embedding, the
attention itself, the start of each product, what the engine does between them. Seen of a CPU's engine with TinyLlama's
shape."""
MLP_CALLS = 16
"""The same of a layer's MLP."""
HEAD_CALLS = 8
"""The same of the head."""
LEAD_S = 150e-6
"""Rank 0 chooses a token and decides on the next step for so long, in Python."""
POSITION = 128
"""Tokens that a sequence has already, where a token is forecast."""
PROMPT = 512
"""Tokens of the prompt whose first token is forecast."""
CHUNK = 128
"""Rows of a prompt that are computed, and summed, at a time."""
WIRE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0625}
"""Bytes that an element of a sum has on the wire, by the wire's format (`transport/formats.py`)."""


@dataclass(frozen=True)
class Workload:
    """What ranks are to compute.

    Attributes:
        rows: of a step: one for each request that is under way.
        position: tokens that each sequence has already.
        prompt: tokens of a prompt.
        wire: how sums travel, one of `WIRE_BYTES`.
    """

    rows: int = 1
    position: int = POSITION
    prompt: int = PROMPT
    wire: str = "fp32"


@dataclass(frozen=True)
class Forecast:
    """What is expected of some ranks, in seconds.

    Attributes:
        compute_s, wire_s, wait_s: of a token, see above; of a step with a row for each request, if there are several.
        first_s: from a prompt's arrival to its answer's first token.
    """

    compute_s: float
    wire_s: float
    wait_s: float
    first_s: float

    @property
    def token_s(self) -> float:
        """The seconds from a token to the next."""
        return self.compute_s + self.wire_s + self.wait_s


def forecast(
    profiles: Sequence[ModelProfile],
    candidates: Sequence[Candidate],
    plans: Sequence[RankPlan],
    network: Network,
    work: Workload,
) -> Forecast:
    """What to expect of ranks with such shares.

    Args:
        profiles, candidates, plans: by rank.
        network: of the ranks' links; of one rank, what it says does not matter.
    """
    stages = [_Stage.of(ranks, profiles, candidates, plans, network) for ranks in ranks_by_stage(plans)]
    waves = min(len(stages), work.rows)
    rows = -(-work.rows // waves)
    lead = lead_s(network, range(len(plans)))
    steps = [stage.step_s(rows, work.position, work.wire) for stage in stages]
    hops = [_hop_s(network, one.ranks, other.ranks, rows, profiles[0]) for one, other in pairwise(stages)]
    through = sum(step.slowest + step.wire for step in steps)
    busiest = max(step.slowest + step.wire for step in steps)
    token = max(through + sum(hops) + lead, waves * busiest)
    compute = waves * sum(step.all_ranks for step in steps) / len(plans)
    wire = min(token - compute, sum(step.wire for step in steps) + sum(hops) + lead)
    return Forecast(compute, wire, token - compute - wire, _first_s(stages, network, work, lead))


class _Step(NamedTuple):
    """Seconds of a step in one stage: of its slowest ranks, of all ranks together, and of its sums."""

    slowest: float
    all_ranks: float
    wire: float


@dataclass(frozen=True)
class _Stage:
    """Some ranks, with the costs of their layers."""

    ranks: range
    profiles: Sequence[ModelProfile]
    candidates: Sequence[Candidate]
    plans: Sequence[RankPlan]
    network: Network

    @classmethod
    def of(
        cls,
        ranks: range,
        profiles: Sequence[ModelProfile],
        candidates: Sequence[Candidate],
        plans: Sequence[RankPlan],
        network: Network,
    ) -> _Stage:
        """Some of all ranks; arguments as of `forecast`."""
        own = [own_profile(profiles[rank], plans[rank]) for rank in ranks]
        there = network.among(ranks) if len(ranks) < len(plans) else network
        return cls(ranks, own, candidates[ranks.start : ranks.stop], plans[ranks.start : ranks.stop], there)

    def step_s(self, rows: int, position: int, wire: str) -> _Step:
        """What a step of so many rows takes."""
        parts = _parts(self.profiles, self.candidates, self.plans, rows, position)
        sums = sums_s(self.profiles[0], self.network, self.candidates, rows, wire)
        return _Step(sum(map(max, zip(*parts, strict=True))), sum(map(sum, parts)), sums)

    def chunk_s(self, rows: int, wire: str) -> float:
        """What a chunk of a prompt takes, without the head."""
        parts = _parts(self.profiles, self.candidates, self.plans, rows, 0)
        computing = max(own[0] for own in parts) + max(own[1] for own in parts)
        return computing + sums_s(self.profiles[0], self.network, self.candidates, rows, wire)

    def head_s(self) -> float:
        """What the head takes for the last row of a prompt."""
        return max(own[2] for own in _parts(self.profiles, self.candidates, self.plans, 1, 0))


def _first_s(stages: Sequence[_Stage], network: Network, work: Workload, lead: float) -> float:
    """Seconds from a prompt's arrival to its answer's first token: its chunks follow each other through the stages."""

    def each_s(rows: int) -> list[float]:
        profile = stages[0].profiles[0]
        hops = [_hop_s(network, one.ranks, other.ranks, rows, profile) for one, other in pairwise(stages)]
        return [stage.chunk_s(rows, work.wire) + hop for stage, hop in zip(stages, [*hops, 0.0], strict=True)]

    chunks = [min(CHUNK, work.prompt - done) for done in range(0, work.prompt, CHUNK)]
    taken = {rows: each_s(rows) for rows in set(chunks)}
    last = taken[chunks[-1]]
    return LEAD_S + sum(max(taken[rows]) + lead for rows in chunks) + sum(last) - max(last) + stages[-1].head_s()


def _hop_s(network: Network, ranks: range, following: range, rows: int, profile: ModelProfile) -> float:
    """Seconds in which the rows of a step get from one stage to the next: each of its ranks hears one of the first, and
    they take turns (`motley.daemon.rank.passage`)."""
    elements, seconds = rows * profile.hidden * (1 + profile.further_streams), 0.0
    for place, source in enumerate(ranks):
        targets = following[place :: len(ranks)]
        if targets:
            wire = sum(4 * elements / network.bandwidth[source][target] for target in targets)
            farthest = max(network.latency[source][target] for target in targets)
            seconds = max(seconds, wire + farthest + 2 * len(targets) * network.frame_s)
    return seconds


class Pace:
    """How long one rank takes for its parts of a step, all layers together.

    Attributes:
        calls_s: seconds that its attention, its MLP and its head take besides the bytes of its units.
        mlp_s, head_s: seconds that an MLP unit, and one of the vocabulary, takes besides.
    """

    def __init__(self, profile: ModelProfile, candidate: Candidate, split: int, rows: int, position: int) -> None:
        """
        Args:
            split: units that each KV group of the attention is cut in.
            rows: of the step.
            position: tokens that each of its sequences has already.
        """
        call, seconds = candidate.call_s, 1 / candidate.speed
        head = HEAD_CALLS if profile.vocabulary_units else 0
        self.calls_s = profile.layers * ATTENTION_CALLS * call, profile.layers * MLP_CALLS * call, head * call
        self._each_s = max(seconds, rows / candidate.row_speed) if candidate.row_speed else seconds
        self._cached_s = rows * position / (candidate.cache_speed or candidate.speed)
        self._profile, self._split = profile, split
        self.mlp_s = mlp_reads(profile, rows) * seconds
        if candidate.row_speed:
            self.mlp_s = max(self.mlp_s, mlp_reads(profile) * rows / candidate.row_speed)
        self.head_s = profile.vocabulary_unit_bytes * self._each_s

    def attention_s(self, units: range) -> float:
        """Seconds of its attention, if it has these units of it."""
        weights, cached = attention_reads(self._profile, units, self._split)
        return weights * self._each_s + cached * self._cached_s + self.calls_s[0]

    def mlps_s(self, units: int) -> float:
        """Seconds of its MLP, if it has so many units of it."""
        return units * self.mlp_s + self.calls_s[1]

    def heads_s(self, units: int) -> float:
        """Seconds of its head, if it has so many units of the vocabulary."""
        return units * self.head_s + self.calls_s[2]

    def parts_s(self, plan: RankPlan) -> tuple[float, float, float]:
        """Seconds of its attention, its MLP and its head."""
        return self.attention_s(plan.attention), self.mlps_s(len(plan.mlp)), self.heads_s(len(plan.vocabulary))


def _parts(
    profiles: Sequence[ModelProfile],
    candidates: Sequence[Candidate],
    plans: Sequence[RankPlan],
    rows: int,
    position: int,
) -> list[tuple[float, float, float]]:
    """By rank, the seconds that its attention, its MLP and its head take for a step."""
    each = zip(profiles, candidates, plans, strict=True)
    return [
        Pace(profile, candidate, plan.attention_split, rows, position).parts_s(plan)
        for profile, candidate, plan in each
    ]


def sums_s(profile: ModelProfile, network: Network, candidates: Sequence[Candidate], rows: int, wire: str) -> float:
    """Seconds of a step that go by in the sums of all layers."""
    if len(candidates) == 1:
        return 0.0
    to_hosts = max(each.host_s for each in candidates)
    return 2 * profile.layers * (sum_s(profile.hidden * rows, WIRE_BYTES[wire], _Key(network)) + to_hosts)


def lead_s(network: Network, ranks: Sequence[int]) -> float:
    """Seconds between two steps, led by the first of some ranks."""
    first, *others = ranks
    farthest = max((network.latency[first][other] for other in others), default=0.0)
    return LEAD_S + 2 * farthest + 4 * len(others) * network.frame_s


class _Key:
    """A network that can be looked up: networks of equal numbers are equal."""

    def __init__(self, network: Network) -> None:
        self.network = network
        rows = (tuple(map(tuple, matrix)) for matrix in (network.latency, network.bandwidth))
        self._key = (*rows, network.frame_s, network.byte_s, str(network.crowds))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._key == other._key


@lru_cache(maxsize=4096)
def sum_s(elements: int, itemsize: float, key: _Key) -> float:
    """Seconds of an all-reduce of so many float32 values, as transport would do it."""
    network = key.network
    return choose(all_reduce(elements, len(network.latency)), 4, network, wire_itemsize=itemsize).seconds
