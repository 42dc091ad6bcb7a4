"""`motley bench drafts`: real ranks that continue a text with guesses and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import motley.cli
from motley.cli.app import app
from tests.e2e.answers.test_recurrent import save_letters, text_of
from tests.models.own_heads import that_knows

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"
LINES = "ROMEO:\nI will go to the Tower.\n\nJULIET:\nI will go to the Tower.\n\n"


@pytest.mark.soak
def test_a_text_that_repeats_itself_is_guessed_and_stays_the_same(tmp_path: Path) -> None:
    prompt = tmp_path / "lines.txt"
    prompt.write_text(LINES * 3, encoding="utf-8")
    options = ["--model", str(BUNDLED), "--prompt", str(prompt), "--ranks", "2", "--tokens", "60", "--json"]
    result = CliRunner().invoke(app, ["bench", "drafts", *options])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout.splitlines()[-1])
    assert said.keys() == {"without_tokens_per_s", "with_tokens_per_s", "accepted_per_step", "same_text"}
    assert said["same_text"] is True
    assert said["accepted_per_step"] > 0
    assert min(said["without_tokens_per_s"], said["with_tokens_per_s"]) > 0


@pytest.mark.soak
def test_a_models_own_head_is_measured_too(tmp_path: Path) -> None:
    model = that_knows(tmp_path / "ahead", 60)
    save_letters(model, 101)
    prompt = tmp_path / "letters.txt"
    prompt.write_text(text_of([5, 6, 7]), encoding="utf-8")
    options = ["--model", str(model), "--prompt", str(prompt), "--draft-model", "own", "--tokens", "40", "--json"]
    result = CliRunner().invoke(app, ["bench", "drafts", *options, "--ranks", "1", "--quant", "fp32"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout.splitlines()[-1])
    assert said["same_text"] is True
    assert said["accepted_per_step"] > 0


@pytest.mark.parametrize(
    ("content", "why"), [(None, "cannot be read as text"), ("", "0 tokens"), (LINES * 2000, "do not fit this model's")]
)
def test_a_prompt_that_is_none_is_refused_before_anything_starts(content: str | None, why: str, tmp_path: Path) -> None:
    prompt = tmp_path / "lines.txt"
    if content is not None:
        prompt.write_text(content, encoding="utf-8")
    result = CliRunner().invoke(app, ["bench", "drafts", "--model", str(BUNDLED), "--prompt", str(prompt)])
    assert result.exit_code != 0
    assert why in " ".join(str(result.exception or result.output).split())
