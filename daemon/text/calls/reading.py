"""Reading a call of a tool as it comes, in the way in which the model writes calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from motley.daemon.text.calls.formats import CallFormat
from motley.daemon.text.calls.notation import NotedArguments
from motley.daemon.text.calls.values import as_json

LONGEST_HEAD = 400
"""Characters in which a call must have named its tool."""


@dataclass(frozen=True)
class Named:
    """A call has begun: the name of its tool and, if the model writes one, what the call is called."""

    name: str
    id: str = ""


@dataclass(frozen=True)
class Ended:
    """A call has ended after so many characters; or it was none."""

    at: int
    is_call: bool = True


Found = Named | str | Ended
"""What is found in a call's text, where a str is a piece of its arguments, which are JSON."""


class CallReader(Protocol):
    """Reads one call."""

    def look(self, text: str) -> Iterator[Found]:
        """What is found with the text as it is now: all of the call that is there, from its beginning on."""

    def rest(self, text: str) -> str:
        """What of the arguments is left to be told, as no more text will come."""


class JsonCall:
    """Reads a call that is a JSON object, ``{"name": ..., "arguments": {...}}``.

    Args:
        form: has the names of both members; arguments may also be called as most models call them.
    """

    def __init__(self, form: CallFormat) -> None:
        names: list[str] = _MEMBER.findall(form.before) if form.is_json else ["name", "arguments"]
        self._name, self._arguments = names[0], [*names[1:], "arguments", "parameters"]
        either = "|".join(self._arguments)
        self._head = re.compile(rf'\{{\s*"{self._name}"\s*:\s*({_TEXT})\s*,\s*"(?:{either})"\s*:\s*(?=\{{)')
        self._scan, self._mark = _Nested(), form.end
        self._told = -1
        """Characters up to which the arguments have been told; -1: they have not begun."""

    def look(self, text: str) -> Iterator[Found]:
        if self._told < 0 and (head := self._head.match(text)):
            self._told = head.end()
            yield Named(json.loads(head[1]))
        inner, end = self._scan.look(text, self._told)
        if self._told >= 0 and inner > self._told:
            yield text[self._told : inner]
            self._told = inner
        if not end:
            closed = self._scan.member_end  # the call may lack its own last brace
            if closed and self._mark and text[closed:].lstrip().startswith(self._mark):
                yield Ended(closed)
        elif self._told >= 0:
            yield Ended(end)
        else:
            yield from self._unusual(text[:end])

    def rest(self, text: str) -> str:
        return text[self._told :] if self._told >= 0 and not self._scan.member_end else ""

    def _unusual(self, text: str) -> Iterator[Found]:
        """A whole call that is not written as usual, or what only looks like one."""
        try:
            call = json.loads(text)
            name = call[self._name]
            arguments: object = next((call[key] for key in self._arguments if key in call), {})
        except (ValueError, LookupError, RecursionError):
            name = arguments = None
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            yield Ended(len(text), is_call=False)
            return
        yield Named(name)
        yield arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield Ended(len(text))


_MEMBER = re.compile(r'"(\w+)": ')
"""The name of a member of a call."""
_TEXT = r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"'
"""A text as JSON has it."""


