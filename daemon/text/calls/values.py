"""Values of arguments that a model has written as plain text, as JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from motley.daemon.text.calls.formats import Parameters

_SPELT = {"True": "true", "False": "false", "None": "null"}
"""As some templates have taught models."""
_BARE_NAME = re.compile(r"[\w.-]+")
"""A name that needs no quotes."""


def types_of(schema: object) -> set[str]:
    """The JSON types that a schema names for a value; empty: it names none."""
    if not isinstance(schema, Mapping):
        return set()
    found = schema.get("type")
    types = {each for each in list_of([found] if isinstance(found, str) else found) if isinstance(each, str)}
    return types.union(*(types_of(each) for key in ("anyOf", "oneOf") for each in list_of(schema.get(key))))


def constants_of(schema: object) -> list[Any]:
    """The values that a schema names; none: it names none."""
    if not isinstance(schema, Mapping):
        return []
    return list_of(schema.get("enum", [schema["const"]] if "const" in schema else []))


def mapping_of(found: object) -> Mapping[str, Any]:
    """What a schema has under a key that must be an object, or nothing: schemas are what clients send."""
    return found if isinstance(found, Mapping) else {}


def list_of(found: object) -> list[Any]:
    """What a schema has under a key that must be a list, or nothing."""
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


def spelt(value: Any, form: Parameters) -> str:
    """A value of JSON as a model writes it."""
    if isinstance(value, str) and form.quote != '"':
        return form.quote + value + form.quote
    if value is None or isinstance(value, bool):
        return form.words[2 if value is None else int(not value)]
    if form.quote not in ("", '"'):
        if isinstance(value, list):
            return f"[{form.joint.join(spelt(each, form) for each in value)}]"
        if isinstance(value, dict):
            members = in_order(value, form).items()
            return "{" + form.joint.join(f"{spelt_name(key, form)}:{spelt(each, form)}" for key, each in members) + "}"
    return json.dumps(value, ensure_ascii=False)


def spelt_name(name: str, form: Parameters) -> str:
    """The name of an argument, or of a member of an object, as a model writes it."""
    return name if not form.quote or _BARE_NAME.fullmatch(name) else form.quote + name + form.quote


def in_order(members: Mapping[str, Any], form: Parameters) -> Mapping[str, Any]:
    """Arguments, or members of an object, in the order in which a model writes them."""
    return dict(sorted(members.items(), key=lambda each: each[0].lower())) if form.by_name else members


def plain_number(text: str) -> str:
    """A number as Python may have it (``07``, ``1_000``, ``.5``), as JSON has it; any other text as it is."""
    with suppress(ValueError):
        json.loads(text)
        return text
    for kind in (int, float):
        with suppress(ValueError):
            if math.isfinite(number := kind(text)):
                return json.dumps(number)
    return text


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
