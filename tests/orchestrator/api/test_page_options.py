"""The page's form for a session offers what a session can be asked to be, and so all that `motley run` can."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from motley.orchestrator.session_request import SessionRequest

OPTIONS = Path(__file__).parents[3] / "orchestrator" / "web" / "options.js"
ENTRY = re.compile(r'\{ name: "(\w+)",(.*?) \},?\n', re.DOTALL)


def offered() -> dict[str, str]:
    """What the page says of each option, by its name."""
    return dict(ENTRY.findall(OPTIONS.read_text("utf-8").partition("OPTIONS = [")[2]))


def test_every_field_of_a_session_is_in_the_form() -> None:
    assert set(offered()) == {field.name for field in fields(SessionRequest)}


def test_choices_are_those_that_there_are_the_default_first() -> None:
    def allowed(hint: Any) -> list[str]:
        return [str(each) for each in get_args(hint)] if get_origin(hint) is Literal else []

    hints = get_type_hints(SessionRequest)
    defaults = {field.name: str(field.default) for field in fields(SessionRequest)}
    for name, told in offered().items():
        found = re.search(r"choices: \[(.*?)\]", told)
        choices = re.findall(r'"([^"]*)"', found[1]) if found else []
        assert sorted(choices) == sorted(allowed(hints[name])), name
        assert not choices or choices[0] == defaults[name], name


def test_switches_are_on_where_that_is_the_default() -> None:
    defaults = {field.name: field.default for field in fields(SessionRequest)}
    switches = {name: "on: true" in told for name, told in offered().items() if 'kind: "switch"' in told}
    assert switches == {name: default for name, default in defaults.items() if isinstance(default, bool)}
