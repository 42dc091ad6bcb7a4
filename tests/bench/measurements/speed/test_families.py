"""`motley bench families`: real ranks of a small family, and what a token of theirs reads."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from motley.bench.measurements.speed import families
from motley.bench.measurements.speed.token_reads import token_reads
from motley.cli.app import app
from motley.orchestrator.known_models.shapes import SHAPES
from motley.orchestrator.planning.cutting.shares import Candidate, plan_shares
from motley.protocol.mesh_pb2 import LayerCosts, ModelProfile

SMALL = SHAPES["qwen3-moe-half"] | {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 300,
}


def test_what_a_token_reads_beside_all_weights() -> None:
    """Of 8 experts in 2 layers 6 are not chosen; a layer's window is shorter than the text."""
    profile = ModelProfile(
        layers=2,
        kv_groups=2,
        attention_splits=[1, 2],
        attention_query_bytes=10,
        mlp_units=4,
        mlp_unit_bytes=10,
        vocabulary_units=4,
        vocabulary_unit_bytes=10,
        cache_bytes_per_token=30,
        windowed_bytes_per_token=10,
        window=50,
        state_bytes=1000,
        expert_layers=[0, 1],
        expert_count=8,
        experts_per_token=2,
        expert_weight_bytes=100,
        layer_costs=[LayerCosts(layers=2)],
    )
    for ranks in (1, 2, 4):  # of four, two have half of a KV group, and keys and values of all of it
        plans = plan_shares([profile] * ranks, [Candidate(f"{rank}", 1.0, 1 << 30) for rank in range(ranks)], 1)
        reads = token_reads(profile, plans, 10_000, 200)
        assert reads.weights == 10_000 - 2 * 6 * 100
        assert reads.caches == max(2, ranks) * (20 * 200 + 10 * 50)
        assert reads.states == 2 * 2 * 1000
        assert reads.whole == reads.weights + reads.caches + reads.states
    short = token_reads(profile, plans, 10_000, 20)
    assert short.caches == 4 * 30 * 20


def test_a_family_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "REPRESENTATIVES", {"small": SMALL})
    command = ["bench", "families", "--ranks", "2", "--quant", "fp32", "--tokens", "6", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert (row["family"], row["ranks"], row["layers"], row["experts"]) == ("small", 2, 2, 8)
    attention, expert = 64 * 16 * (4 + 2 + 2 + 4) + 2 * 16 + 64, 3 * 64 * 32
    layer = attention + 64 + 8 * 64 + 2 * expert  # with the router and the chosen experts
    cached = 2 * 2 * 2 * 16 * (families.PROMPT + 3.5)
    whole_mb = 4e-6 * (2 * layer + 64 + 300 * 64 + cached)
    assert row["mb_per_token"] == pytest.approx(whole_mb, rel=0.02)  # both ranks have norms and routers
    assert 1e-3 * row["bound_ms"] == pytest.approx(1e6 * row["mb_per_token"] / (1e9 * row["bandwidth_gb_s"]), 0.05)
    assert row["ratio"] == pytest.approx(row["ms_per_token"] / row["bound_ms"], rel=0.1)
    assert row["compute_ms"] > 0


def test_a_family_that_cannot_be_measured_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = {**SMALL, "model_type": "gpt2"}
    monkeypatch.setattr(families, "REPRESENTATIVES", {"unknown": unknown, "small": SMALL})
    result = CliRunner().invoke(
        app, ["bench", "families", "--ranks", "1", "--quant", "fp32", "--tokens", "6", "--json"]
    )
    assert (result.exit_code, str(result.exception)) == (1, "not measured: unknown")
    assert "unknown cannot be measured: " in result.output
    (row,) = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert row["family"] == "small"


def test_a_family_of_which_no_shape_is_known() -> None:
    result = CliRunner().invoke(app, ["bench", "families", "--family", "gpt2"])
    assert "--family: no 'gpt2' is known; there are: llama, gemma3, " in str(result.exception or result.output)
