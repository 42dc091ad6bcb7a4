"""Time per token of a model cut over rank processes on this machine, and where it goes.

The physics: decoding one token reads every weight of every share once, but of experts only those that it has chosen,
and the caches and states of its sequence, so it takes at least ``these bytes / read bandwidth of the cores that read
them``: the bound (`motley.bench.measurements.speed.token_reads`). Ranks work side by side and wait for the slowest at
each of the ``2 * layers`` all-reduces of a token: what a token takes is ``compute + wire + wait`` on every rank, and
what lies between two computed steps: ranks tell of their logits, the leader chooses the token and tells the others.

The bandwidth is measured in the same run, by as many cores at once as the ranks use, over as many bytes as a token
reads, so that a large cache serves both alike, right before and right after the timed tokens; the larger counts, so
that a busy minute does not flatter the engine.
"""

from __future__ import annotations

import asyncio
import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from motley.bench.measurements.percentiles import percentiles
from motley.bench.measurements.speed.token_reads import token_reads
from motley.bench.meshes.local_mesh import LocalMesh, MeshSpec, Progress
from motley.daemon.machine.memory import memory_bandwidth
from motley.daemon.machine.processor import usable_cores
from motley.orchestrator.session_request import SessionRequest
from motley.protocol import mesh_pb2 as pb
from motley.protocol.wording import counted

WARM_UP = 5
"""Tokens, in a request of their own."""
BOUNDED_MB = 100
"""With fewer MB of weights per token, what surrounds reading them takes longer, and caches hold a part of them."""
PARTS = ("compute_ms", "wire_ms", "wait_ms")


@dataclass(frozen=True)
class Timeline:
    """How long every timed token took, in order, and where that time went.

    Attributes:
        step_ms: from the leader's decision on a step to the last rank's answer, of which it chooses the token.
        ranks: per rank, `PARTS` by name: where its time went.
    """

    step_ms: list[float]
    ranks: list[dict[str, list[float]]]


@dataclass(frozen=True)
class LatencyReport:
    """What `motley bench latency --json` prints; times in milliseconds, sizes in MB (1e6 bytes).

    The parts of a token (`compute_ms`, `wire_ms`, `wait_ms`) are means over tokens and ranks.

    Attributes:
        bandwidth_gb_s: measured read bandwidth of all cores in use together, GB/s (1e9 bytes).
        weights_mb_per_token: read for one token by all ranks together.
        caches_mb_per_token: the same of caches, at the mean of the timed positions, and of recurrent states, which are
            written too.
        bound_ms: all of these at this bandwidth.
        stages: of the ranks, how many each has, and how many layers; empty: every rank has a share of every layer.
        ratio: the median token over the bound; see `bounded`.
    """

    model: str
    engine: str
    quant: str
    cache_format: str
    exact: bool
    ranks: int
    prompt_tokens: int
    link: str
    stages: list[dict[str, int]]
    shares: list[dict[str, int]]
    ms_per_token: dict[str, float]
    bandwidth_gb_s: float
    weights_mb_per_token: float
    caches_mb_per_token: float
    bound_ms: float
    ratio: float
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
    timeline: Timeline

    @property
    def bounded(self) -> bool:
        """Whether the bound says something: the weights are so many that reading them is what takes time."""
        return self.weights_mb_per_token >= BOUNDED_MB

    @property
    def setting(self) -> str:
        """What tells this report from the others of a sweep, in words."""
        caches = f"{self.cache_format} caches" if self.cache_format != SessionRequest.cache_format else ""
        staged = f" in {len(self.stages)} stages" if self.stages else ""
        ranks, prompt = f"{counted(self.ranks, 'rank')}{staged}", f"prompt {self.prompt_tokens}"
        return ", ".join(filter(None, [self.quant, caches, ranks, prompt, self.link]))

    def mean_parts(self, rank: int | None = None) -> dict[str, float]:
        """What the mean token is made of, ms, on one rank or over all of them.

        ``lead`` is the rest: ranks tell of their logits, the leader chooses the token and announces the next step.
        """
        of = asdict(self) if rank is None else self.per_rank[rank]
        return with_lead({part: of[part] for part in PARTS}, self.ms_per_token["mean"])

    def token_parts(self, rank: int) -> list[dict[str, float]]:
        """What every token is made of on a rank, as `mean_parts`."""
        parts = self.timeline.ranks[rank]
        return [
            with_lead({part: parts[part][token] for part in PARTS}, step_ms)
            for token, step_ms in enumerate(self.timeline.step_ms)
        ]

    def as_json(self) -> dict[str, Any]:
        """What `motley bench latency --json` ends with: the report in dictionaries, lists and numbers."""
        return asdict(self)


def with_lead(parts: dict[str, float], whole: float) -> dict[str, float]:
    """`PARTS` of a step by short names, and ``lead``, what is left of the whole; all in ms."""
    lead = max(0.0, whole - sum(parts.values()))
    return {**{part.removesuffix("_ms"): value for part, value in parts.items()}, "lead": lead}


async def measure_sweep(
    specs: Sequence[MeshSpec], prompts: Sequence[int], tokens: int, vocabulary: int, progress: Progress | None = None
) -> list[LatencyReport]:
    """`measure_latency` of each of the specs, one after the other."""
    return [report for spec in specs for report in await measure_latency(spec, prompts, tokens, vocabulary, progress)]


