"""`motley bench caches`: real ranks with a part of their caches on disks, and on other nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import motley.cli
from motley.cli.app import app

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"


@pytest.mark.soak
@pytest.mark.parametrize("nodes", [0, 128, 384])
def test_a_context_is_answered_in_memory_and_with_a_part_elsewhere(nodes: int) -> None:
    options = ["--ranks", "2", "--context", "512", "--memory", "128", "--tokens", "16", "--quant", "int8"]
    options += ["--nodes", str(nodes)]
    result = CliRunner().invoke(app, ["bench", "caches", "--model", str(BUNDLED), *options, "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout.splitlines()[-1])
    assert (said["context"], said["same_text"]) == (512, True)
    near, far = said["in_memory"], said["elsewhere"]
    assert (near["memory_tokens"], near["disk_tokens"], near["node_tokens"]) == (512, 0, 0)
    assert (far["memory_tokens"], far["disk_tokens"], far["node_tokens"]) == (128, 384 - nodes, nodes)
    assert said["x_prompt"] == pytest.approx(far["prompt_tokens_per_s"] / near["prompt_tokens_per_s"], abs=0.01)
    assert said["x_token"] == pytest.approx(far["ms_per_token"] / near["ms_per_token"], abs=0.01)
    assert min(said["x_prompt"], said["x_token"]) > 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--context", "1025"], "it has 1024 tokens of context"),
        (["--context", "64", "--tokens", "64"], "leaves no room for a prompt"),
        (["--context", "64", "--memory", "64", "--tokens", "8"], "nothing would be elsewhere"),
        (["--context", "64", "--memory", "32", "--tokens", "8", "--nodes", "33"], "more than --context 64 has beside"),
    ],
)
def test_what_cannot_be_measured_is_said(options: list[str], why: str) -> None:
    result = CliRunner().invoke(app, ["bench", "caches", "--model", str(BUNDLED), *options])
    assert result.exit_code == 1
    assert why in str(result.exception)
