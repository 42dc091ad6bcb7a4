"""docs/commands.md says what the commands' `--help` says."""

from __future__ import annotations

from pathlib import Path

from motley.cli.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_the_page_of_commands_is_that_of_today() -> None:
    assert PAGE.read_text("utf-8") == reference(), "make docs writes it anew"


def test_what_a_command_takes_is_told_with_its_defaults() -> None:
    text = reference()
    up = text.partition("\n## motley up\n")[2].partition("\n## ")[0]
    assert "| `--port` `VALUE` | Port where nodes join. 0: any free one. Default: `7337`. |" in up
    assert "motley up --memory 6GB" in up
    assert "\n### motley keys create\n" in text
    assert "--end-with-stdin" not in text, "hidden ones are for our own programs"
