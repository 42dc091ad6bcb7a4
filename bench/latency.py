"""Time per token of a model cut over rank processes on this machine.

The physics: decoding one token reads every weight of a rank's share once, so a rank needs at least
``share bytes / memory bandwidth``; ranks work side by side and wait for the slowest at each of the
``2 * layers`` all-reduces of a token. What a token takes is ``compute + wire + wait`` on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from motley.bench.local_mesh import LocalMesh, MeshSpec, Progress
from motley.protocol import mesh_pb2 as pb

WARM_UP = 5
"""Tokens, in a request of their own."""


@dataclass(frozen=True)
class LatencyReport:
    """What `motley bench latency --json` prints; times in milliseconds, sizes in MB (1e6 bytes).

    The parts of a token (`compute_ms`, `wire_ms`, `wait_ms`) are means over tokens and ranks.
    """

    engine: str
    quant: str
    exact: bool
    ranks: int
    shares: list[dict[str, int]]
    ms_per_token: dict[str, float]
    prefill_tokens_per_s: float
    ttft_ms: float
    compute_ms: float
    wire_ms: float
    wait_ms: float
    collectives_per_token: float
    peak_rss_mb: list[float]
    shard_mb: list[float]
    load_s: list[float]
    per_rank: list[dict[str, float]]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def measure_latency(
    spec: MeshSpec, prompt_tokens: int, tokens: int, vocabulary: int, progress: Progress | None = None
) -> LatencyReport:
    """Start the ranks, warm up, then time `tokens` greedy tokens after a prompt of `prompt_tokens` random ones.

    Raises:
        motley.bench.local_mesh.MeshError: a rank failed.
        motley.orchestrator.planning.shares.PlanError: the shares cannot be cut.
    """
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, vocabulary, prompt_tokens).tolist()
    async with LocalMesh(spec, progress) as mesh:
        await mesh.decode(prompt, WARM_UP)
        before = list(mesh.timing)
        said = await mesh.decode(prompt, tokens + 1)
        after = mesh.timing
        step_ms = np.array(after[0].step_ms)[-tokens:]
        ttft = said[0].prefill_s
        per_rank = [_per_token(first, last) for first, last in zip(before, after, strict=True)]
        return LatencyReport(
            engine=spec.engine,
            quant=spec.quantisation,
            exact=spec.exact,
            ranks=len(spec.weights),
            shares=[
                {"attention": len(plan.attention), "mlp": len(plan.mlp), "vocabulary": len(plan.vocabulary)}
                for plan in mesh.plans
            ],
            ms_per_token={
                "mean": _round(step_ms.mean()),
                **{f"p{q}": _round(np.percentile(step_ms, q)) for q in (50, 95, 99)},
            },
            prefill_tokens_per_s=_round(prompt_tokens / ttft),
            ttft_ms=_round(1e3 * ttft),
            compute_ms=_mean(per_rank, "compute_ms"),
            wire_ms=_mean(per_rank, "wire_ms"),
            wait_ms=_mean(per_rank, "wait_ms"),
            collectives_per_token=_mean(per_rank, "collectives"),
            peak_rss_mb=[_round(timing.peak_rss_bytes / 1e6) for timing in after],
            shard_mb=[_round(ready.share_bytes / 1e6) for ready in mesh.ready],
            load_s=[_round(ready.load_s) for ready in mesh.ready],
            per_rank=per_rank,
        )


def _per_token(before: pb.Timing, after: pb.Timing) -> dict[str, float]:
    tokens = after.tokens - before.tokens
    return {
        "compute_ms": _round(1e3 * (after.compute_s - before.compute_s) / tokens),
        "wire_ms": _round(1e3 * (after.wire_s - before.wire_s) / tokens),
        "wait_ms": _round(1e3 * (after.wait_s - before.wait_s) / tokens),
        "collectives": _round((after.collectives - before.collectives) / tokens),
    }


def _mean(per_rank: Sequence[dict[str, float]], key: str) -> float:
    return _round(float(np.mean([rank[key] for rank in per_rank])))


def _round(value: float) -> float:
    return round(float(value), 3)
