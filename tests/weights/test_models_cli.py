"""`motley models search`, `pull`, `ls` and `rm`, with a hub of this machine's own over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from motley.cli.commands.models import disk
from motley.cli.errors import CliError
from motley.daemon.models.keys import ConfigError
from motley.daemon.models.on_hub import PACKED, Verdict, verdict
from motley.daemon.models.packing_keys import read_packing
from motley.daemon.weights.cache import ShareCache
from motley.orchestrator.known_models.names import KNOWN, has_experts, spelled_out
from motley.orchestrator.known_models.shapes import SHAPES
from motley.orchestrator.session_request import SessionRequest
from tests.e2e.processes import BUNDLED, motley
from tests.weights.local_hub import LocalHub


async def test_a_model_is_found_fetched_listed_and_removed(tmp_path: Path) -> None:
    hub = LocalHub()
    hub.repositories = {"acme/bard": BUNDLED}
    hub.about = {
        "acme/bard": {"config": {"model_type": "llama"}, "tags": ["safetensors"], "downloads": 7},
        "acme/bard-hqq": {
            "config": {"model_type": "llama", "quantization_config": {"quant_method": "hqq"}},
            "tags": ["safetensors"],
        },
    }
    async with hub.serving():
        where = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub"), "MOTLEY_CACHE": str(tmp_path / "shares")}
        status, out, err = await motley("models", "search", "BARD", **where)
        assert status == 0, err
        assert "acme/bard" in out
        assert "hqq" not in out
        assert "1 more that Motley cannot run" in out
        _, out, _ = await motley("models", "search", "bard", "--all", "--json", **where)
        told = {each["name"]: each["why_not"] for each in json.loads(out)["models"]}
        assert told == {"acme/bard": None, "acme/bard-hqq": "weights that are packed by hqq are not"}

        status, out, err = await motley("models", "pull", "acme/bard", "--json", **where)
        assert status == 0, err
        pulled = json.loads(out)
        assert pulled["bytes"] == pulled["fetched_bytes"] > 5_000_000
        assert (Path(pulled["path"]) / "model.safetensors").stat().st_size > 5_000_000
        assert "README.md" not in hub.fetched
        _, out, _ = await motley("models", "pull", "acme/bard", **where)
        assert "was here already" in out
        status, _, err = await motley("models", "pull", "acme/none", **where)
        assert (status, "neither a folder here nor a model on huggingface.co" in err) == (1, True), err

    _, out, _ = await motley("models", "ls", "--json", **where)
    (model,) = json.loads(out)["models"]
    assert (model["name"], model["from"], model["shares"]) == ("acme/bard", "hub", 0)
    assert model["bytes"] == pulled["bytes"]
    status, _, err = await motley("models", "rm", "acme/bard", stdin="n\n", **where)
    assert (status, err) == (1, "motley: nothing was removed\n")
    status, out, err = await motley("models", "rm", "acme/bard", "--yes", **where)
    assert (status, out.startswith("removed acme/bard, ")) == (0, True), err
    _, out, _ = await motley("models", "ls", "--json", **where)
    assert json.loads(out) == {"models": []}
    status, _, err = await motley("models", "rm", "acme/bard", "--yes", **where)
    assert (status, "is not on this machine" in err) == (1, True)


def test_what_was_removed_before_a_share_in_use_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: Any = [SimpleNamespace(key=key, size=5) for key in "ab"]
    monkeypatch.setattr(disk, "_found", lambda *_: {"acme/bard": disk.OnDisk("hub", 5, shares)})
    monkeypatch.setattr(ShareCache, "remove", lambda _, key: key == "a")
    with pytest.raises(CliError, match=r"in use by a rank \(1 of 2 shares removed, its files and the rest kept\)"):
        disk.rm("acme/bard", tmp_path, yes=True)


async def test_of_several_gguf_files_one_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    for number, name in enumerate(("m-Q4_K_M.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf")):
        (tmp_path / "repo" / name).write_text(f"GGU{number}")
    hub = LocalHub()
    hub.repositories = {"acme/bard-GGUF": tmp_path / "repo"}
    async with hub.serving():
        where = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub")}
        status, _, err = await motley("models", "pull", "acme/bard-GGUF", **where)
        assert status == 1
        names = "acme/bard-GGUF:m-Q4_K_M.gguf, acme/bard-GGUF:m-Q8_0-00001-of-00002.gguf"
        assert err == f"motley: acme/bard-GGUF has several models: give one of {names}\n"
        status, out, err = await motley(
            "models", "pull", "acme/bard-GGUF:m-Q8_0-00001-of-00002.gguf", "--json", **where
        )
        assert (status, json.loads(out)["bytes"]) == (0, 8), err
    assert sorted(hub.fetched) == ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("config", "gguf", "tags", "expected"),
    [
        ({"model_type": "qwen3"}, None, ["safetensors"], Verdict("qwen3", "safetensors")),
        ({"model_type": "gemma3"}, None, ["safetensors"], Verdict("gemma3", "safetensors")),
        (None, {"architecture": "llama"}, [], Verdict("llama", "GGUF")),
        (None, {"architecture": "mamba"}, [], Verdict("mamba", "GGUF", "family mamba is not supported")),
        ({"model_type": "bert"}, None, ["safetensors"], Verdict("bert", "safetensors", "family bert is not supported")),
        ({"model_type": "llama"}, None, ["pytorch"], Verdict("llama", "safetensors", "it has no safetensors")),
        (None, None, [], Verdict("unknown", "safetensors", "family unknown is not supported")),
        (
            {"model_type": "qwen2", "quantization_config": {"quant_method": "awq"}},
            None,
            ["safetensors"],
            Verdict("qwen2", "AWQ"),
        ),
    ],
)
def test_what_can_be_run(config: object, gguf: object, tags: list[str], expected: Verdict) -> None:
    assert verdict(config, gguf, tags) == expected  # type: ignore[arg-type]


def test_every_way_of_packing_that_is_judged_well_is_read(tmp_path: Path) -> None:
    """Whatever else is wrong with a config that says no more: it is not the method."""
    for method in ("hqq", *PACKED):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
        why = ""
        try:
            read_packing(tmp_path)
        except ConfigError as error:
            why = str(error)
        assert ("quant_method" in why) == (method == "hqq"), why


def test_short_names() -> None:
    assert set(KNOWN) <= set(SHAPES)
    assert {name for name in KNOWN if has_experts(name)} == {
        *("deepseek-v3", "gemma-4-26b-a4b", "glm-4.7-flash", "kimi-k2", "minimax-m2", "mixtral-8x7b", "qwen3-30b-a3b"),
        *("qwen3-next-80b-a3b", "qwen3.5-35b-a3b"),
    }
    asked = spelled_out(SessionRequest("qwen3-8b", draft_model="qwen3-0.6b"), quantised=False)
    assert (asked.model, asked.name, asked.quantisation) == ("Qwen/Qwen3-8B-AWQ", "qwen3-8b", "stored")
    assert asked.draft_model == "Qwen/Qwen3-0.6B"
    asked = spelled_out(SessionRequest("llama-3.1-8b", name="mine", quantisation="fp16"), quantised=True)
    assert (asked.name, asked.quantisation) == ("mine", "fp16")
    assert spelled_out(SessionRequest("./qwen3-8b"), quantised=False) == SessionRequest("./qwen3-8b")
