"""Adapters with embeddings and a head of their own, in a mesh of real processes: each text is that of a model that has
these, beside others, in stages, with drafts and constraints, and after a death."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from motley.cli.errors import CliError
from motley.cli.reaching.client import Client
from motley.daemon.models.files import open_model
from motley.training.adapters import merge
from motley.training.settings import How
from motley.training.tensors import tensors_of, write_tensors
from tests.adapters.adapted import write_adapter
from tests.e2e.answers.test_adapters import ASKED, float_model, text_of
from tests.e2e.losses.test_survival import streamed
from tests.e2e.processes import BUNDLED, mesh

WEIGHTS, HEAD, TABLE = "adapter_model.safetensors", "lm_head.weight", "model.embed_tokens.weight"
PREFIX = "base_model.model."
RANK = 2
LONG = {**ASKED, "max_tokens": 100}


def untied_model(folder: Path) -> Path:
    """The bundled model in float32 with a head of its own."""
    float_model(folder)
    weights = tensors_of(folder / "model.safetensors")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    (folder / "model.safetensors").unlink()
    write_tensors(folder / "model.safetensors", weights | {HEAD: weights[TABLE]})
    return folder


def an_adapter(base: Path, folder: Path) -> Path:
    """One whose tables are the base's, changed enough to be seen."""
    random, own = np.random.default_rng(5), tensors_of(base / "model.safetensors")

    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in (HEAD, TABLE):
            noise = random.normal(size=own[name].shape) * own[name].std() / 4
            tensors[PREFIX + name] = (own[name] + noise).astype(np.float32)

    with open_model(base) as opened:
        return write_adapter(folder, opened.model, 1, RANK, change=change, modules_to_save=["lm_head", "embed_tokens"])


async def test_each_text_is_that_of_a_model_with_the_adapter_s_tables(tmp_path: Path) -> None:
    base = untied_model(tmp_path / "bard")
    whole, lora = an_adapter(base, tmp_path / "whole"), tmp_path / "lora"
    with open_model(base) as opened:
        write_adapter(lora, opened.model, 1, RANK)  # the same, but for the tables
    baked = tmp_path / "baked"
    merge([lora], How.LINEAR, baked, into=base)
    weights = tensors_of(baked / "model.safetensors")
    tables = {name: load_file(whole / WEIGHTS)[PREFIX + name] for name in (HEAD, TABLE)}
    (baked / "model.safetensors").unlink()
    write_tensors(baked / "model.safetensors", weights | tables)
    async with mesh(tmp_path, "a", "b", "c") as there:
        async with Client(there.url) as client:
            await there.session(model=str(baked), nodes=["a"])
            expected = await text_of(there.url, "baked", **LONG)
            for session in await client.sessions():
                await client.call("DELETE", f"/api/sessions/{session['id']}")
            small = {"model": str(base), "nodes": ["a", "b"], "adapters": 2, "adapter_rank": RANK}
            made = await there.session(**small)
            with pytest.raises(CliError, match=r"changes more than the layers; .* start it with --adapter-rank \d+"):
                await client.add_adapter("bard", "whole", str(whole))
            await client.call("DELETE", f"/api/sessions/{made['id']}")
            for layout in ({"stages": 2, "nodes": ["b", "a"]}, {"draft_model": str(BUNDLED), "nodes": ["c", "a", "b"]}):
                made = await there.session(**small | {"adapter_rank": 64} | layout)
                for name, folder in (("whole", whole), ("lora", lora)):
                    await client.add_adapter("bard", name, str(folder))
                texts = await asyncio.gather(*(text_of(there.url, "bard", adapter=name) for name in ("whole", "lora")))
                assert expected.startswith(texts[0])
                assert texts[1] != texts[0]
                named = await text_of(there.url, "bard:whole", regex="[A-Z]{12}", ignore_eos=False)
                assert len(named) == 12
                assert named.isupper()
                if "stages" in layout:
                    await client.call("DELETE", f"/api/sessions/{made['id']}")

        def die() -> None:
            for process in there.nodes["b"].family():
                process.kill()

        text, _ = await streamed(there.url, {**LONG, "model": "bard:whole"}, 20, die)
        del there.nodes["b"]
        assert text == expected
    assert ASKED["max_tokens"] < len(expected)
