"""Time per token of real rank processes, on the bundled model."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

import motley.cli
from motley.bench.measurements.speed.latency import PARTS, measure_latency, measure_sweep, write_csv
from motley.bench.meshes.local_mesh import LocalMesh, MeshError, MeshSpec, StageSpec
from motley.daemon.node.workers.worker import WorkerError
from tests.bench.made_reports import latency_report

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"
VOCABULARY = 256
TOKENS = 6


async def test_every_prompt_length_is_measured_token_by_token() -> None:
    spec = MeshSpec(BUNDLED, [2, 1], "int8", context=64)
    short, long = await measure_latency(spec, [8, 40], TOKENS, VOCABULARY)
    assert (short.prompt_tokens, long.prompt_tokens) == (8, 40)
    for report in (short, long):
        assert (report.model, report.quant, report.ranks, report.link) == (BUNDLED.name, "int8", 2, "")
        assert report.collectives_per_token == 12
        assert report.weights_mb_per_token == pytest.approx(sum(report.shard_mb), abs=0.01)
        read_mb = report.weights_mb_per_token + report.caches_mb_per_token
        bound_s = 1e6 * read_mb / (1e9 * report.bandwidth_gb_s)
        assert 1e-3 * report.bound_ms == pytest.approx(bound_s, rel=0.02)
        assert report.ratio == pytest.approx(report.ms_per_token["p50"] / report.bound_ms, rel=0.02)
        timeline = report.timeline
        assert len(timeline.step_ms) == TOKENS
        assert len(timeline.ranks) == 2
        for rank, parts in enumerate(timeline.ranks):
            assert {len(parts[part]) for part in PARTS} == {TOKENS}
            for part in PARTS:
                assert min(parts[part]) > 0
                assert sum(parts[part]) / TOKENS == pytest.approx(report.per_rank[rank][part], abs=0.002)
        # No part of a token on the leader is longer than the whole.
        for token, step_ms in enumerate(timeline.step_ms):
            assert sum(timeline.ranks[0][part][token] for part in PARTS) <= step_ms + 0.01


async def test_caches_are_kept_as_told() -> None:
    (report,) = await measure_latency(MeshSpec(BUNDLED, quantisation="int8", cache_format="fp16"), [8], 2, VOCABULARY)
    assert report.as_json()["cache_format"] == "fp16"
    assert report.setting == "int8, fp16 caches, 1 rank, prompt 8"
    with pytest.raises(MeshError, match="engine tensorrt keeps caches in fp32, not in int8"):
        await measure_latency(MeshSpec(BUNDLED, engine="tensorrt", cache_format="int8"), [8], 2, VOCABULARY)


async def test_a_timing_tells_of_the_steps_since_the_last_one() -> None:
    async with LocalMesh(MeshSpec(BUNDLED, [1, 1], context=64)) as mesh:
        for tokens in (9, 5):
            await mesh.decode([tokens, 2, 3], tokens)
            for timing in mesh.timing:
                assert len(timing.step_compute_ms) == len(timing.step_wire_ms) == len(timing.step_wait_ms) == tokens - 1
        assert len(mesh.timing[0].step_ms) == 8 + 4
        assert mesh.timing[1].tokens == 8 + 4


@pytest.mark.soak
async def test_a_network_between_the_ranks_is_emulated() -> None:
    """12 all-reduces per token, and each takes at least the 5 ms that a byte is under way."""
    specs = [MeshSpec(BUNDLED, [1, 1], "int4", context=64, link=link) for link in ("", "5ms,100Mbit")]
    here, there = await measure_sweep(specs, [4], 3, VOCABULARY)
    assert here.setting == "int4, 2 ranks, prompt 4"
    assert there.setting == "int4, 2 ranks, prompt 4, 5ms,100Mbit"
    assert min(there.timeline.step_ms) > 60
    assert sum(rank["wait_ms"] for rank in there.per_rank) > 2 * 55  # latency is waiting, of the one or of the other


async def test_a_network_that_is_none_is_no_silent_default() -> None:
    with pytest.raises(WorkerError, match="exited with status 1"):
        async with LocalMesh(MeshSpec(BUNDLED, [1, 1], context=64, link="fast")):
            pytest.fail("it should not start")


async def test_a_rank_that_cannot_load_is_named() -> None:
    with pytest.raises(MeshError, match=r"rank \d: a context of 5000 tokens is not possible"):
        await measure_latency(MeshSpec(BUNDLED, [1], context=5000), [4], 3, VOCABULARY)


def test_parts_of_a_token_add_up() -> None:
    report = latency_report()
    assert report.mean_parts() == report.mean_parts(1) == {"compute": 8.0, "wire": 1.0, "wait": 4.5, "lead": 1.0}
    tokens = report.token_parts(0)
    assert [sum(token.values()) for token in tokens] == report.timeline.step_ms
    assert tokens[2] == {"compute": 8.0, "wire": 1.0, "wait": 12.0, "lead": 1.0}


def test_csv_has_a_line_per_setting_token_and_rank(tmp_path: Path) -> None:
    file = tmp_path / "tokens.csv"
    write_csv([latency_report(), latency_report(ranks=1, link="1ms,1Gbit")], file)
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 4 * 2 + 4
    assert rows[4] == {
        "quant": "int4",
        "ranks": "2",
        "prompt_tokens": "64",
        "link": "",
        "token": "2",
        "rank": "0",
        "step_ms": "22.0",
        "compute_ms": "8.0",
        "wire_ms": "1.0",
        "wait_ms": "12.0",
    }
    assert rows[-1]["link"] == "1ms,1Gbit"


async def test_ranks_in_stages_over_an_emulated_link() -> None:
    """They wait for each other, once in a token."""
    spec = MeshSpec(BUNDLED, [1, 1], "int8", context=64, stages=(StageSpec(1, 2), StageSpec(1, 4)), link="2ms,1Gbit")
    (report,) = await measure_latency(spec, [8], 8, VOCABULARY)
    assert report.stages == [{"ranks": 1, "layers": 2}, {"ranks": 1, "layers": 4}]
    assert report.setting == "int8, 2 ranks in 2 stages, prompt 8, 2ms,1Gbit"
    assert report.ms_per_token["p50"] > 2 * 2, "a token goes to the second stage, and what it decides comes back"
    wrong = MeshSpec(BUNDLED, [1, 1], "int8", stages=(StageSpec(1, 2), StageSpec(1, 3)))
    with pytest.raises(MeshError, match="stages of 2 ranks and 5 layers, where there are 2 ranks and 6 layers"):
        await measure_latency(wrong, [8], 8, VOCABULARY)