async def measure_latency(
    spec: MeshSpec, prompts: Sequence[int], tokens: int, vocabulary: int, progress: Progress | None = None
) -> list[LatencyReport]:
    """Start the ranks, warm up, then time `tokens` greedy tokens after random prompts of each of the lengths.

    Raises:
        motley.bench.meshes.local_mesh.MeshError: a rank failed.
        motley.orchestrator.planning.cutting.shares.PlanError: the shares cannot be cut.
    """
    # No prompt begins like another: it would be found in the caches.
    warm, *texts = np.random.default_rng(0).integers(0, vocabulary, (1 + len(prompts), max(prompts))).tolist()
    async with LocalMesh(spec, progress) as mesh:
        await mesh.decode(warm[: min(prompts)], WARM_UP)
        return [await latency_of(mesh, text[:length], tokens) for text, length in zip(texts, prompts, strict=True)]


async def latency_of(
    mesh: LocalMesh, prompt: Sequence[int], tokens: int, heard: Callable[[], None] = lambda: None
) -> LatencyReport:
    """Time `tokens` greedy tokens after a prompt, in a mesh that is warm; `heard` is called for each.

    Raises:
        motley.bench.meshes.local_mesh.MeshError: a rank failed.
    """
    spec, ranks = mesh.spec, len(mesh.plans)
    cores = min(ranks * spec.threads, usable_cores())
    before = list(mesh.timing)
    shares = sum(ready.share_bytes for ready in mesh.ready)
    reads = token_reads(mesh.profile, mesh.plans, shares, len(prompt) + (tokens + 1) / 2)
    size = round(reads.whole)
    bandwidth = await asyncio.to_thread(memory_bandwidth, cores, size=size)
    said = await mesh.decode(prompt, tokens + 1, heard=heard)  # the first comes with the prompt
    bandwidth = max(bandwidth, await asyncio.to_thread(memory_bandwidth, cores, size=size))
    timeline = _timeline(mesh.timing, tokens)
    p50 = float(np.median(timeline.step_ms))
    ttft = next(tokens.prefill_s for tokens in said if tokens.ids)  # signs of life come before it
    bound_ms = 1e3 * reads.whole / bandwidth
    per_rank = [
        {**{part: _mean(rank[part]) for part in PARTS}, "collectives": _collectives(first, last)}
        for rank, first, last in zip(timeline.ranks, before, mesh.timing, strict=True)
    ]
    return LatencyReport(
        model=spec.model.name,
        engine=spec.engine,
        quant=spec.quantisation,
        cache_format=spec.cache_format,
        exact=spec.exact,
        ranks=ranks,
        prompt_tokens=len(prompt),
        link=spec.link,
        stages=[stage._asdict() for stage in spec.stages],
        shares=[
            {"attention": len(plan.attention), "mlp": len(plan.mlp), "vocabulary": len(plan.vocabulary)}
            for plan in mesh.plans
        ],
        ms_per_token={
            "mean": _mean(timeline.step_ms),
            **percentiles(timeline.step_ms),
        },
        bandwidth_gb_s=_round(bandwidth / 1e9),
        weights_mb_per_token=_round(reads.weights / 1e6),
        caches_mb_per_token=_round((reads.caches + reads.states) / 1e6),
        bound_ms=_round(bound_ms),
        ratio=_round(p50 / bound_ms),
        prefill_tokens_per_s=_round(len(prompt) / ttft),
        ttft_ms=_round(1e3 * ttft),
        **{part: _mean([rank[part] for rank in per_rank]) for part in PARTS},
        collectives_per_token=_mean([rank["collectives"] for rank in per_rank]),
        peak_rss_mb=[_round(timing.peak_rss_bytes / 1e6) for timing in mesh.timing],
        shard_mb=[_round(ready.share_bytes / 1e6) for ready in mesh.ready],
        load_s=[_round(ready.load_s) for ready in mesh.ready],
        per_rank=per_rank,
        timeline=timeline,
    )


def _timeline(timing: Sequence[pb.Timing], tokens: int) -> Timeline:
    """The latest `tokens` steps."""

    def latest(values: Sequence[float]) -> list[float]:
        return [_round(value) for value in values[-tokens:]]

    return Timeline(
        step_ms=latest(timing[0].step_ms),
        ranks=[{part: latest(getattr(rank, f"step_{part}")) for part in PARTS} for rank in timing],
    )


def _collectives(before: pb.Timing, after: pb.Timing) -> float:
    return _round((after.collectives - before.collectives) / (after.tokens - before.tokens))


def _mean(values: Sequence[float]) -> float:
    return _round(float(np.mean(values)))


def _round(value: float) -> float:
    return round(float(value), 3)


def write_csv(reports: Sequence[LatencyReport], path: Path) -> None:
    """Write a CSV file with a line per report, token and rank.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["quant", "ranks", "prompt_tokens", "link", "token", "rank", "step_ms", *PARTS])
        for report in reports:
            table.writerows(_csv_rows(report))


def _csv_rows(report: LatencyReport) -> Iterator[list[object]]:
    setting = [report.quant, report.ranks, report.prompt_tokens, report.link]
    for token, step_ms in enumerate(report.timeline.step_ms):
        for rank, parts in enumerate(report.timeline.ranks):
            yield [*setting, token, rank, step_ms, *(parts[part][token] for part in PARTS)]
