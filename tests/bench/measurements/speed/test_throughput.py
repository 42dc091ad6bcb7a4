"""`motley bench throughput`: real ranks that answer several requests at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import motley.cli
from motley.cli.app import app

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"


@pytest.mark.parametrize("engine", ["onnxruntime", pytest.param("reference", marks=pytest.mark.soak)])
def test_requests_together_and_alone(engine: str) -> None:
    options = ["--ranks", "2", "--requests", "1,3", "--tokens", "24", "--prompt-tokens", "5", "--engine", engine]
    options += ["--cache-format", "int8", "--one-wave", "--temperature", "0.9", "--top-p", "0.95"]
    result = CliRunner().invoke(app, ["bench", "throughput", "--model", str(BUNDLED), *options, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [row["requests"] for row in rows] == [1, 3]
    assert rows[0]["x_one"] == 1
    for row in rows:
        assert row.keys() == {"requests", "tokens_per_s", "x_one", "ms_per_token", "step_ms", "cache_format"}
        assert row["cache_format"] == "int8"
        assert row["ms_per_token"] == pytest.approx(1e3 * row["requests"] / row["tokens_per_s"], rel=0.02)
        assert row["step_ms"].keys() == {"compute", "wire", "wait", "lead"}
        assert row["step_ms"]["compute"] > 0
