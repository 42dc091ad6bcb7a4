"""Adapters while experts are on hosts: texts are those of sliced experts, also when a host dies meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from motley.bench.random_models.writing import synthesise
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
    asked = {**GREEDY, "max_tokens": 24, **({"adapter": adapter} if adapter else {})}
    async with Client(there.url) as client:
        async for event in client.stream("/v1/completions", asked):
            pieces += [choice["text"] for choice in event["choices"]]
            if victim and len(pieces) >= 10:
                await there.nodes[victim].kill()
                victim = ""
    return "".join(pieces)


async def test_experts_on_hosts_are_adapted_as_those_of_ranks_are(tmp_path: Path) -> None:
    model = tmp_path / "moe"
    synthesise(SHAPES["mixtral-quarter"] | SMALL, model)
    with open_model(model) as opened:
        adapters = {
            name: write_adapter(tmp_path / name, opened.model, seed, RANK)
            for seed, name in enumerate(("songs", "poems"))
        }
        adapters["experts"] = write_adapter(tmp_path / "experts", opened.model, 3, 1, experts=True)
        adapters["up"] = write_adapter(tmp_path / "up", opened.model, 4, 1, experts=True, only=["up_proj"])
    room: dict[str, Any] = {"adapters": 2, "adapter_rank": 16}
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
            named = ["", "songs", "poems", "experts", "up"]
            together = await asyncio.gather(*(text_of(there, name) for name in named))
            texts[made["experts"]] = [*together, *[await text_of(there, name) for name in reversed(named)]]
            if "experts" in layout:
                assert await text_of(there, "experts", victim="c") == texts["sliced"][3]
            else:
                await close(there, made)
        assert await text_of(there, "up") == texts["sliced"][4]
    assert texts["parallel"] == texts["sliced"]
    assert len({*texts["sliced"]}) == 5, "each adapter shows"
