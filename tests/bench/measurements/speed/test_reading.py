"""`motley bench reading`: real ranks that read a long prompt while they answer others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import motley.cli
from motley.bench.measurements.speed.reading import _gaps_ms
from motley.bench.meshes.local_mesh import LocalMesh, MeshError
from motley.cli.app import app

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"


def test_a_prompt_is_read_in_the_midst_of_answers() -> None:
    options = ["--ranks", "2", "--requests", "3", "--read", "500", "--tokens", "300", "--cache-format", "fp16"]
    result = CliRunner().invoke(app, ["bench", "reading", "--model", str(BUNDLED), *options, "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout.splitlines()[-1])
    assert (said["requests"], said["prompt_tokens"], said["cache_format"]) == (3, 500, "fp16")
    usual, longer = said["gap_ms"], said["gap_while_reading_ms"]
    assert 0 < usual["p50"] <= usual["p99"]
    assert 0 < longer["p50"] <= longer["p99"] <= 1e3 * said["read_s"] + usual["p99"]
    assert said["x_p99"] == pytest.approx(longer["p99"] / usual["p99"], abs=0.02)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--read", "900", "--tokens", "8"], "answers of 8 tokens end before 900 tokens are read"),
        (["--read", "1024", "--tokens", "8"], "it has 1024 tokens of context"),
        (["--read", "9", "--tokens", "1009"], "it has 1024 tokens of context"),
    ],
)
def test_what_cannot_be_measured_is_said(options: list[str], why: str) -> None:
    result = CliRunner().invoke(app, ["bench", "reading", "--model", str(BUNDLED), "--requests", "1", *options])
    assert result.exit_code == 1
    assert why in str(result.exception)


def test_a_rank_that_fails_meanwhile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = LocalMesh.decode

    async def fail(self: LocalMesh, prompt: Sequence[int], max_tokens: int, **how: Any) -> Any:
        if max_tokens == 1:
            raise MeshError("rank 0: its process ended")
        return await decode(self, prompt, max_tokens, **how)

    monkeypatch.setattr(LocalMesh, "decode", fail)
    options = ["--model", str(BUNDLED), "--requests", "2", "--read", "9", "--tokens", "300"]
    result = CliRunner().invoke(app, ["bench", "reading", *options])
    assert isinstance(result.exception, MeshError)
    assert str(result.exception) == "rank 0: its process ended"


def test_gaps_are_told_apart_by_what_was_read_in_them() -> None:
    """The first and the last gap of the one who is alone then say nothing."""
    alone, beside = [0.0, 1.0, 2.0, 5.0, 6.0, 7.0, 8.5], [1.0, 2.0, 5.0, 6.5, 7.0]
    within, without = _gaps_ms([alone, beside], came=2.5, ended=5.5)
    assert within == [3000, 1000, 3000, 1500]
    assert without == [1000, 1000, 1000, 500]
