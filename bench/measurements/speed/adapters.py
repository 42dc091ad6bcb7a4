"""What adapters cost: requests at once with one each, and as many without, by turns, on a mesh of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from motley.bench.measurements.speed.latency import WARM_UP
from motley.bench.measurements.speed.throughput import answer_at_once
from motley.bench.meshes.local_mesh import LocalMesh, MeshSpec, Progress
from motley.bench.random_models.adapters import write_random_adapter
from motley.daemon.models.description.model import Model
from motley.protocol import mesh_pb2 as pb

ROUNDS = 3
"""Times that requests are answered each way; the median counts."""


@dataclass(frozen=True)
class Adapted:
    """What `motley bench adapters` tells of so many requests, each with an adapter of its own.

    Attributes:
        rank: of the adapters.
        tokens_per_s: of all requests together.
        x_none: that over what as many requests get without adapters.
        load_ms: until all ranks have loaded one whose file the system has in memory; the median.
    """

    adapters: int
    rank: int
    tokens_per_s: float
    x_none: float
    load_ms: float


async def measure_adapters(
    spec: MeshSpec,
    model: Model,
    counts: Sequence[int],
    ranks: Sequence[int],
    prompt: int,
    tokens: int,
    folder: Path,
    progress: Progress | None = None,
) -> list[Adapted]:
    """Start the mesh, and measure each number of adapters of each rank.

    Args:
        spec: has slots for one adapter more than the largest number.
        model: its own.
        prompt: random tokens in each prompt.
        tokens: of each answer.
        folder: where adapters are written.

    Raises:
        motley.bench.meshes.local_mesh.MeshError: a rank failed, or the answers are too short to overlap.
        motley.orchestrator.planning.cutting.shares.PlanError: the shares cannot be cut.
        OSError: adapters cannot be written.
    """
    rows = []
    async with LocalMesh(spec, progress) as mesh:
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, model.vocabulary, (max(counts), prompt)).tolist()
        await mesh.decode(prompts[0], WARM_UP)
        for rank in ranks:
            loaded: list[pb.Adapter] = []
            load_s: list[float] = []
            for count in counts:
                for number in range(len(loaded), count):
                    own = folder / f"{rank}-{number}"
                    await asyncio.to_thread(write_random_adapter, own, model, rank, number)
                    event = await mesh.pin_adapter(own)
                    loaded.append(pb.Adapter(fingerprint=event.fingerprint, source=str(own)))
                    load_s.append(event.load_s)
                rates: dict[bool, list[float]] = {False: [], True: []}
                for _ in range(ROUNDS):
                    for adapted, own_rates in rates.items():
                        each = loaded[:count] if adapted else None
                        own_rates.append(await answer_at_once(mesh, prompts[:count], tokens, each))
                without, with_them = (sorted(own)[ROUNDS // 2] for own in (rates[False], rates[True]))
                ratio, load = with_them / without, 1e3 * sorted(load_s)[len(load_s) // 2]
                rows.append(Adapted(count, rank, round(with_them, 2), round(ratio, 3), round(load, 2)))
            for adapter in loaded:
                mesh.unpin_adapter(adapter)
    return rows
