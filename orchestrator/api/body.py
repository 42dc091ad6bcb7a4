"""Reading a JSON request body strictly: every value's type and range is checked, every unknown key is named."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Collection
from typing import Any, NoReturn, TypeGuard

from aiohttp import web

from motley.orchestrator.api.errors import ApiError

BODY_S = 30.0
"""A request's body is here this soon after its headers; it has 2 MiB at most."""


class FieldError(ApiError):
    """A field of a request cannot be as it is (400).

    Attributes:
        why: the message without the field's path, which it begins with.
    """

    def __init__(self, path: str, why: str, code: str) -> None:
        super().__init__(400, f"{path} {why}", param=path, code=code)
        self.why = why


class Fields:
    """The fields of a JSON object, taken one by one; `finish` refuses those nobody took.

    A field that is null counts as absent, but for `is_null`. All methods raise FieldError.
    """

    def __init__(self, value: object, path: str = "") -> None:
        if not isinstance(value, dict):
            raise ApiError(400, f"{path or 'the request body'} must be a JSON object", param=path or None)
        self._values: dict[str, Any] = {key: value for key, value in value.items() if value is not None}
        self._nulls = value.keys() - self._values
        self._path = f"{path}." if path else ""
        self._known = set[str]()

    def take(self, name: str) -> Any:
        """The raw value; None if absent."""
        self._known.add(name)
        return self._values.get(name)

    def is_null(self, name: str) -> bool:
        """Whether a field is there, and null."""
        return name in self._nulls

    def string(self, name: str, *, choices: Collection[str] = ()) -> str | None:
        value = self.take(name)
        if value is None:
            return None
        if not is_text(value):
            self.refuse(name, "must be a string of valid Unicode")
        if choices and value not in choices:
            self.refuse(name, f"must be one of {', '.join(choices)}, not {value!r}")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if not is_integer(value) or not low <= value <= high:
            self.refuse(name, f"must be an integer from {low} to {high}, not {_shown(value)}")
        return value

    def number(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
        """A number from `low` (with `above`: more than `low`) to `high`."""
        value = self.take(name)
        if value is None:
            return None
        if not is_number(value) or not low <= value <= high or (above and value == low):
            bound = "above" if above else "from"
            self.refuse(name, f"must be a number {bound} {low:g} to {high:g}, not {_shown(value)}")
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """`default` if absent."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, f"must be true or false, not {_shown(value)}")
        return default if value is None else value

    def refuse(self, name: str, why: str, code: str = "invalid_value") -> NoReturn:
        raise FieldError(f"{self._path}{name}", why, code)

    def finish(self) -> None:
        """Refuse the fields that nobody took."""
        for name in self._values:
            if name not in self._known:
                known = ", ".join(sorted(self._known))
                self.refuse(name, f"is not a known parameter; known: {known}", code="unknown_parameter")


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


def is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def is_text(value: object) -> TypeGuard[str]:
    """A string that UTF-8 can carry: JSON can smuggle in lone surrogates."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
