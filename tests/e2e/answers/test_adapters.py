"""Adapters in a mesh of real processes: each text is that of the adapter baked into the weights, whatever happens."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.cli.errors import CliError
from motley.cli.reaching.client import Client, Refused
from motley.daemon.models.files import open_model
from motley.training.adapters import merge
from motley.training.settings import How
from motley.training.tensors import tensors_of, write_tensors
from tests.adapters.adapted import write_adapter
from tests.e2e.losses.test_survival import streamed
from tests.e2e.processes import BUNDLED, Mesh, in_thread, mesh

RANK = 4
ASKED = {"prompt": "ROMEO:", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
LONG = {**ASKED, "max_tokens": 200}
NAMES = ("songs", "poems", "letters")


def float_model(folder: Path) -> Path:
    """The bundled model in float32, so that what is added to its weights is not rounded."""
    shutil.copytree(BUNDLED, folder)
    weights = {name: values.astype(np.float32) for name, values in tensors_of(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    write_tensors(folder / "model.safetensors", weights)
    return folder


def an_adapter(model: Path, folder: Path, seed: int) -> Path:
    """One that changes every matrix of the layers, enough to be seen in every text."""
    with open_model(model) as opened:
        return write_adapter(folder, opened.model, seed, RANK)


async def text_of(url: str, model: str, **asked: Any) -> str:
    async with Client(url) as client:
        answer = await client.call("POST", "/v1/completions", {**ASKED, **asked, "model": model})
        text: str = answer["choices"][0]["text"]
        return text


@pytest.mark.soak
async def test_everyone_gets_the_text_of_their_adapter_baked_into_the_weights(tmp_path: Path) -> None:
    """Two slots for three adapters, of which only one node has the folders, and which dies in the middle."""
    async with mesh(tmp_path, "a", "b") as there:
        await answered_as_baked(there, tmp_path)


async def answered_as_baked(there: Mesh, tmp_path: Path) -> None:
    model, folders = float_model(tmp_path / "bard"), tmp_path / "folders"
    folders.mkdir()
    baked = {"": model}
    for seed, name in enumerate(NAMES):
        adapter = an_adapter(model, folders / name, seed)
        baked[name] = tmp_path / f"bard-{name}"
        merge([adapter], How.LINEAR, baked[name], into=model)
    expected = {}
    for name, folder in baked.items():
        await there.session(model=str(folder), nodes=["a"])
        expected[name] = await text_of(there.url, folder.name, **LONG)
        async with Client(there.url) as client:
            for session in await client.sessions():
                await client.call("DELETE", f"/api/sessions/{session['id']}")
    assert len(set(expected.values())) == len(expected), "every adapter shows"

    owner = await there.join("d", models=folders, cache=tmp_path / "cache")
    session = await there.session(
        model=str(model), nodes=["a", "d", "b"], shares=[1, 3, 2], adapters=2, adapter_rank=RANK
    )
    for name in NAMES:
        status, out, err = await in_thread("adapters", "add", f"{name}={name}", MOTLEY_URL=there.url)
        assert status == 0, err
        assert f"'bard:{name}' are answered with it: rank {RANK}" in out
    texts = await asyncio.gather(*(text_of(there.url, f"bard:{name}" if name else "bard") for name in baked))
    for name, text in zip(baked, texts, strict=True):
        assert expected[name].startswith(text), name
    again = await asyncio.gather(*(text_of(there.url, "bard", adapter=name, n=2) for name in NAMES))
    assert again == texts[1:]
    grammar = {"regex": "[A-Z]{12}", "ignore_eos": False}
    kept = [await text_of(there.url, f"bard:{name}", **grammar) for name in ("songs", "poems")]
    assert all(len(text) == 12 and text.isupper() for text in kept)

    def die() -> None:
        for process in owner.family():
            process.kill()

    asked = [{**LONG, "model": f"bard:{name}" if name else "bard"} for name in baked]
    told = await asyncio.gather(
        streamed(there.url, asked[1], 20, die), *(streamed(there.url, each, -1, die) for each in (asked[0], *asked[2:]))
    )
    del there.nodes["d"]
    assert [text for text, _ in told] == [expected[name] for name in (NAMES[0], "", *NAMES[1:])]
    async with Client(there.url) as client:
        state = await client.call("GET", f"/api/sessions/{session['id']}")
        await client.call("DELETE", "/api/adapters/bard/poems")
        with pytest.raises(CliError, match=r"'bard' has no adapter 'poems'; it has: songs, letters"):
            await text_of(there.url, "bard:poems")
        listed = [model["id"] for model in (await client.call("GET", "/v1/models"))["data"]]
    assert (state["epoch"], {rank["node"] for rank in state["ranks"]}) == (2, {"a", "b"})
    assert listed == ["bard", "bard:songs", "bard:letters"]


async def test_what_does_not_fit_is_refused_by_name(there: Mesh, tmp_path: Path) -> None:
    model = float_model(tmp_path / "bard")
    adapter = an_adapter(model, tmp_path / "fine", 1)
    await there.session(model=str(model), nodes=["a", "b"], shares=[1, 1], adapters=1, adapter_rank=2)
    async with Client(there.url) as client:
        for change, words in (
            (lambda: None, "has matrices of rank 4; this session has room for adapters of rank 2"),
            (lambda: _cut(adapter), "truncated"),
            (lambda: (adapter / "adapter_config.json").unlink(), "has no adapter_config.json, so it is no adapter"),
        ):
            change()
            with pytest.raises(CliError, match=words):
                await client.add_adapter("bard", "fine", str(adapter))
        assert not (await client.call("GET", "/api/adapters"))["adapters"]
    assert await text_of(there.url, "bard"), "it goes on"


async def test_bad_adapters_are_refused_in_the_terminal_and_over_http(there: Mesh, tmp_path: Path) -> None:
    """By the names of the tensors, and nobody notices: not the request that is being answered meanwhile."""
    model = float_model(tmp_path / "bard")
    prefix = "base_model.model.model.layers.0.mlp"

    def changed(name: str, change: Callable[[dict[str, Any]], None]) -> Path:
        with open_model(model) as opened:
            return write_adapter(tmp_path / name, opened.model, 1, RANK, change=change)

    def differ(tensors: dict[str, Any]) -> None:
        name = f"{prefix}.up_proj.lora_B.weight"
        tensors[name] = tensors[name][:, 1:].copy()

    def unknown(tensors: dict[str, Any]) -> None:
        for side in "AB":
            tensors[f"{prefix}.c_fc.lora_{side}.weight"] = tensors[f"{prefix}.up_proj.lora_{side}.weight"]

    def other(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith("lora_A.weight")]:
            tensors[name] = np.concatenate([tensors[name]] * 2, axis=1)

    cut = changed("cut", lambda tensors: None)
    weights = cut / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    folders = {
        cut: "truncated",
        changed("differ", differ): "of 'model.layers.0.mlp.up_proj' do not fit each other: A has rank 4, B has rank 3",
        changed("unknown", unknown): f"'{prefix}.c_fc.lora_A.weight': this model (llama) has no such matrix",
        changed("other", other): "is an adapter of another model: nothing in it fits this one (llama)",
    }
    room = {"model": str(model), "nodes": ["a", "b"], "adapter_rank": 1024}
    async with Client(there.url) as client:
        with pytest.raises(CliError, match=r"It fits with room for \d+ adapters of rank 1024"):
            await client.call("POST", "/api/sessions", {**room, "adapters": 256})
        await there.session(**room | {"adapters": 2, "adapter_rank": RANK, "shares": [1, 1]})
        await client.add_adapter("bard", "fine", str(an_adapter(model, tmp_path / "fine", 1)))
        alone = await text_of(there.url, "bard:fine", **LONG)
        answering = asyncio.create_task(text_of(there.url, "bard:fine", **LONG))
        for folder, words in folders.items():
            status, _, err = await in_thread("adapters", "add", f"bad={folder}", MOTLEY_URL=there.url)
            assert status == 1
            assert words in " ".join(err.split())
            body = {"model": "bard", "name": "bad", "folder": str(folder)}
            with pytest.raises(Refused, match=re.escape(words)) as refused:
                await client.call("POST", "/api/adapters", body)
            assert refused.value.code == "invalid_adapter"
        assert await answering == alone
        pieces: list[str] = []
        async for event in client.stream("/v1/completions", {**LONG, "model": "bard:fine"}):
            pieces += [choice["text"] for choice in event["choices"]]
            if len(pieces) == 5:  # removed while it answers
                await client.call("DELETE", "/api/adapters/bard/fine")
                with pytest.raises(CliError, match="'bard' has no adapter 'fine'"):
                    await text_of(there.url, "bard:fine")
        assert "".join(pieces) == alone


def _cut(adapter: Path) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["r"] == RANK
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    config |= {"r": 2}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
