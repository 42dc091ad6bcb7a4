"""Adapters while experts are on hosts: texts are those of sliced experts, also when a host dies meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from motley.bench.random_models.writing import synthesise
from motley.cli.errors import CliError
from motley.cli.reaching.client import Client
from motley.daemon.models.files import open_model
from motley.orchestrator.known_models.shapes import SHAPES
from tests.adapters.adapted import write_adapter
from tests.e2e.answers.test_experts import GREEDY, SMALL, close, session
from tests.e2e.processes import Mesh, mesh

RANK = 4


async def text_of(there: Mesh, adapter: str, victim: str = "") -> str:
    """The greedy answer with an adapter; after ten pieces of it, a node is killed if one is given."""
    pieces: list[str] = []
    async with Client(there.url) as client:
        async for event in client.stream("/v1/completions", GREEDY | ({"adapter": adapter} if adapter else {})):
            pieces += [choice["text"] for choice in event["choices"]]
            if victim and len(pieces) >= 10:
                await there.nodes[victim].kill()
                victim = ""
    return "".join(pieces)


async def test_what_is_not_on_hosts_may_be_adapted(tmp_path: Path) -> None:
    model = tmp_path / "moe"
    synthesise(SHAPES["mixtral-quarter"] | SMALL, model)
    with open_model(model) as opened:
        adapters = {
            name: write_adapter(tmp_path / name, opened.model, seed, RANK)
            for seed, name in enumerate(("songs", "poems"))
        }
        experts = write_adapter(tmp_path / "experts", opened.model, 3, RANK, experts=True)
    room: dict[str, Any] = {"adapters": 1, "adapter_rank": RANK}
    texts: dict[str, list[str]] = {}
    async with mesh(tmp_path, *"abc") as there:
        for layout in (
            {"nodes": ["a"]},
            {
                "experts": "parallel",
                "nodes": ["a", "b", "c"],
                "trunk": 2,
                "replicas": 2,
                "engines": dict.fromkeys("ab", "onnxruntime"),
            },
        ):
            made = await session(there, model, **room, **layout)
            assert made["experts"] == layout.get("experts", "sliced")
            async with Client(there.url) as client:
                for name, folder in adapters.items():
                    await client.add_adapter("moe", name, str(folder))
                if "experts" in layout:
                    words = r"adds to 'model.layers.0.*experts.*has its experts on hosts.*experts 'sliced'"
                    with pytest.raises(CliError, match=words):
                        await client.add_adapter("moe", "experts", str(experts))
            victim = "c" if "experts" in layout else ""
            together = asyncio.gather(text_of(there, ""), text_of(there, "poems"))
            texts[made["experts"]] = [await text_of(there, "songs"), *await together, await text_of(there, "songs")]
            if victim:
                assert await text_of(there, "poems", victim) == texts["sliced"][2]
            else:
                await close(there, made)
        assert await text_of(there, "songs") == texts["sliced"][0]
    assert texts["parallel"] == texts["sliced"]
    assert len({*texts["sliced"]}) == 3, "each adapter shows"
