"""Tables in a narrow terminal: numbers stay whole, paths are cut where they say least."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from motley.bench.measurements.accuracy.drift import Drift, LayerDrift
from motley.cli.commands.bench import tables as bench_tables
from motley.cli.commands.machine.cache import end_of
from motley.cli.shown.show import activity, ago, percentages, table
from tests.bench.made_reports import latency_report


def test_drift_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(bench_tables, "console", Console(file=out, width=80))
    layer = LayerDrift(21, 1.2e-7, 9.9e-6, 2.3e-7, 4.5e-4, 7.7e-3, 6.7e-4, 1234.5, 67.89)
    bench_tables.show_drift(Drift("a-model-with-a-long-name-1.1b", 2, [layer]))
    row = next(line for line in out.getvalue().splitlines() if "21" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["21", "1.2e-07", "2.3e-07", "4.5e-04", "6.7e-04", "1.23e+03", "67.9"]


def test_the_end_of_a_path_keeps_whole_names() -> None:
    assert end_of("/home/somebody/models/shakespeare-2.6m", 28) == "…/models/shakespeare-2.6m"
    assert end_of("C:\\models\\shakespeare-2.6m", 20) == "…\\shakespeare-2.6m"
    assert end_of("owner/name", 10) == "owner/name"
    assert end_of("shakespeare-2.6m", 5) == "…2.6m"


@given(st.text(max_size=60), st.integers(2, 80))
def test_the_end_of_a_path_fits(path: str, room: int) -> None:
    end = end_of(path, room)
    assert len(end) <= room
    assert path.endswith(end.removeprefix("…"))


@pytest.mark.parametrize(("weights_mb", "bounded"), [(99.0, False), (400.0, True)])
def test_a_bound_is_told_where_it_says_something(
    weights_mb: float, bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(bench_tables, "console", Console(file=out, width=80))
    report = replace(latency_report(), weights_mb_per_token=weights_mb)
    bench_tables.show_latency(report)
    assert ("1.20 x the bound of 10.00 ms" in out.getvalue()) == bounded
    assert ("99 MB of weights per token: too few (below 100 MB)" in out.getvalue()) != bounded
    bench_tables.show_sweep([report])
    assert bool(re.search(r"10.00 │ +1.20", out.getvalue())) == bounded


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=20).filter(lambda parts: sum(parts) > 1e-6))
def test_percentages_sum_to_the_whole(parts: list[float]) -> None:
    fractions = [part / sum(parts) for part in parts]
    shown = [int(text.removesuffix(" %")) for text in percentages(fractions)]
    assert sum(shown) == 100
    assert all(abs(100 * fraction - whole) <= 1 for fraction, whole in zip(fractions, shown, strict=True))


def test_percentages_of_nothing() -> None:
    assert percentages([]) == []
    assert percentages([0.0, 0.0]) == ["0 %", "0 %"]
    assert percentages([0.4857, 0.3973, 0.1169]) == ["48 %", "40 %", "12 %"]


def test_a_long_title_is_not_as_narrow_as_its_table() -> None:
    out = io.StringIO()
    title = "a-model-with-a-[long]-name: stored (int8, fp32), context 1024, ready"
    Console(file=out, width=80).print(table(["a"], [["1"]], title=title))
    assert out.getvalue().splitlines()[0] == title


def test_numbers_in_names_have_no_colour_of_their_own() -> None:
    line = "qwen3-0.6b (rank 1) at /home/ann/models and 192.168.1.10:7337"
    printing = f"from motley.cli.shown.show import console, results; console.print({line!r}); results.print({line!r})"
    coloured = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    done = subprocess.run([sys.executable, "-c", printing], capture_output=True, text=True, env=coloured, check=True)
    assert (done.stdout, done.stderr) == (f"{line}\n", f"{line}\n")


def test_what_a_session_does_is_a_line() -> None:
    told = {"active": 1, "waiting": 2, "blocks": 64, "blocks_used": 12, "blocks_kept": 4}
    told |= {"prompt_tokens": 70, "cached_tokens": 32, "tried_drafts": 0, "accepted_drafts": 0}
    told |= {"far_blocks": 0, "far_blocks_used": 0, "trouble": "", "windowed_blocks": 0, "windowed_blocks_used": 0}
    told |= {"blocks_on_disk": 0, "far_tiers": []}
    line = "1 request under way, 2 waiting; 12 of 64 blocks in use, 4 kept; 32 of 70 prompt tokens found in caches"
    assert activity({"activity": told}) == line
    guessed = told | {"tried_drafts": 5, "accepted_drafts": 3}
    assert activity({"activity": guessed}) == f"{line}; 3 of 5 guesses accepted"
    disk, nodes = (
        {"place": place, "blocks": 30, "blocks_used": used, "block_ms": 0.0}
        for place, used in (("disk", 7), ("nodes", 5))
    )
    on_disk = told | {"far_tiers": [disk], "trouble": "rank 1: no disk"}
    assert activity({"activity": on_disk}) == f"{line}; far blocks in use: 7 of 30 on disk (rank 1: no disk)"
    older = told | {"far_blocks": 9, "far_blocks_used": 4}
    assert activity({"activity": older}) == f"{line}; far blocks in use: 4 of 9"
    both = told | {"far_tiers": [nodes | {"block_ms": 0.0213}, disk | {"block_ms": 1.5}]}
    assert activity({"activity": both}) == (
        f"{line}; far blocks in use: 5 of 30 on other nodes (0.021 ms of a step for each), then 7 of 30 on disk"
        " (1.5 ms of a step for each)"
    )
    kept = told | {"blocks_on_disk": 8, "trouble": "rank 1: no disk"}
    assert activity({"activity": kept}) == f"{line}; 8 kept on disk for the next start (rank 1: no disk)"
    windowed = told | {"windowed_blocks": 25, "windowed_blocks_used": 3}
    assert activity({"activity": windowed}) == f"{line}; layers with a window: 3 of 25 blocks in use"
    assert activity({"activity": None}) == "", "nobody has asked it anything"


def test_times_gone_by() -> None:
    assert [ago(seconds) for seconds in (0.4, 59.9, 60, 3599, 7300)] == [
        *("0 s ago", "59 s ago", "1 min ago", "59 min ago", "2 h ago"),
    ]
