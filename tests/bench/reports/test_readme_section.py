"""README's performance section: what it says, and that nothing else in the file changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from motley.bench.reports.readme_section import BEGIN, END, check_markers, rewrite_section, section
from motley.bench.reports.standard import ReportError
from tests.bench.made_reports import results

README = f"# Title\n\n## How fast\n\n{BEGIN}\nold\n{END}\n\nAfter: ü\n"


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


def test_our_own_page_has_the_section() -> None:
    check_markers(Path(__file__).parents[3] / "docs" / "benchmarks.md")


def test_a_readme_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"README.md cannot be read"):
        check_markers(tmp_path / "README.md")
