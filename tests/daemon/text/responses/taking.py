"""Answers taken apart by response templates."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from motley.daemon.text.responses.parts import ResponseParts
from motley.daemon.text.responses.template import read_response_template
from tests.daemon.text.putting_together import Taken, put_together
from tests.daemon.text.responses.cases import TEMPLATES

CALLS = "fields/tool_calls"
SCHEMAS: dict[str, dict[str, Any]] = {"f": {"a": {"type": "string"}, "n": {"type": "integer"}}}


def taken(
    written: dict[str, Any], pieces: list[str], prompt: str = "", schemas: dict[str, dict[str, Any]] | None = None
) -> Taken:
    parts = ResponseParts(read_response_template(written), prompt, schemas or {})
    out = [part for piece in pieces for part in parts.push(piece)]
    out += parts.flush()
    begun = list(dict.fromkeys(part.call.index for part in out if part.call))
    assert begun == list(range(len(begun)))
    assert parts.complete <= len(begun)
    return put_together(out)


def changed(path: str, value: object, template: str = "gemma4") -> dict[str, Any]:
    """A template with something else at a path, between slashes."""
    written: dict[str, Any] = deepcopy(TEMPLATES[template])
    *place, last = path.split("/")
    inner = written
    for key in place:
        inner = inner.setdefault(key, {})
    inner[last] = value
    return written
