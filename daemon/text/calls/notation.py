"""Arguments as Python and as Gemma write them, told as JSON as they come.

Both are JSON but for how names, texts and words are spelt, and models mix the ways, so one reader takes them all: names
with or without quotes, texts between ``<|"|>``, ``<escape>``, ``"``, ``'`` or three of these, brackets of any kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from motley.daemon.text.calls.values import as_json, is_text, plain_number
from motley.daemon.text.stops import held_back

_AS_IT_IS = ('<|"|>', "<escape>")
"""Between two of one of these, a text has no escapes."""
_QUOTE = re.compile(rf"""{"|".join(map(re.escape, _AS_IT_IS))}|"{{3}}|'{{3}}|"(?=[^"]|"[^"])|'(?=[^']|'[^'])""")
_MAYBE_QUOTE = re.compile(r"""["']{1,2}""")
"""What may be one quote, an empty text, or the beginning of three quotes, by what comes behind it."""
_OPEN, _CLOSE = "([{", ")]}"
_BEHIND_NAME, _BEHIND_VALUE = re.compile(r"[(){}\[\],:=]"), re.compile(r"[(){}\[\],]")
"""What a name, or a value, without quotes does not have in it, so that it is whole where one of these stands."""
_BEFORE_NAME, _BEFORE_VALUE = re.compile(r"[\s,]*"), re.compile(r"[\s,:=]*")
_SKIPPED = re.compile(r"""[()\[\]{}\n]|(?<!\\)["']""")
"""What tells where arguments end that could not be read."""

_PLAIN = re.compile(r"[^\\\"']+")
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_HALF_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}

# Some templates write texts between quotes as they are, so models have learnt to write texts that have quotes in them.
# A quote ends its text if what stands behind it could stand behind a text.
_BEHIND, _MAYBE_BEHIND = re.compile(r"\s*[,:)\]}]"), re.compile(r"\s*")
"""What stands behind a text within a list or an object, or behind a name; and what may become that."""
_END = r"[)}]\s*[\],<\n]"
"""The end of all arguments, and what follows it: another call, the end of the list of calls, a mark, the line's end."""
_BEHIND_ARGUMENT = re.compile(rf"\s*(?:{_END}|,\s*(?:{_END}|[\w.-]+\s*[:=]))")
"""What stands behind a text that is an argument itself: the name of the next, or the end of all. A comma or a bracket
is not enough, as arguments are the long texts (commands, sources), in which quotes have these behind them: the text of
``run='grep 'a', b'`` ends with the last quote. Within a list nothing tells such a text from two, as in ``'a', 'b'``."""
_MAYBE_BEHIND_ARGUMENT = re.compile(r"\s*(?:[)}]\s*|,\s*(?:[)}]\s*|[\w.-]+\s*)?)?")
"""What may become that."""
_AHEAD = 200
"""Characters behind a quote that are waited for to tell whether it ends its text. If all of them may still become what
stands behind a text (they are spaces, say), it does."""


@dataclass
class _Level:
    """An object or a list that has begun: what ends it in JSON, and whether it has anything in it."""

    end: str
    used: bool = False


class NotedArguments:
    """Reads the arguments of one call, behind the bracket that opens them.

    Where they are written in another way than this, a call of a function as a value say, what was read before that is
    all of them, and what follows is skipped up to the bracket that ends them.

    Args:
        schemas: of the arguments, by their names.
        at: characters of the text before them.
        mark: ends them wherever it stands, in a text of theirs too; empty: nothing does.
    """

    def __init__(self, schemas: Mapping[str, Any], at: int, mark: str) -> None:
        self._schemas, self._mark = schemas, mark
        self._schema: Any = None
        """Of the argument under way."""
        self._levels = [_Level("}")]
        """All that is open, the arguments themselves first."""
        self._named = False
        """Whether the member under way has its name already."""
        self._quote = ""
        """What ends the text under way; empty: none is."""
        self._at = self._seen = self._stop = at
        """Characters that have been read; those in which the end of what is under way was looked for; and those that
        may be read, as no mark begins in them."""
        self._skipping = 0
        """Brackets that are still to be closed in what is skipped."""
        self._untold = "{"
        """What is to be told before all else."""

    def look(self, text: str, last: bool = False) -> tuple[str, int]:
        """What is new of the arguments, as JSON, and where they end, or 0.

        Args:
            text: all that is there of the call.
            last: no more will come: what is open is closed.
        """
        mark = text.find(self._mark, self._stop) if self._mark else -1
        marked = mark >= 0
        self._stop = mark if marked else len(text) - (0 if last else held_back(text, self._mark))
        told, self._untold = self._untold, ""
        while self._levels:
            piece = self._in_text(text, last or marked) if self._quote else self._token(text, marked)
            if piece is None:
                break
            told += piece
        if self._levels and (last or marked):
            told, self._at = told + self._closed(), self._stop
        self._skip(text)
        return told, self._at if not self._levels and (marked or not self._skipping) else 0

    def _token(self, text: str, marked: bool) -> str | None:
        """The next name, value or bracket, or what ends all if it is none of these; None: it is not whole yet.

        Args:
            marked: the text is whole up to the mark.
        """
        level = self._levels[-1]
        naming = level.end == "}" and not self._named
        if before := (_BEFORE_NAME if naming else _BEFORE_VALUE).match(text, self._at, self._stop):
            self._at = before.end()
        if self._at == self._stop:
            return None
        first = text[self._at]
        if first in _CLOSE:
            self._at += 1
            self._levels.pop()
            missing, self._named = "null" if self._named else "", False
            return missing + level.end
        ahead = ", " if level.used and not self._named else ""
        if quote := _QUOTE.match(text, self._at, self._stop):
            self._at, self._quote, level.used = quote.end(), quote[0], True
            return ahead + '"'
        if _MAYBE_QUOTE.fullmatch(text, self._at, self._stop):
            return None
        if first in _OPEN and not naming:
            self._at, self._named, level.used = self._at + 1, False, True
            self._levels.append(_Level("}" if first == "{" else "]"))
            return ahead + ("{" if first == "{" else "[")
        end = (_BEHIND_NAME if naming else _BEHIND_VALUE).search(text, max(self._at, self._seen), self._stop)
        if end is None and not (marked and not naming):
            self._seen = self._stop
            return None
        stop = end.start() if end else self._stop
        if stop == self._at or (end and end[0] not in (":=" if naming else f",{_CLOSE}")):
            self._skipping = len(self._levels)
            return self._closed()
        bare, self._at, level.used = text[self._at : stop].rstrip(), stop, True
        self._named = naming
        if naming:
            if len(self._levels) == 1:
                self._schema = self._schemas.get(bare)
            return f"{ahead}{json.dumps(bare, ensure_ascii=False)}: "
        schema = self._schema if len(self._levels) == 1 else None
        return ahead + as_json(bare if is_text(schema) else plain_number(bare), schema)

    def _closed(self) -> str:
        """Close all that is open: what makes JSON of all that was told."""
        quote = self._end_text() if self._quote else ""
        missing, self._named = "null" if self._named else "", False
        ends = "".join(level.end for level in reversed(self._levels))
        self._levels.clear()
        return quote + missing + ends

    def _skip(self, text: str) -> None:
        """Go on to the bracket that ends arguments which could not be read. Brackets between quotes on one line do not
        count; what looks like a quote and has no other on its line may be none."""
        while self._skipping and (found := _SKIPPED.search(text, self._at, self._stop)):
            letter, self._at = found[0], found.end()
            if letter in ("\n", self._quote):
                self._quote = ""
            elif self._quote:
                continue
            elif letter in "\"'":
                within_word = text[found.start() - 1].isalnum()  # as in it's
                self._quote = "" if within_word else letter
            else:
                self._skipping += 1 if letter in _OPEN else -1
        if self._skipping:
            self._at = self._stop

    def _in_text(self, text: str, last: bool) -> str | None:
        """The next piece of the text under way, or its end; None: it is not certain yet."""
        if self._quote in _AS_IT_IS:
            return self._as_it_is(text)
        if plain := _PLAIN.match(text, self._at, self._stop):
            self._at = plain.end()
            return _inner(plain[0])
        if text.startswith("\\", self._at, self._stop):
            escape = _ESCAPE.match(text, self._at, self._stop)
            if escape is None or _HALF_ESCAPE.fullmatch(text, self._at, self._stop):
                return None
            self._at = escape.end()
            return _unescaped(escape[0])
        ends = self._ends(text, last) if self._at < self._stop else None
        if ends is None:
            return None
        quote = text[self._at]
        self._at += len(self._quote) if ends else 1
        return self._end_text() if ends else _inner(quote)

    def _as_it_is(self, text: str) -> str | None:
        """As `_in_text`, of a text without escapes."""
        piece, end, _ = text[self._at : self._stop].partition(self._quote)
        piece = piece if end else piece[: len(piece) - held_back(piece, self._quote)]
        self._at += len(piece) + len(end)
        return _inner(piece) + self._end_text() if end else _inner(piece) or None

    def _ends(self, text: str, last: bool) -> bool | None:
        """Whether the quote that comes next ends the text under way; None: that is not known yet."""
        start = self._at + len(self._quote)
        ahead = text[self._at : min(start, self._stop)]
        if ahead != self._quote:
            return None if self._quote.startswith(ahead) and not last else False
        if len(self._quote) > 1:
            return True
        argument = self._named and len(self._levels) == 1
        behind, maybe = (_BEHIND_ARGUMENT, _MAYBE_BEHIND_ARGUMENT) if argument else (_BEHIND, _MAYBE_BEHIND)
        stop = min(start + _AHEAD, self._stop)
        if behind.match(text, start, stop):
            return True
        return (last or self._stop > start + _AHEAD or None) if maybe.fullmatch(text, start, stop) else False

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
