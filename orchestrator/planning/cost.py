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
them by every row: it takes max(weights / speed, rows * weights / row_speed).

A *sum* is priced by what would compute it: the schedules of `motley.transport` are run on a network of the pairs'
latency and bandwidth, and the quickest algorithm (one-shot, two-shot or ring) is taken, as ranks do. *lead* is what
comes between two steps: rank 0 hears the best candidates of all ranks, chooses, and tells them.

Of that time a rank computes a part (`compute_s`, the mean over the ranks), waits for slower ones (`wait_s`), and the
rest goes by on the wire (`wire_s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from motley.orchestrator.planning.shares import Candidate, RankPlan, attention_reads, mlp_reads
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
WIRE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.03}
"""Bytes that an element of a sum has on the wire, by the wire's format."""


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
    step = _parts(profiles, candidates, plans, work.rows, work.position)
    slowest = sum(map(max, zip(*step, strict=True)))
    mean = sum(map(sum, step)) / len(step)
    wire = wire_s(profiles[0], network, len(plans), work.rows, work.wire)
    chunks = [min(CHUNK, work.prompt - done) for done in range(0, work.prompt, CHUNK)]
    first = LEAD_S
    for rows in set(chunks):
        parts = [(own[0], own[1]) for own in _parts(profiles, candidates, plans, rows, 0)]
        chunk = sum(map(max, zip(*parts, strict=True))) + wire_s(profiles[0], network, len(plans), rows, work.wire)
        first += chunks.count(rows) * chunk
    return Forecast(mean, wire, slowest - mean, first + max(own[2] for own in step))


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
        self.calls_s = profile.layers * ATTENTION_CALLS * call, profile.layers * MLP_CALLS * call, HEAD_CALLS * call
        self._each_s = max(seconds, rows / candidate.row_speed) if candidate.row_speed else seconds
        self._cached_s = rows * position * seconds
        self._profile, self._split = profile, split
        self.mlp_s = mlp_reads(profile) * self._each_s
        self.head_s = profile.vocabulary_unit_bytes * self._each_s

    def attention_s(self, units: range) -> float:
        """Seconds of its attention, if it has these units of it."""
        weights, cached = attention_reads(self._profile, units, self._split)
        return weights * self._each_s + cached * self._cached_s + self.calls_s[0]

    def parts_s(self, plan: RankPlan) -> tuple[float, float, float]:
        """Seconds of its attention, its MLP and its head."""
        mlp, head = len(plan.mlp) * self.mlp_s, len(plan.vocabulary) * self.head_s
        return self.attention_s(plan.attention), mlp + self.calls_s[1], head + self.calls_s[2]


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


def wire_s(profile: ModelProfile, network: Network, ranks: int, rows: int, wire: str) -> float:
    """Seconds of a step that go by on the wire: the sums of all layers, and what comes between two steps."""
    if ranks == 1:
        return LEAD_S
    seconds = sum_s(profile.hidden * rows, WIRE_BYTES[wire], _Key(network))
    return 2 * profile.layers * seconds + lead_s(network, range(ranks))


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
