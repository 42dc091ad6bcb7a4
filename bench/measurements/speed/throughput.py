"""Tokens per second of a session that answers several requests at once.

Requests that are being answered are rows of one step: weights are read, and sums exchanged, once for all of them. So
the throughput rises with their number until arithmetic, not memory, is what a step waits for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from motley.bench.measurements.speed.latency import PARTS, WARM_UP, with_lead
from motley.bench.meshes.local_mesh import LocalMesh, MeshError, MeshSpec, Progress
from motley.protocol import mesh_pb2 as pb


@dataclass(frozen=True)
class Throughput:
    """What `motley bench throughput` tells of a number of requests.

    Attributes:
        tokens_per_s: of all requests together, while all are being answered.
        x_one: that over what one request gets.
        ms_per_token: how long each waits for its next one: a step.
        step_ms: what a step is made of, ms, the mean over ranks and over all steps, the few in which some requests are
            not answered yet or any more among them: ``compute``, ``wire``, ``wait`` and, as what is left of
            `ms_per_token`, ``lead``, in which tokens are chosen and told.
    """

    requests: int
    tokens_per_s: float
    x_one: float
    ms_per_token: float
    step_ms: Mapping[str, float]
    cache_format: str


async def measure_throughput(
    spec: MeshSpec,
    requests: Sequence[int],
    prompt: int,
    tokens: int,
    vocabulary: int,
    progress: Progress | None = None,
    sampling: pb.Sampling | None = None,
) -> list[Throughput]:
    """Start the ranks, warm up, then have each number of requests answered at once, with random prompts.

    Args:
        sampling: how tokens are chosen; None: greedily.

    Raises:
        motley.bench.meshes.local_mesh.MeshError: a rank failed, or the answers are too short to overlap.
        motley.orchestrator.planning.cutting.shares.PlanError: the shares cannot be cut.
    """
    async with LocalMesh(spec, progress) as mesh:
        await mesh.decode(np.random.default_rng(1).integers(0, vocabulary, prompt).tolist(), WARM_UP)
        return await throughput_of(mesh, requests, prompt, tokens, vocabulary, sampling)


async def throughput_of(
    mesh: LocalMesh,
    requests: Sequence[int],
    prompt: int,
    tokens: int,
    vocabulary: int,
    sampling: pb.Sampling | None = None,
) -> list[Throughput]:
    """Have each number of requests answered at once by a mesh that is warm; `sampling` as in `measure_throughput`.

    Raises:
        motley.bench.meshes.local_mesh.MeshError: a rank failed, or the answers are too short to overlap.
    """
    rng = np.random.default_rng(0)
    rows: list[Throughput] = []
    for count in requests:
        before = list(mesh.timing)
        prompts = rng.integers(0, vocabulary, (count, prompt)).tolist()
        rate = await answer_at_once(mesh, prompts, tokens, sampling=sampling)
        alone = rows[0].tokens_per_s / rows[0].x_one if rows else rate
        whole_ms = 1e3 * count / rate
        of_ranks = [_spent_ms(first, last) for first, last in zip(before, mesh.timing, strict=True)]
        parts = with_lead({part: float(np.mean([own[part] for own in of_ranks])) for part in PARTS}, whole_ms)
        step_ms = {part: round(value, 3) for part, value in parts.items()}
        told = round(rate, 2), round(rate / alone, 2), round(whole_ms, 2)
        rows.append(Throughput(count, *told, step_ms, mesh.spec.cache_format))
    return rows


def _spent_ms(before: pb.Timing, after: pb.Timing) -> dict[str, float]:
    """What a rank's mean step was made of meanwhile, by `PARTS`."""
    steps = max(1, after.steps - before.steps)
    seconds = after.compute_s - before.compute_s, after.wire_s - before.wire_s, after.wait_s - before.wait_s
    return {part: 1e3 * each / steps for part, each in zip(PARTS, seconds, strict=True)}


async def answer_at_once(
    mesh: LocalMesh,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    adapters: Sequence[pb.Adapter | None] | None = None,
    sampling: pb.Sampling | None = None,
) -> float:
    """Have all prompts answered at once; tokens per second while all of them are.

    Args:
        tokens: of each answer.
        adapters: of each request; None: none has any.
        sampling: of all requests; None: greedy.

    Raises:
        motley.bench.meshes.local_mesh.MeshError: a rank failed, or the answers are too short to overlap.
    """
    times: list[list[float]] = [[] for _ in prompts]

    async def one(prompt: Sequence[int], adapter: pb.Adapter | None, heard: list[float]) -> None:
        await mesh.decode(prompt, tokens, sampling, heard=lambda: heard.append(time.perf_counter()), adapter=adapter)

    await asyncio.gather(*map(one, prompts, adapters or [None] * len(prompts), times))
    begin, end = max(own[0] for own in times), min(own[-1] for own in times)
    if end <= begin:
        raise MeshError(f"answers of {tokens} tokens end before all prompts are computed; ask for longer ones")
    return sum(begin < at <= end for own in times for at in own) / (end - begin)
