"""`motley bench moe`: real ranks and expert hosts, of which some are lost."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from motley.bench.measurements.speed.moe import place
from motley.bench.meshes import local_mesh
from motley.cli.app import app
from motley.orchestrator.known_models.shapes import SHAPES
from motley.orchestrator.planning.placement.terms import PlacementError
from motley.protocol import mesh_pb2 as pb

ROOT = Path(__file__).parents[4]
SMALL = SHAPES["qwen3-moe-half"] | {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 300,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*, entry: Sequence[str], **options: Any) -> local_mesh.RankWorker:
        return await begin(entry=("tests.bench.measurements.speed.patient_rank", *entry), **options)

    begin = local_mesh.RankWorker.start
    monkeypatch.setattr(local_mesh.RankWorker, "start", start)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))


@pytest.mark.soak
@pytest.mark.usefixtures("_patient")
def test_both_layouts_and_a_death(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL), "utf-8")
    options = ["--nodes", "3", "--link", "1ms,1Gbit", "--requests", "1,3", "--quant", "fp32", "--tokens", "16"]
    result = CliRunner().invoke(app, ["bench", "moe", "--config", str(config), *options, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert [layout["layout"] for layout in report["layouts"]] == ["sliced", "parallel"]
    sliced, parallel = report["layouts"]
    assert 6 <= sliced["collectives"] < 8, "a few steps of three requests are tried in halves"
    assert parallel["collectives"] == 0
    for layout in report["layouts"]:
        assert layout["ms_per_token"]["p50"] > 2  # a layer's links, there and back
        assert len(layout["idle"]) == 3
        assert all(0 <= idle <= 1 for idle in layout["idle"])
        assert [row["requests"] for row in layout["throughput"]] == [1, 3]
    traffic = report["traffic"]
    assert traffic["rows_bytes"] == 3 * 2 * 64 * 4 * 2
    assert traffic["bytes"] == pytest.approx(traffic["rows_bytes"] + traffic["headers_bytes"])
    assert traffic["local_bytes"] < traffic["bytes"]
    assert 0 < traffic["local_messages"] < traffic["messages"] <= 3 * 2 * 2
    assert [death["how"] for death in report["deaths"]] == ["silent", "killed"]
    for death in report["deaths"]:
        assert death["unchanged"] is True
        assert death["host"] in (1, 2)
        assert death["usual_ms"] > 2


def test_a_killed_host_has_all_its_experts_elsewhere() -> None:
    profile = pb.ModelProfile(expert_layers=[1, 3], expert_count=6, experts_per_token=2, expert_bytes=10**6)
    held = place(profile, nodes=4, replicas=2)
    assert sorted(key for host in held for key in host) == sorted(
        [(layer, index) for layer in (1, 3) for index in range(6)] * 2
    )
    assert max(map(len, held)) - min(map(len, held)) <= 1
    with pytest.raises(PlacementError, match="3 different nodes"):
        place(profile, nodes=2, replicas=3)
