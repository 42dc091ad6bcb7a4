"""A model in stages, from processes to the text: as one rank writes it, whatever is asked at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from motley.bench.meshes.local_mesh import LocalMesh, MeshSpec, StageSpec
from motley.daemon.models.files import load_tokenizer
from motley.protocol import mesh_pb2 as pb

SHAKESPEARE = Path(__file__).parents[3] / "cli/models/shakespeare-2.6m"
PROMPTS = ["ROMEO:\nLook,", "JULIET:\nO " * 40, "First Citizen:\nBefore we proceed, before we proceed,"]
SAMPLED = pb.Sampling(temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.1, seed=7)


async def written(spec: MeshSpec) -> list[list[int]]:
    """What is written after each of the prompts, asked one after the other, and then again all at a time."""
    tokenizer = load_tokenizer(SHAKESPEARE)

    async def answer(mesh: LocalMesh, prompt: str, drafts: bool) -> list[int]:
        said = await mesh.decode(tokenizer.encode(prompt), 24, SAMPLED if prompt == PROMPTS[1] else None, drafts=drafts)
        return [token for tokens in said for token in tokens.ids]

    async with LocalMesh(spec) as mesh:
        alone = [await answer(mesh, prompt, drafts=False) for prompt in PROMPTS]
        assert await asyncio.gather(*(answer(mesh, prompt, drafts=True) for prompt in PROMPTS)) == alone
    return alone


@pytest.mark.soak
async def test_stages_write_what_one_rank_writes(tmp_path: Path) -> None:
    """Quantised, so to the bit; the first stage and the last one are two ranks, which exchange sums while several steps
    are under way."""
    one = MeshSpec(SHAKESPEARE, quantisation="int8", context=512, cache=tmp_path)
    staged = MeshSpec(
        SHAKESPEARE,
        weights=(1, 2, 1, 3, 2),
        stages=(StageSpec(2, 3), StageSpec(1, 1), StageSpec(2, 2)),
        quantisation="int8",
        context=512,
        cache=tmp_path,
    )
    assert await written(staged) == await written(one)
