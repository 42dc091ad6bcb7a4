"""How much longer answers wait for their next tokens while a long prompt of somebody else is read.

Several requests are being answered; in the midst of that another one comes, whose prompt is long. The prompt is read in
pieces, beside a token of every answer in each step, and how large the pieces are decides how much later those tokens
come. Held against the gaps between tokens of the same answers before the prompt came and after it was read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from motley.bench.measurements.percentiles import percentiles
from motley.bench.measurements.speed.latency import WARM_UP
from motley.bench.meshes.local_mesh import LocalMesh, MeshError, MeshSpec, Progress

LEAST_TOKENS = 8
"""Of an answer; a quarter of it comes before the prompt does."""


@dataclass(frozen=True)
class Reading:
    """What `motley bench reading` tells.

    Attributes:
        requests: that were being answered.
        prompt_tokens: of the prompt that was read meanwhile.
        read_s: from when that came to the first token of its answer, in seconds.
        gap_ms: between a token and the next one of the same answer, by percentile, while nothing was read.
        gap_while_reading_ms: the same while the prompt was read.
        x_p99: the 99th percentile of the gaps while it was read, over that of the others.
    """

    requests: int
    prompt_tokens: int
    cache_format: str
    read_s: float
    gap_ms: dict[str, float]
    gap_while_reading_ms: dict[str, float]
    x_p99: float


async def measure_reading(
    spec: MeshSpec,
    requests: int,
    prompt: int,
    tokens: int,
    read: int,
    vocabulary: int,
    progress: Progress | None = None,
) -> Reading:
    """Start the ranks, warm up, have `requests` answered, and a long prompt read in the midst of that.

    Args:
        prompt: tokens of the prompt of each request.
        tokens: of each answer; at least `LEAST_TOKENS`.
        read: tokens of the long prompt.

    Raises:
        motley.bench.meshes.local_mesh.MeshError: a rank failed, or the answers end before the long prompt is read.
        motley.orchestrator.planning.cutting.shares.PlanError: the shares cannot be cut.
    """
    rng = np.random.default_rng(0)
    long = rng.integers(0, vocabulary, read).tolist()
    prompts = rng.integers(0, vocabulary, (requests, prompt)).tolist()
    async with LocalMesh(spec, progress) as mesh:
        await mesh.decode(rng.integers(0, vocabulary, prompt).tolist(), WARM_UP)
        return await _read_meanwhile(mesh, prompts, tokens, long)


async def _read_meanwhile(
    mesh: LocalMesh, prompts: Sequence[Sequence[int]], tokens: int, long: Sequence[int]
) -> Reading:
    times: list[list[float]] = [[] for _ in prompts]
    under_way = asyncio.Event()
    """Every answer has a quarter of its tokens."""

    async def answer(prompt: Sequence[int], own: list[float]) -> None:
        def heard() -> None:
            own.append(time.perf_counter())
            if all(len(each) >= tokens // 4 for each in times):
                under_way.set()

        await mesh.decode(prompt, tokens, heard=heard)

    async def read() -> tuple[float, float]:
        await under_way.wait()
        came = time.perf_counter()
        await mesh.decode(long, 1)
        return came, time.perf_counter()

    try:
        async with asyncio.TaskGroup() as group:
            for prompt, own in zip(prompts, times, strict=True):
                group.create_task(answer(prompt, own))
            reading = group.create_task(read())
    except* MeshError as errors:
        raise MeshError(str(errors.exceptions[0])) from errors
    came, ended = reading.result()
    if ended >= min(own[-1] for own in times):
        raise MeshError(f"answers of {tokens} tokens end before {len(long)} tokens are read; ask for longer answers")
    within, without = _gaps_ms(times, came, ended)
    return Reading(
        requests=len(prompts),
        prompt_tokens=len(long),
        cache_format=mesh.spec.cache_format,
        read_s=round(ended - came, 3),
        gap_ms=percentiles(without),
        gap_while_reading_ms=percentiles(within),
        x_p99=round(float(np.percentile(within, 99) / np.percentile(without, 99)), 2),
    )


def _gaps_ms(times: Sequence[Sequence[float]], came: float, ended: float) -> tuple[list[float], list[float]]:
    """The gaps in which something was read, from `came` to `ended`, and the others; all while all are being answered.

    Args:
        times: when the tokens of each answer came, in seconds.
    """
    begin, end = max(own[0] for own in times), min(own[-1] for own in times)
    within: list[float] = []
    without: list[float] = []
    for own in times:
        for before, after in pairwise(own):
            if begin <= before and after <= end:
                (within if before < ended and after > came else without).append(1e3 * (after - before))
    return within, without
