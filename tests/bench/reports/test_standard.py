"""The standard measurements: what is measured, what a model is called, where the numbers are kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

import motley.cli
from motley.bench.reports.readme_section import section
from motley.bench.reports.standard import (
    PUBLISHED,
    ReportError,
    Standard,
    measure_standard,
    shape_name,
    this_machine,
    write_json,
)
from motley.daemon.machine.processor import usable_cores
from motley.daemon.models.reading import read_model
from motley.orchestrator.known_models.shapes import SHAPES
from tests.bench.made_reports import results
from tests.models.to_gguf import to_gguf

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"

EXPERTS = "num_experts_per_tok"


def test_a_model_is_called_by_its_shape(tmp_path: Path) -> None:
    # Whose layers differ, or with experts by other keys, or with latent attention or recurrent states.
    unlike = ("ernie4_5_moe", "gemma3n_text", "gemma4_text", "hunyuan_v1_moe", "minicpm3", "muse_glimmer_text")
    unlike += ("falcon_h1", "kimi_linear", "lfm2", "longcat_flash", "olmo_hybrid", "qwen3_5_text")
    dense = [name for name, keys in SHAPES.items() if EXPERTS not in keys and keys["model_type"] not in unlike]
    assert {*map(str.lower, PUBLISHED), "llama-7m"} == {*dense}
    for name in PUBLISHED:
        (tmp_path / "config.json").write_text(json.dumps(SHAPES[name.lower()]))
        assert shape_name(read_model(tmp_path)) == f"{name} shape"
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["mixtral-8x7b"]))  # otherwise Mistral's shape
    assert shape_name(read_model(tmp_path)) == "32 layers x 4096 (46.7 B parameters)"
    other = SHAPES["tinyllama-1.1b"] | {"num_hidden_layers": 44}
    (tmp_path / "config.json").write_text(json.dumps(other))
    assert shape_name(read_model(tmp_path)) == "44 layers x 2048 (2.1 B parameters)"
    assert shape_name(read_model(BUNDLED)) == "6 layers x 192 (2.6 M parameters)"


@pytest.mark.soak
async def test_the_standard_measurements_of_a_gguf_file(tmp_path: Path) -> None:
    """All of them, but as few as can be; nothing says where the file was."""
    file = to_gguf(BUNDLED, tmp_path / "secret.gguf", lambda name: Type.Q8_0)
    said: list[str] = []
    few = Standard(quantisations=["int4"], ranks=[2], prompt=4, contexts=(5, 8), tokens=5, pairs=1, sizes=[8192])
    measured = await measure_standard(file, few, said.append)
    assert said == ["latency: int4, ranks: 2", "exact mode: pair 1 of 1", "collectives", "precision"]
    assert [report.exact for report in measured.exact] == [False, True]
    assert [report.prompt_tokens for report in (*measured.latency, *measured.contexts)] == [4, 5, 8]
    assert measured.exact_ratio
    assert len(measured.drift.layers) == 6
    assert measured.model == "6 layers x 192 (2.6 M parameters)"
    assert "secret" not in section(measured, "x.png") + json.dumps(measured.as_json())


def test_numbers_are_kept_as_json(tmp_path: Path) -> None:
    path = write_json(results(), tmp_path / "new" / "folder")
    assert path.name == "2026-11-20-amd-epyc-zen-5-4-ghz-2-cores.json"
    kept = json.loads(path.read_text("utf-8"))
    assert kept == json.loads(json.dumps(results().as_json()))
    assert [row["quant"] for row in kept["latency"]] == ["int4", "int4", "int8", "int8"]
    assert kept["precision"]["final_fp32_error"] == 2.5e-7


def test_numbers_that_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ReportError, match="cannot be written"):
        write_json(results(), tmp_path / "file" / "folder")


def test_the_tokens_shown_are_of_the_first_quantisation_over_the_most_ranks() -> None:
    shown = results().shown
    assert (shown.quant, shown.ranks) == ("int4", 2)
    assert replace(results(), latency=results().latency[2:]).shown.quant == "int8"


def test_this_machine() -> None:
    machine = this_machine()
    assert machine.cores == usable_cores()
    assert machine.cpu
    assert {"motley", "onnxruntime"} <= set(machine.versions)
