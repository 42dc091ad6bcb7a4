"""Reading the JSON body of a request by a schema: everything is checked once, and what is wrong is told as OpenAI does.

Schemas are pydantic's: models that derive from `Body`, or a checked dataclass. Every value's type and range is checked
strictly, and a key that nobody knows is refused by name.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from aiohttp import web
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.docstrings import add_docstrings

BODY_S = 30.0
"""A request's body is here this soon after its headers; it has 2 MiB at most."""
_SHOWN = 60
"""Characters of a wrong value that a message repeats."""
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_CODES = {
    **dict.fromkeys(_UNKNOWN, "unknown_parameter"),
    "missing": "missing_parameter",
    "unsupported_parameter": "unsupported_parameter",
}
"""OpenAI's codes by pydantic's kinds of errors; others are ``invalid_value``."""
_Read = TypeVar("_Read")


class FieldError(ApiError):
    """A field of a request cannot be as it is (400).

    Attributes:
        why: the message without the field's path, which it begins with.
    """

    def __init__(self, path: str, why: str, code: str = "invalid_value") -> None:
        super().__init__(400, f"{path} {why}", param=path, code=code)
        self.why = why


class Body(BaseModel):
    """A JSON object whose keys are known. A key that is null counts as absent, but for those of `nulls`."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        defer_build=True,
        json_schema_extra=add_docstrings,
    )
    nulls: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict) and None in value.values():
            return {key: own for key, own in value.items() if own is not None or key in cls.nulls}
        return value


class Neutral:
    """Marks a field of OpenAI's that this server has not: it may have one of `values`, which ask for nothing."""

    def __init__(self, *values: Any) -> None:
        self._values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def check(value: Any) -> Any:
            if not any(type(value) is type(same) and value == same for same in self._values):
                hint = f"; leave it out or give {json.dumps(self._values[0])}" if self._values else "; leave it out"
                raise PydanticCustomError("unsupported_parameter", "is not supported{hint}", {"hint": hint})
            return value

        metadata = {"pydantic_js_updates": {"enum": [*self._values, None]}}
        return core_schema.no_info_plain_validator_function(
            check, json_schema_input_schema=core_schema.any_schema(metadata=metadata)
        )


def _unicode(text: str) -> str:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        refuse("must be a string of valid Unicode")
    return text


Text = Annotated[str, AfterValidator(_unicode)]
"""A string that UTF-8 can carry: JSON can smuggle in lone surrogates."""


def refuse(why: str, *path: str | int) -> NoReturn:
    """Refuse a value from within a validator of pydantic's; `path` leads from that value to what is wrong."""
    # Not in the template, where braces would be read as names.
    raise PydanticCustomError("invalid_value", "{why}", {"why": why, "path": list(path)})


def read(schema: TypeAdapter[_Read], body: object) -> _Read:
    """Check the body of a request.

    Raises:
        FieldError: naming what is wrong, or the first of it.
        ApiError: 400, it is no JSON object.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the request body must be a JSON object")
    try:
        return schema.validate_python(body)
    except ValidationError as error:
        raise _told(error, schema) from error


def _told(error: ValidationError, schema: TypeAdapter[Any]) -> FieldError:
    """What a client is told of the first thing that is wrong; unknown keys come last, as their owner meant another."""
    found = error.errors(include_url=False)
    first = next((one for one in found if one["type"] not in _UNKNOWN), found[0])
    path = _path([*first["loc"], *first.get("ctx", {}).get("path", ())])
    code = _CODES.get(first["type"], "invalid_value")
    if code == "unknown_parameter" and len(first["loc"]) == 1:
        fields = schema.json_schema()["properties"].items()
        known = (name for name, field in fields if None not in field.get("enum", ()))  # as `Neutral` ones have
        return FieldError(path, f"is not a known parameter; known: {', '.join(sorted(known))}", code)
    return FieldError(path, _why(first), code)


def _path(places: Sequence[str | int]) -> str:
    """Where something is in a body, like ``messages[0].content``."""
    path = "".join(f"[{place}]" if isinstance(place, int) else f".{place}" for place in places if place != "[key]")
    return path.removeprefix(".") or "the request body"


def _why(error: ErrorDetails) -> str:
    """What is wrong with a value, to be read behind its path."""
    kind, context = error["type"], error.get("ctx", {})
    match kind:
        case "missing":
            return "is missing"
        case "extra_forbidden" | "unexpected_keyword_argument":
            return "is not a known parameter"
        case "too_short" | "string_too_short" if context.get("min_length") == 1:
            return "must not be empty"
        case "too_long":
            return f"must have at most {context['max_length']} items, not {context['actual_length']}"
        case "invalid_value" | "unsupported_parameter":
            return error["msg"]
        case "literal_error":
            words = re.split(", | or ", context["expected"].replace("'", ""))
            return f"must be {'one of ' if words[1:] else ''}{', '.join(words)}, not {error['input']!r}"
    wanted = {
        "int_type": "an integer",
        "int_from_float": "an integer",
        "float_type": "a number",
        "bool_type": "true or false",
        "string_type": "a string",
        "list_type": "a list",
        "tuple_type": "a list",
        "dict_type": "an object",
        "mapping_type": "an object",
        "model_type": "an object",
        "model_attributes_type": "an object",
        "greater_than_equal": f"at least {context.get('ge', 0):g}",
        "greater_than": f"above {context.get('gt', 0):g}",
        "less_than_equal": f"at most {context.get('le', 0):g}",
    }.get(kind)
    if wanted is None:
        message = error["msg"]
        return f"{message[:1].lower()}{message[1:]}".replace("input should", "should")
    return f"must be {wanted}, not {_shown(error['input'])}"


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


async def read_json(request: web.Request) -> object:
    """The body of a request as JSON.

    Raises:
        ApiError: 400, it is none; 408, it does not come.
        aiohttp.web.HTTPRequestEntityTooLarge: it is too long.
    """
    try:
        async with asyncio.timeout(BODY_S):
            body = await request.read()
    except TimeoutError:
        raise ApiError(408, f"the request's body was not here within {BODY_S:.0f} s", code="timed_out") from None
    try:
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}", code="invalid_json") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
