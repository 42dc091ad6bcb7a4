"""What guessing the next tokens is worth: the same answer with and without, by turns, on a mesh of this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from motley.bench.meshes.local_mesh import LocalMesh, MeshError, MeshSpec, Progress
from motley.protocol import worker_pb2 as wp

ROUNDS = 3
"""Times that the answer is measured each way; the median counts."""


@dataclass(frozen=True)
class Drafts:
    """What `motley bench drafts` tells of a prompt.

    Attributes:
        without_tokens_per_s: where every step computes one token.
        with_tokens_per_s: where guesses are verified.
        accepted_per_step: right guesses in a step, in the mean.
        same_text: whether all answers were the same.
    """

    without_tokens_per_s: float
    with_tokens_per_s: float
    accepted_per_step: float
    same_text: bool


async def measure_drafts(
    spec: MeshSpec, prompt: Sequence[int], tokens: int, progress: Progress | None = None
) -> Drafts:
    """Start the ranks and have them continue a prompt, greedily.

    Args:
        prompt: token ids.
        tokens: of each answer, at least 2; the time to the first one does not count.

    Raises:
        motley.bench.meshes.local_mesh.MeshError: a rank failed, or an answer came all at once.
        motley.orchestrator.planning.cutting.shares.PlanError: the shares cannot be cut.
    """
    rates: dict[bool, list[float]] = {False: [], True: []}
    texts: set[tuple[int, ...]] = set()
    accepted = 0
    async with LocalMesh(spec, progress) as mesh:
        for measured in range(ROUNDS + 1):  # first everyone warms up
            for drafts, own in rates.items():
                rate, said = await _answer(mesh, prompt, tokens, drafts)
                texts.add(tuple(token for each in said for token in each.ids))
                accepted = said[-1].accepted_drafts
                if measured:
                    own.append(rate)
    without, guessed = (sorted(own)[ROUNDS // 2] for own in (rates[False], rates[True]))
    return Drafts(round(without, 2), round(guessed, 2), round(accepted / (tokens - accepted), 2), len(texts) == 1)


async def _answer(
    mesh: LocalMesh, prompt: Sequence[int], tokens: int, drafts: bool
) -> tuple[float, Sequence[wp.Tokens]]:
    """Tokens per second of an answer after its first one, and all that was said.

    Raises:
        motley.bench.meshes.local_mesh.MeshError: a rank failed, or the answer came all at once.
    """
    heard: list[float] = []
    said = await mesh.decode(prompt, tokens, drafts=drafts, heard=lambda: heard.append(time.perf_counter()))
    if heard[-1] <= heard[0]:
        raise MeshError(f"{tokens} tokens came all at once; ask for more")
    return (len(heard) - 1) / (heard[-1] - heard[0]), said
