"""The body of ``POST /api/sessions``, checked completely and turned into a `SessionRequest`. Pure."""

from __future__ import annotations

from typing import Any

from motley.orchestrator.api.body import Fields, is_number, is_text
from motley.orchestrator.session_request import (
    ByNode,
    ContradictionError,
    Flag,
    Integer,
    Kind,
    NodeNames,
    SessionRequest,
    Settings,
    Text,
    Weights,
    kinds,
)
from motley.protocol import MAX_RANKS


def session_request(body: object) -> SessionRequest:
    """What a client asks for.

    Raises:
        ApiError: 400, naming the field.
    """
    fields = Fields(body)
    given = {name: _read(fields, name, kind) for name, kind in kinds().items()}
    if not given["model"]:
        fields.refuse("model", "is missing: a local folder or a hub id", "missing_parameter")
    name = given["name"]
    if name is not None and (not name.strip() or "/" in name):
        fields.refuse("name", f"must not be blank or have a / in it, as {name!r} is; leave it out for the model's own")
    said = {name: value for name, value in given.items() if value or value == 0}  # 0 may be what is meant
    request = SessionRequest(**said)
    held = {request.quantisation, *request.quantisations.values()}
    if given["block"] is not None and held <= {"fp32", "fp16"}:
        fields.refuse(
            "block", f"is for quantised weights: quantisation {request.quantisation!r} has no blocks; leave it out"
        )
    try:
        request.check()
    except ContradictionError as error:
        fields.refuse(error.field, str(error))
    fields.finish()
    return request


def _read(fields: Fields, name: str, kind: Kind) -> Any:
    """One field as `SessionRequest` has it; None, or what is false, if absent."""
    match kind:
        case Text(choices):
            return fields.string(name, choices=choices)
        case Integer(low, high, choices):
            value = fields.integer(name, low, high)
            if value is not None and choices and value not in choices:
                fields.refuse(name, f"must be one of {', '.join(map(str, choices))}, not {value}")
            return value
        case Flag(default):
            return fields.boolean(name, default)
        case NodeNames():
            names = fields.take(name)
            if names is not None and not (_is_list(names) and all(is_text(node) for node in names)):
                fields.refuse(name, f"must be a list of 1 to {MAX_RANKS} node names, one per rank")
            return tuple(names or ())
        case Weights():
            weights = fields.take(name)
            if weights is not None and not (
                _is_list(weights) and all(is_number(each) and 0 <= each <= 1e9 for each in weights) and any(weights)
            ):
                fields.refuse(name, "must be a list of weights from 0 to 1e9, one per rank, not all 0")
            return tuple(map(float, weights or ()))
        case ByNode(choices):
            by_node = _strings(fields, name, "node names", "gaming-pc")
            for node, own in by_node.items():
                if choices and own not in choices:
                    fields.refuse(name, f"of node {node!r} must be one of {', '.join(choices)}, not {own!r}")
            return by_node
        case Settings():
            return _strings(fields, name, "names of settings", "device")


def _strings(fields: Fields, name: str, keys: str, example: str) -> dict[str, str]:
    """A JSON object of strings; empty if absent. `keys` says what they are by."""
    value = fields.take(name)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(map(is_text, (*value, *value.values()))):
        fields.refuse(name, f'must be an object of strings by {keys}, like {{"{example}": ...}}, not {value!r}')
    return dict(value)


def _is_list(value: object) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= MAX_RANKS
