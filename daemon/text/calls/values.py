"""Values of arguments that a model has written as plain text, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_SPELT = {"True": "true", "False": "false", "None": "null"}
"""As some templates have taught models."""


def types_of(schema: object) -> set[str]:
    """The JSON types that a schema names for a value; empty: it names none."""
    if not isinstance(schema, Mapping):
        return set()
    found = schema.get("type")
    types = {each for each in _list_of([found] if isinstance(found, str) else found) if isinstance(each, str)}
    return types.union(*(types_of(each) for key in ("anyOf", "oneOf") for each in _list_of(schema.get(key))))


def constants_of(schema: object) -> list[Any]:
    """The values that a schema names; none: it names none."""
    if not isinstance(schema, Mapping):
        return []
    return _list_of(schema.get("enum", [schema["const"]] if "const" in schema else []))


def mapping_of(found: object) -> Mapping[str, Any]:
    """What a schema has under a key that must be an object, or nothing: schemas are what clients send."""
    return found if isinstance(found, Mapping) else {}


def _list_of(found: object) -> list[Any]:
    return found if isinstance(found, list) else []


def is_text(schema: object) -> bool:
    """Whether a value is written as it is, as it may be a text."""
    return "string" in types_of(schema)


def as_json(text: str, schema: object) -> str:
    """A value as JSON, which a model has written as text.

    Args:
        schema: of the value. Where it may be a text, only what it may be besides is taken for something else.
    """
    types = types_of(schema)
    if types == {"string"} or text in constants_of(schema):
        return json.dumps(text, ensure_ascii=False)
    spelt = _SPELT.get(text.strip(), text.strip())
    try:
        value = json.loads(spelt, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if "string" in types and not _type_of(value) & types:
        return json.dumps(text, ensure_ascii=False)
    return spelt


def _no_json(spelt: str) -> None:
    raise ValueError(f"{spelt} is no JSON")


def _type_of(value: Any) -> set[str]:
    """The JSON types of a value."""
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case None:
            return {"null"}
        case list():
            return {"array"}
        case dict():
            return {"object"}
    return {"string"}
