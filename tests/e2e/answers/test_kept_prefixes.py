"""Prompts that a session knew are known to the next one, after its ranks have ended and were started again."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from motley.cli.reaching.client import Client
from motley.daemon.rank.blocks.kept_file import FOLDER
from tests.e2e.losses.test_cache_holders import until
from tests.e2e.losses.test_survival import worker_of
from tests.e2e.processes import BUNDLED, Mesh

SYSTEM = "ROMEO:\nO, she doth teach the torches to burn bright!\n" * 8
ASKED = {"temperature": 0.9, "seed": 5, "max_tokens": 20, "ignore_eos": True, "logprobs": 3}


@asynccontextmanager
async def keeping(there: Mesh, **wanted: Any) -> AsyncIterator[tuple[Client, dict[str, Any]]]:
    """A session that keeps prefixes, which is closed at the end."""
    session = await there.session(keep_prefixes=True, **wanted)
    async with Client(there.url) as client:
        yield client, session
        await client.call("DELETE", f"/api/sessions/{session['id']}")


async def answer_of(client: Client, session: dict[str, Any], end: str) -> tuple[object, int, int]:
    """The answer to a long prompt with its log-probabilities, how many tokens of the prompt were found, and how many it
    has."""
    asked = {"model": session["name"], "prompt": SYSTEM + end, **ASKED}
    answer = await client.call("POST", "/v1/completions", asked)
    usage = answer["usage"]
    return answer["choices"], usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


async def until_kept(client: Client, session: dict[str, Any], blocks: int) -> None:
    """Wait until so many blocks are on the disks of all ranks."""

    def kept(told: dict[str, Any]) -> bool:
        return ((told["activity"] or {}).get("blocks_on_disk") or 0) >= blocks

    await until(client, f"/api/sessions/{session['id']}", kept)


@pytest.mark.parametrize("window", [pytest.param(0, marks=pytest.mark.soak), 40])
async def test_a_long_prompt_is_found_after_another_start(window: int, there: Mesh, tmp_path: Path) -> None:
    """To the bit, on uneven ranks, also where layers with a window have blocks of their own.
    What is damaged is computed again."""
    model = BUNDLED
    if window:
        model = shutil.copytree(BUNDLED, tmp_path / "windowed")
        config = json.loads((model / "config.json").read_text())
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
        (model / "config.json").write_text(json.dumps(config))
    plan = {"model": str(model), "nodes": ["a", "b"], "shares": [3, 2], "context": 512, "cache_tokens": 8192}
    async with keeping(there, **plan) as (client, session):
        first, found, whole = await answer_of(client, session, "JULIET:")
        assert found == 0
        await until_kept(client, session, whole // 32)
    async with keeping(there, **plan) as (client, session):
        again, found, _ = await answer_of(client, session, "JULIET:")
        assert (again, found) == (first, whole // 32 * 32)
        other, found, whole = await answer_of(client, session, "KING:")
        assert found >= whole // 32 * 32 > 150
    async with keeping(there, **plan, cache_format="fp16") as (client, session):
        assert (await answer_of(client, session, "JULIET:"))[1] == 0, "in another format it is nothing"
    for file in (there.cache / FOLDER).iterdir():
        content = bytearray(file.read_bytes())
        for at in range(1000, len(content), 5000):
            content[at] ^= 1
        file.write_bytes(content)
    async with keeping(there, **plan) as (client, session):
        again, found, _ = await answer_of(client, session, "KING:")
        assert (again, found) == (other, 0)


@pytest.mark.parametrize("name", [pytest.param("a", marks=pytest.mark.soak), "b"])
async def test_a_long_prompt_is_found_after_a_rank_has_died(name: str, there: Mesh) -> None:
    """Rank 0's process, or the other one: its successor has what was kept."""
    async with keeping(there, nodes=["a", "b"], shares=[3, 2], context=512) as (client, session):
        first, _, whole = await answer_of(client, session, "JULIET:")
        await until_kept(client, session, whole // 32)
        worker_of(there.nodes[name]).kill()
        where = f"/api/sessions/{session['id']}"
        await until(client, where, lambda told: (told["epoch"], told["state"]) == (2, "ready"))
        assert (await answer_of(client, session, "JULIET:"))[:2] == (first, whole // 32 * 32)
