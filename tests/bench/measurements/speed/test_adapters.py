"""`motley bench adapters`: real ranks that answer several requests at once, each with an adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import motley.cli
from motley.cli.app import app

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"


@pytest.mark.soak
def test_requests_with_adapters_and_without() -> None:
    options = ["--ranks", "2", "--adapters", "1,3", "--rank", "2,4", "--tokens", "24", "--prompt-tokens", "5"]
    result = CliRunner().invoke(app, ["bench", "adapters", "--model", str(BUNDLED), *options, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [(row["adapters"], row["rank"]) for row in rows] == [(1, 2), (3, 2), (1, 4), (3, 4)]
    for row in rows:
        assert row.keys() == {"adapters", "rank", "tokens_per_s", "x_none", "load_ms"}
        assert min(row["tokens_per_s"], row["x_none"], row["load_ms"]) > 0