class NamedCall:
    """Reads a call whose name stands before all arguments: ``name[ARGS]{...}``, say, or ``name(key="value")``."""

    def __init__(self, form: CallFormat, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas, self._mark = schemas, form.end
        self._known_only = not form.begin
        """Whether only tools that there are can be called: without marks, a text may look like a call."""
        self._noted = form.parameters is not None
        self._in_python = form.after == ")"
        self._head = _head(form, _IN_PARENTHESES if self._in_python else "" if self._noted else r"(?=\{)")
        self._after = "" if self._noted else form.after.strip()
        self._arguments: _JsonArguments | NotedArguments | None = None
        """What reads them; None: they have not begun."""
        self._end = 0
        """Characters up to the end of the arguments; 0: not known yet."""

    def look(self, text: str) -> Iterator[Found]:
        if self._arguments is None:
            head = self._head.match(text, 0, LONGEST_HEAD)
            if head is None:
                likely = _LIKELY.match(text) if self._in_python else None
                if likely and likely.end() < len(text):
                    yield Ended(likely.end(), is_call=False)
                else:
                    yield from _too_long(text)
                return
            named = _named(head)
            if self._known_only and named.name not in self._schemas:
                yield Ended(head.end(), is_call=False)
                return
            if self._noted:
                self._arguments = NotedArguments(self._schemas.get(named.name, {}), head.end(), self._mark)
            else:
                self._arguments = _JsonArguments(head.end())
            yield named
        if not self._end:
            told, self._end = self._arguments.look(text)
            if told:
                yield told
        if self._end:
            behind = text[self._end :].lstrip()
            if behind.startswith(self._after):
                yield Ended(len(text) - len(behind) + len(self._after))
            elif not self._after.startswith(behind):
                yield Ended(self._end)

    def rest(self, text: str) -> str:
        if self._arguments is None or self._end:
            return ""
        return self._arguments.look(text, last=True)[0]


_IN_PARENTHESES = r"(?=\)|[\w.-]+\s*=)"
"""What arguments in Python begin with: a name, for what has none belongs to no tool's parameter."""
_LIKELY = re.compile(r"\s*[^\s<>{}()\[\]|\"]*\s*(?:\(\s*[\w.-]*\s*)?")
"""What may become a call in Python."""


class _JsonArguments:
    """Reads arguments that are a JSON object, as they are.

    Args:
        at: characters of the text before them.
    """

    def __init__(self, at: int) -> None:
        self._scan = _Nested(at)
        self._told = at

    def look(self, text: str, last: bool = False) -> tuple[str, int]:
        """As `NotedArguments.look`."""
        _, end = self._scan.look(text, -1)
        told, self._told = text[self._told : end or None], end or len(text)
        return told, end


class TaggedCall:
    """Reads a call whose arguments stand between tags: ``<parameter=key>value</parameter>``, say. An argument is told
    when it is there as a whole.

    Args:
        schemas: of the arguments, by the name of the tool.
    """

    def __init__(self, form: CallFormat, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        assert form.parameters is not None, "else arguments are JSON"
        self._form, self._schemas = form, schemas
        self._head = _head(form, r"(?=<)")
        begin, _, end = form.parameters.before.partition("{key}")
        # What is taught to stand on lines of its own has a newline at either end that does not belong to it.
        self._on_lines = end.endswith("\n")
        key = rf"\s*{_loose(begin)}\s*([^<>\"\n]+?)\s*{_loose(end)}"
        self._key = re.compile(key + (r"\n?" if self._on_lines else ""))
        self._value_end = form.parameters.after.strip()
        self._follows = [each for each in (begin, form.after, form.end) if each]
        """What may stand behind a value."""
        self._at = -1
        """Characters that have been read; -1: not even the name has."""
        self._seen = 0
        """Characters of the value under way in which its end was looked for."""
        self._name = ""
        self._told = 0
        """Arguments that have been told."""

    def look(self, text: str) -> Iterator[Found]:
        if self._at < 0:
            head = self._head.match(text, 0, LONGEST_HEAD)
            if head is None:
                yield from _too_long(text)
                return
            self._at = head.end()
            named = _named(head)
            self._name = named.name
            yield named
        while key := self._key.match(text, self._at):
            stop = self._end_of_value(text, key.end())
            if stop < 0:
                return
            yield self._argument(key[1], text[key.end() : stop])
            self._at, self._seen = stop + len(self._value_end), 0
        behind = text[self._at :].lstrip()
        closing = self._form.after or self._form.end
        if behind.startswith(closing):
            yield "}" if self._told else "{}"
            yield Ended(len(text) - len(behind) + len(self._form.after))
        elif behind and not closing.startswith(behind) and not self._may_be_key(behind):
            yield "}" if self._told else "{}"
            yield Ended(self._at)

    def rest(self, text: str) -> str:
        """The last argument too, if it is whole and only what should follow it is missing."""
        told = ""
        if self._at >= 0 and (key := self._key.match(text, self._at)):
            value, end, behind = text[key.end() :].rpartition(self._value_end)
            if end and not behind.strip():
                told = self._argument(key[1], value)
        return told + "}" if self._told else ""

    def _end_of_value(self, text: str, start: int) -> int:
        """Where the mark stands that ends a value; -1: that is not known yet. The mark may be in the value, too."""
        at = max(start, start + self._seen - len(self._value_end))
        while (at := text.find(self._value_end, at)) >= 0:
            behind = text[at + len(self._value_end) :].lstrip()
            if any(behind.startswith(each) for each in self._follows):
                return at
            if any(each.startswith(behind) for each in self._follows):
                self._seen = at - start
                return -1
            at += len(self._value_end)
        self._seen = len(text) - start
        return -1

    def _argument(self, key: str, value: str) -> str:
        if self._on_lines:
            value = value.removesuffix("\n")
        schema = self._schemas.get(self._name, {}).get(key)
        self._told += 1
        return f"{', ' if self._told > 1 else '{'}{json.dumps(key)}: {as_json(value, schema)}"

    def _may_be_key(self, text: str) -> bool:
        """Whether a text begins a parameter, as far as it is there."""
        ahead = self._follows[0]
        return text.startswith(ahead) or ahead.startswith(text)


class _Nested:
    """Goes through a JSON value as it comes, up to the brace that ends it.

    Args:
        at: characters of the text before it.
    """

    def __init__(self, at: int = 0) -> None:
        self._at, self._depth = at, 0
        self._quoted = self._escaped = False
        self.member_end = 0
        """Characters up to the end of the member that is told; 0: it has not ended. Other members may follow."""

    def look(self, text: str, told: int) -> tuple[int, int]:
        """Go through what is there: up to where a member that began at `told` may be told, and the end, or 0.

        Args:
            told: -1: no member has begun.
        """
        end = 0
        for at in range(self._at, len(text)):
            letter = text[at]
            self._at = at + 1
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = letter == "\\", letter != '"'
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 1 and 0 <= told <= at and not self.member_end:
                    self.member_end = at + 1
                if not self._depth:
                    end = at + 1
                    break
        return (self.member_end or (len(text) if self._depth > 1 else 0)), end


def reader_of(form: CallFormat, begun: str, schemas: Mapping[str, Mapping[str, Any]]) -> CallReader:
    """What reads a call.

    Args:
        begun: the beginning of its text: some models write JSON whatever they were taught.
        schemas: of the arguments, by the name of the tool.
    """
    if form.is_json or begun.startswith("{"):
        return JsonCall(form)
    tagged = form.parameters is not None and not form.parameters.quote
    return TaggedCall(form, schemas) if tagged else NamedCall(form, schemas)


def _head(form: CallFormat, ahead: str) -> re.Pattern[str]:
    """What a call begins with, up to its arguments."""
    named = _loose(form.before).replace(r"\{name\}", _NAME).replace(r"\{index\}", r"(?P<index>\d+)")
    return re.compile(rf"\s*{named}\s*{ahead}")


_NAME = r"(?P<name>[^\s<>{}()\[\]|\uff5c\"]+?)"
"""The name of a tool, up to whatever marks its end; U+FF5C is the wide bar of DeepSeek's marks."""


def _loose(text: str) -> str:
    """A pattern of a text whose ends may have other whitespace."""
    return re.escape(text.strip())


def _named(head: re.Match[str]) -> Named:
    name, index = head["name"], head.groupdict().get("index")
    return Named(name, f"functions.{name}:{index}" if index else "")


def _too_long(text: str) -> Iterator[Found]:
    """The end of what is no call, if it should have named its tool by now."""
    if len(text) > LONGEST_HEAD:
        yield Ended(LONGEST_HEAD, is_call=False)
