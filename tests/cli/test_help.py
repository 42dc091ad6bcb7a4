"""What `--help` looks like in a terminal of 80 columns."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from motley.cli.app import app


def commands(group: Any, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The words of all groups and commands."""
    below = getattr(group, "commands", {})
    return [words, *(each for word, one in below.items() for each in commands(one, (*words, word)))]


@pytest.mark.parametrize("words", commands(typer.main.get_command(app)), ids=" ".join)
def test_half_of_the_width_at_least_is_for_what_options_mean(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    app([*words, "--help"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    told = next(line for line in lines if line.strip().startswith("--help"))
    assert told.index("Show this message") < 40


def test_examples_stand_on_lines_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    app(["lease", "--help"], standalone_mode=False)
    assert capsys.readouterr().out.endswith("\n    motley lease give\n    motley lease show\n")


def test_a_group_tells_the_whole_first_sentence_of_each_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    app(["--help"], standalone_mode=False)
    assert "Give this machine to the mesh of an orchestrator, until Ctrl-C." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["up", "--device", "cuda"], "No such option: --device (it is one of: `motley plan`, `motley run`, "),
        (["run", "bard", "--threads", "2"], "No such option: --threads (it is one of: `motley up`, `motley join`)\n"),
        (["run", "bard", "--context"], "Option '--context' requires an argument.\n"),
        (["run", "bard", "--contxt", "2"], "No such option: --contxt (Possible options: --context)"),
    ],
)
def test_an_option_of_another_command_is_told_with_that(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        app(words, prog_name="motley")
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("group", ["keys", "token", "nodes", "models", "cache", "adapters"])
def test_lists_go_by_the_name_that_others_give_them_too(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for word in ("ls", "list"):
        app([group, word, "--help"], standalone_mode=False)
        told.append(capsys.readouterr().out.partition("\n")[2])
    assert told[0] == told[1] != ""
