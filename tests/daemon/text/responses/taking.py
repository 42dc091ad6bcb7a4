"""Answers taken apart by response templates."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from motley.daemon.text.responses.parts import ResponseParts
from motley.daemon.text.responses.template import read_response_template
from tests.daemon.text.responses.cases import TEMPLATES

Taken = tuple[str, str, list[tuple[str, str]]]
"""What was said, what was thought, and calls: names and arguments."""
CALLS = "fields/tool_calls"
SCHEMAS: dict[str, dict[str, Any]] = {"f": {"a": {"type": "string"}, "n": {"type": "integer"}}}


def taken(
    written: dict[str, Any], pieces: list[str], prompt: str = "", schemas: dict[str, dict[str, Any]] | None = None
) -> Taken:
    parts = ResponseParts(read_response_template(written), prompt, schemas or {})
    out = [part for piece in pieces for part in parts.push(piece)]
    out += parts.flush()
    calls: dict[int, list[str]] = {}
    for call in filter(None, (part.call for part in out)):
        assert bool(call.id) == bool(call.name) == (call.index not in calls), "the first piece names it"
        own = calls.setdefault(call.index, ["", ""])
        own[0] += call.name
        own[1] += call.arguments
    assert list(calls) == list(range(len(calls)))
    assert parts.complete <= len(calls)
    said, thought = ("".join(getattr(part, kind) for part in out) for kind in ("content", "reasoning"))
    return said, thought, [(name, arguments) for name, arguments in calls.values()]


def changed(path: str, value: object, template: str = "gemma4") -> dict[str, Any]:
    """A template with something else at a path, between slashes."""
    written: dict[str, Any] = deepcopy(TEMPLATES[template])
    *place, last = path.split("/")
    inner = written
    for key in place:
        inner = inner.setdefault(key, {})
    inner[last] = value
    return written
