"""README's performance section: what it says, and that nothing else in the file changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

import motley.cli
from motley.bench.report import (
    BEGIN,
    END,
    PUBLISHED,
    ReportError,
    Standard,
    check_markers,
    measure_standard,
    rewrite_section,
    section,
    shape_name,
    this_machine,
    write_json,
)
from motley.bench.synth import SHAPES
from motley.daemon.machine.processor import usable_cores
from motley.daemon.models.reading import read_model
from tests.bench.reports import results
from tests.models.to_gguf import to_gguf

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"

README = f"# Title\n\n## How fast\n\n{BEGIN}\nold\n{END}\n\nAfter: ü\n"

EXPERTS = "num_experts_per_tok"


def test_the_section_says_what_was_measured_where() -> None:
    lines = section(results(), "results/picture.png").splitlines()
    assert lines[0] == (
        "Measured on 2026-11-20 by `motley bench report`: Known-1B shape, one thread per rank, on AMD EPYC (Zen 5) "
        "@ 4 GHz with 2 cores, Linux 6; Python 3.11.7, motley 0.1.0, onnxruntime 1.31."
    )
    columns = [line.count("|") for line in lines if line.startswith("|")]
    assert columns == [9] * 6
    assert "| int8, 400 MB | 2 | 12.0 | 10.0 | 1.20 | 8.0, 1.0, 4.5 | 150 | 501 MB |" in lines
    text = "\n".join(lines)
    assert "12.0 ms per token after 64 tokens, 15.0 after 1950 (1.25 x)" in text
    assert "- Warm start: 0.6 s. Peak RSS: 501 MB where 480 are the limit (1.15 x share + 250 MB)." in lines
    assert "- Exact sessions: +7 % per token." in lines
    assert "13 us at 8 KiB (gloo: 309), 205 us at 1 MiB." in text
    assert "after 2 layers 2 ranks differ from one process by 2.5e-07 of the largest activation" in text
    assert lines[-1].endswith("(results/picture.png)")


def test_a_machine_that_cannot_be_exact() -> None:
    refused = replace(results(), exact=results().exact[:1])
    assert refused.exact_ratio is None
    assert "- Exact sessions: refused here." in section(refused, "x.png").splitlines()


def test_a_model_is_called_by_its_shape(tmp_path: Path) -> None:
    assert [name.lower() for name in PUBLISHED] == [name for name, keys in SHAPES.items() if EXPERTS not in keys]
    for name in PUBLISHED:
        (tmp_path / "config.json").write_text(json.dumps(SHAPES[name.lower()]))
        assert shape_name(read_model(tmp_path)) == f"{name} shape"
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["mixtral-8x7b"]))  # otherwise Mistral's shape
    assert shape_name(read_model(tmp_path)) == "32 layers x 4096 (46.7 B parameters)"
    other = SHAPES["tinyllama-1.1b"] | {"num_hidden_layers": 44}
    (tmp_path / "config.json").write_text(json.dumps(other))
    assert shape_name(read_model(tmp_path)) == "44 layers x 2048 (2.1 B parameters)"
    assert shape_name(read_model(BUNDLED)) == "6 layers x 192 (2.6 M parameters)"


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


def test_only_the_section_is_rewritten(tmp_path: Path) -> None:
    readme, image = tmp_path / "README.md", tmp_path / "bench" / "results" / "picture.png"
    readme.write_text(README, "utf-8")
    check_markers(readme)
    for _ in range(2):  # it can be done again
        rewrite_section(readme, results(), image)
        text = readme.read_text("utf-8")
        made = section(results(), "bench/results/picture.png")
        assert text == f"# Title\n\n## How fast\n\n{BEGIN}\n{made}\n{END}\n\nAfter: ü\n"


@pytest.mark.parametrize(
    "text", ["", BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}{BEGIN}{END}", f"{BEGIN}{END}{END}"], ids=range(6)
)
def test_a_file_without_the_two_markers_stays_as_it_is(text: str, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text)
    for act in (lambda: check_markers(readme), lambda: rewrite_section(readme, results(), tmp_path / "x.png")):
        with pytest.raises(ReportError, match="performance section stands between"):
            act()
    assert readme.read_text() == text


def test_our_own_readme_has_the_section() -> None:
    check_markers(Path(__file__).parents[2] / "README.md")


def test_a_readme_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"README.md cannot be read"):
        check_markers(tmp_path / "README.md")


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
