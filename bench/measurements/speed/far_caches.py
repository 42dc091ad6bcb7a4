"""What a part of the caches elsewhere costs: one long context read and continued, with all of it in memory and without.

The same prompt and the same answer go through two meshes of this machine, one after the other. In the first, memory has
room for the whole context; in the second for a part of it, and the rest is on the disk of every rank, or in another
process, as on another node, or both. A warm answer comes first each time. Small files stay in the memory of the system,
so what is measured on a machine with memory to spare is the way to the disk, and not the disk.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from motley.bench.measurements.speed.latency import WARM_UP
from motley.bench.meshes.local_mesh import LocalMesh, MeshSpec, Progress


@dataclass(frozen=True)
class Place:
    """How fast a context is read and continued.

    Attributes:
        memory_tokens: what the caches have room for in memory.
        disk_tokens: what they have room for on disks.
        node_tokens: what they have room for on other nodes.
        prompt_tokens_per_s: how fast the prompt was read.
        ms_per_token: from a token of the answer to the next, in the mean.
    """

    memory_tokens: int
    disk_tokens: int
    node_tokens: int
    prompt_tokens_per_s: float
    ms_per_token: float


@dataclass(frozen=True)
class FarCaches:
    """What `motley bench caches` tells.

    Attributes:
        context: tokens of prompt and answer together.
        in_memory, elsewhere: all of it in memory, and a part elsewhere.
        x_prompt: the speed of reading with a part elsewhere, over that without.
        x_token: the time of a token with a part elsewhere, over that without.
        same_text: whether both answers were the same.
    """

    context: int
    in_memory: Place
    elsewhere: Place
    x_prompt: float
    x_token: float
    same_text: bool


async def measure_far_caches(
    spec: MeshSpec,
    memory_tokens: int,
    node_tokens: int,
    tokens: int,
    vocabulary: int,
    progress: Progress | None = None,
) -> FarCaches:
    """Answer a prompt that fills the context of `spec`, with all caches in memory and with as much as may be there.

    Args:
        memory_tokens: that the caches have room for in memory the second time; fewer than the context has.
        node_tokens: that they have room for on other nodes then, at most what is left; the others are on disks.
        tokens: of the answer, at least 2.
        vocabulary: token ids are drawn from so many.

    Raises:
        motley.bench.meshes.local_mesh.MeshError: a rank failed.
        motley.orchestrator.planning.cutting.shares.PlanError: the shares cannot be cut.
    """
    prompt = np.random.default_rng(0).integers(0, vocabulary, spec.context - tokens).tolist()
    on_disk = spec.context - memory_tokens - node_tokens
    far = replace(spec, cache_tokens=memory_tokens, disk_tokens=on_disk, node_tokens=node_tokens)
    near, near_text = await _answered(spec, prompt, tokens, progress)
    away, away_text = await _answered(far, prompt, tokens, progress)
    x_prompt = round(away.prompt_tokens_per_s / near.prompt_tokens_per_s, 2)
    x_token = round(away.ms_per_token / near.ms_per_token, 2)
    return FarCaches(spec.context, near, away, x_prompt, x_token, near_text == away_text)


async def _answered(
    spec: MeshSpec, prompt: Sequence[int], tokens: int, progress: Progress | None
) -> tuple[Place, list[int]]:
    """How fast a prompt is read and continued, and the answer's tokens."""
    times: list[float] = []
    async with LocalMesh(spec, progress) as mesh:
        await mesh.decode(prompt[-1:], WARM_UP)
        began = time.perf_counter()
        said = await mesh.decode(prompt, tokens, heard=lambda: times.append(time.perf_counter()))
    step_s = (times[-1] - times[0]) / (len(times) - 1)
    place = Place(
        memory_tokens=spec.memory_tokens,
        disk_tokens=spec.disk_tokens,
        node_tokens=spec.node_tokens,
        prompt_tokens_per_s=round(len(prompt) / (times[0] - began), 1),
        ms_per_token=round(1e3 * step_s, 3),
    )
    return place, [token for each in said for token in each.ids]
