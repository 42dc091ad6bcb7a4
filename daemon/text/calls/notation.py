"""Arguments as Python and as Gemma write them, told as JSON as they come.

Both are JSON but for how names, texts and words are spelt, and models mix the ways, so one reader takes them all: names
with or without quotes, texts between ``<|"|>``, ``"``, ``'`` or three of these, brackets of any kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from motley.daemon.text.calls.values import as_json, is_text, plain_number
from motley.daemon.text.stops import held_back

_AS_IT_IS = '<|"|>'
"""Between two of these, a text has no escapes."""
_QUOTE = rf"""(?P<quote>{re.escape(_AS_IT_IS)}|"{{3}}|'{{3}}|"(?=[^"]|"[^"])|'(?=[^']|'[^']))"""
_CLOSE = r"(?P<close>[)\]}])"
_NAME = re.compile(rf"""{_CLOSE}|{_QUOTE}|(?P<bare>[^"'(){{}}\[\],:=][^(){{}}\[\],:=]*)(?=[:=])""")
"""The name of a member, or the end of an object."""
_VALUE = re.compile(rf"""{_CLOSE}|{_QUOTE}|(?P<open>[(\[{{])|(?P<bare>[^"'(){{}}\[\],][^(){{}}\[\],]*)(?=[,)\]}}])""")
"""A value or its beginning, or the end of what it would be in."""
_BEFORE_NAME, _BEFORE_VALUE = re.compile(r"[\s,]*"), re.compile(r"[\s,:=]*")

_PLAIN = re.compile(r"[^\\\"']+")
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_HALF_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}

# A quote ends a text if what stands behind it could: templates have taught models texts with their own quotes in them.
_BEHIND, _MAYBE_BEHIND = re.compile(r"\s*[,:)\]}]"), re.compile(r"\s*")
_END = r"[)}]\s*[\],<\n]"
_BEHIND_ARGUMENT = re.compile(rf"\s*(?:{_END}|,\s*(?:{_END}|[\w.-]+\s*[:=]))")
_MAYBE_BEHIND_ARGUMENT = re.compile(r"\s*(?:[)}]\s*|,\s*(?:[)}]\s*|[\w.-]+\s*)?)?")
_AHEAD = 200
"""Characters in which it must be clear whether it does not."""


@dataclass
class _Level:
    """An object or a list that has begun: what ends it in JSON, and whether it has anything in it."""

    end: str
    used: bool = False


class NotedArguments:
    """Reads the arguments of one call, behind the bracket that opens them.

    Args:
        schemas: of the arguments, by their names.
    """

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas
        self._schema: Any = None
        """Of the argument under way."""
        self._levels = [_Level("}")]
        """All that is open, the arguments themselves first."""
        self._named = False
        """Whether the member under way has its name already."""
        self._quote = ""
        """What ends the text under way; empty: none is."""
        self._at = 0
        """Characters that have been read."""
        self._untold = "{"
        """What is to be told before all else."""

    def look(self, text: str, last: bool = False) -> tuple[str, int]:
        """What is new of the arguments, as JSON, and where they end, or 0.

        Args:
            text: all of them that is there.
            last: no more will come.
        """
        told, self._untold = self._untold, ""
        while self._levels:
            piece = self._in_text(text, last) if self._quote else self._token(text)
            if piece is None:
                break
            told += piece
        return told, 0 if self._levels else self._at

    def _token(self, text: str) -> str | None:
        """The next name, value or bracket; None: it is not whole yet."""
        level = self._levels[-1]
        naming = level.end == "}" and not self._named
        before = (_BEFORE_NAME if naming else _BEFORE_VALUE).match(text, self._at)
        self._at = before.end() if before else self._at
        found = (_NAME if naming else _VALUE).match(text, self._at)
        if found is None:
            return None
        self._at = found.end()
        if found["close"]:
            self._levels.pop()
            missing, self._named = "null" if self._named else "", False
            return missing + level.end
        ahead = ", " if level.used and not self._named else ""
        level.used = True
        if found["quote"]:
            self._quote = found["quote"]
            return ahead + '"'
        bare = (found["bare"] or "").rstrip()
        if naming:
            if len(self._levels) == 1:
                self._schema = self._schemas.get(bare)
            self._named = True
            return f"{ahead}{json.dumps(bare, ensure_ascii=False)}: "
        self._named = False
        if found["open"]:
            self._levels.append(_Level("}" if found["open"] == "{" else "]"))
            return ahead + ("{" if found["open"] == "{" else "[")
        schema = self._schema if len(self._levels) == 1 else None
        return ahead + as_json(bare if is_text(schema) else plain_number(bare), schema)

    def _in_text(self, text: str, last: bool) -> str | None:
        """The next piece of the text under way, or its end; None: it is not certain yet."""
        if self._quote == _AS_IT_IS:
            return self._as_it_is(text)
        if plain := _PLAIN.match(text, self._at):
            self._at = plain.end()
            return _inner(plain[0])
        if text.startswith("\\", self._at):
            escape = _ESCAPE.match(text, self._at)
            if escape is None or _HALF_ESCAPE.fullmatch(text, self._at):
                return None
            self._at = escape.end()
            return _unescaped(escape[0])
        ends = self._ends(text, last) if self._at < len(text) else None
        if ends is None:
            return None
        quote = text[self._at]
        self._at += len(self._quote) if ends else 1
        return self._end_text() if ends else _inner(quote)

    def _as_it_is(self, text: str) -> str | None:
        """As `_in_text`, of a text without escapes."""
        end = text.find(self._quote, self._at)
        upto = end if end >= 0 else len(text) - held_back(text, self._quote)
        piece, self._at = text[self._at : upto], max(upto, self._at)
        if end < 0:
            return _inner(piece) or None
        self._at += len(self._quote)
        return _inner(piece) + self._end_text()

    def _ends(self, text: str, last: bool) -> bool | None:
        """Whether the quote that comes next ends the text under way; None: that is not known yet."""
        ahead = text[self._at : self._at + len(self._quote)]
        if ahead != self._quote:
            return None if self._quote.startswith(ahead) and not last else False
        if len(self._quote) > 1:
            return True
        argument = self._named and len(self._levels) == 1
        behind, maybe = (_BEHIND_ARGUMENT, _MAYBE_BEHIND_ARGUMENT) if argument else (_BEHIND, _MAYBE_BEHIND)
        start, stop = self._at + 1, self._at + 1 + _AHEAD
        if behind.match(text, start, stop):
            return True
        return (last or len(text) > stop or None) if maybe.fullmatch(text, start, stop) else False

    def _end_text(self) -> str:
        self._quote = ""
        self._named = self._levels[-1].end == "}" and not self._named
        return '": ' if self._named else '"'


def _inner(text: str) -> str:
    """A piece of a text as JSON has it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _unescaped(escape: str) -> str:
    r"""What an escape stands for, as JSON has it; one that Python does not know is its letters, as in ``\d``."""
    kind, digits = escape[1], escape[2:]
    if kind == "u" and digits:
        return escape
    if digits:
        code = int(digits, 16)
        return json.dumps(chr(code))[1:-1] if code < 0x110000 else _inner(escape)
    if kind in "\\'\"/":
        return _inner(kind)
    return _inner(_ESCAPED.get(kind, escape))
