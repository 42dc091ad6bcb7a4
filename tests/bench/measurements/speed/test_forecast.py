"""`motley bench forecast`: real ranks on emulated slower processors, beside what the planner says of them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import motley.cli
from motley.bench.measurements.speed import forecast
from motley.bench.measurements.speed.forecast import (
    CASES,
    SHORT,
    Case,
    Compared,
    beside_each_other,
    beside_the_best,
    case_of,
    measure_link,
    summary,
)
from motley.bench.meshes.local_mesh import StageSpec
from motley.bench.meshes.rank_over_link import Brake
from motley.cli.app import app
from motley.orchestrator.planning.choosing.arrangement import Choice
from motley.orchestrator.planning.cost import Forecast
from motley.orchestrator.planning.cutting.shares import RankPlan

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"


@pytest.mark.soak
def test_a_plan_is_forecast_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (Case((2, 1), (0.5, 0.25), "1ms,1Gbit"), Case((1, 1), (0.5, 0.5), "5ms,1Gbit", (1, 1)))
    monkeypatch.setattr(forecast, "CASES", cases)
    options = ["--model", str(BUNDLED), "--quant", "fp32", "--tokens", "8", "--prompt-tokens", "16"]
    result = CliRunner().invoke(app, ["bench", "forecast", *options, "--json"])
    assert result.exit_code == 0, result.output
    *shown, last = result.stdout.splitlines()
    assert any("in 2 stages" in line for line in shown), "people see a table, whatever follows"
    said = json.loads(last)
    row, staged, *chosen = said["rows"]
    assert [each["plan"] for each in said["chosen"]] == chosen, "what the planner chooses is run, too"
    assert [each["fractions"] for each in said["chosen"]] == [[0.5, 0.25], [0.5, 0.5]]
    assert said["worst_behind"] == max(each["behind"] for each in said["chosen"]) >= 0
    assert staged["stages"] == [1, 1]
    assert 10 <= staged["predicted_ms"] < 12 * 5, "from stage to stage and back, and no sums"
    assert staged["measured_ms"] >= 10
    assert (row["ranks"], row["shares"], row["fractions"], row["link"]) == (2, [2, 1], [0.5, 0.25], "1ms,1Gbit")
    sums_ms = 2 * 6  # of six layers
    assert row["predicted_ms"] >= sums_ms
    assert row["measured_ms"] >= sums_ms
    assert row["predicted_ms"] == pytest.approx(sum(row["predicted"].values()), abs=0.01)
    assert row["off"] == pytest.approx(row["predicted_ms"] / row["measured_ms"] - 1, abs=1e-3)
    assert said["worst_off"] == max(abs(each["off"]) for each in said["rows"])


def test_the_cases_are_what_is_to_be_measured() -> None:
    assert len(CASES) >= 10
    assert {len(case.shares) for case in CASES} == {1, 2, 3, 4}
    assert {case.link for case in CASES} == {"", "0.1ms,1Gbit", "1ms,1Gbit", "5ms,1Gbit"}
    assert any(case.shares == (4, 1) for case in CASES)
    assert all(len(case.shares) == len(case.fractions) for case in CASES)
    assert max(SHORT) < len(CASES)


def test_ranks_that_begin_together_slow_each_other_down_until_the_first_is_done() -> None:
    speeds = {1: 10.0, 2: 6.0}
    assert beside_each_other([6, 6], speeds) == [6, 6]
    assert beside_each_other([6, 26], speeds) == pytest.approx([6, 26 / (1 + 2)])
    assert beside_each_other([6, 6, 6], speeds) == [6, 6, 6], "more than were measured are as slow as the most"
    assert beside_each_other([0, 20], speeds)[1] == 10, "who has nothing to read slows nobody down"


def test_a_link_is_measured_as_it_is_emulated() -> None:
    latency, bandwidth, frame_s = measure_link("5ms,100Mbit")
    assert 4e-3 < latency < 8e-3
    assert 0.5e7 < bandwidth < 2e7
    assert frame_s > 0


def test_a_brake_makes_computing_last_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep, slept = time.sleep, list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    brake = Brake(0.25)
    began = time.perf_counter()
    brake.begin()
    computed = time.process_time()
    while time.process_time() - computed < 0.02:
        pass
    brake.hold()
    assert time.perf_counter() - began + slept[0] >= 0.08
    brake.begin()
    sleep(0.05)  # another process had the core
    brake.hold()
    assert slept[1] < 0.02


def ran(measured_ms: float, fractions: list[float], link: str) -> Compared:
    size = len(fractions)
    return Compared(size, [1] * size, fractions, link, [], 1.0, measured_ms, 0, {}, {}, 1.0, 1.0)


def test_a_choice_is_beside_the_best_that_its_machines_could_do() -> None:
    chosen = ran(11, [0.5, 0.25], "1ms")
    alone, whole, other = ran(10, [0.5], ""), ran(2, [1], ""), ran(3, [0.5, 0.25], "0.1ms")
    twice = ran(4, [0.5, 0.5], "1ms")
    found = beside_the_best((0.5, 0.25), "1ms", chosen, [alone, whole, other, twice, chosen])
    assert (found.plan, found.best, found.behind) == (chosen, alone, 0.1), "machines that are not there do not count"
    best = beside_the_best((0.5, 0.25), "1ms", chosen, [ran(12, [0.25, 0.5], "1ms")])
    assert (best.best, best.behind) == (chosen, 0)
    assert summary([chosen], [found, best])["worst_behind"] == 0.1


def test_a_choice_becomes_a_plan_that_can_be_run() -> None:
    shares = [RankPlan(1, range(1), range(1), range(1), size, size, 0) for size in (300, 100)]
    expected = Forecast(1, 1, 0, 0)
    whole = case_of(Choice((0, 2), shares, expected), [0.5, 0.1, 0.25], "1ms")
    assert whole == Case([300, 100], [0.5, 0.25], "1ms")
    staged = [replace(plan, layers=layers) for plan, layers in zip(shares, (range(4), range(4, 6)), strict=True)]
    case = case_of(Choice((2, 0), staged, expected), [0.5, 0.1, 0.25], "1ms")
    assert (case.fractions, case.staged(6)) == ([0.25, 0.5], [StageSpec(1, 4), StageSpec(1, 2)])
    alone = case_of(Choice((1,), shares[:1], expected), [0.5, 0.1], "1ms")
    assert (alone.fractions, alone.link) == ([0.1], ""), "nothing travels"


def test_the_summary_tells_how_many_are_within_the_target() -> None:
    rows = [Compared(1, [1], [1], "", [], 1.0, 1.0, off, {}, {}, 1.0, 1.0) for off in (0.1, -0.2, 0.05)]
    assert summary(rows) == {"median_off": 0.1, "worst_off": 0.2, "within_target": 0.667}
