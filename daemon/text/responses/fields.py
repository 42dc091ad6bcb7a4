"""Reading what a field of a response template has, as it comes; see `motley.daemon.text.responses.parts`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

from motley.daemon.text.answer_parts import AnswerParts, Part, begun_call
from motley.daemon.text.calls.notation import NotedArguments
from motley.daemon.text.calls.values import as_json, types_of
from motley.daemon.text.responses.patience import Patience
from motley.daemon.text.responses.template import (
    BEGIN,
    CallsWithin,
    Lines,
    Tags,
    ValueParser,
)
from motley.protocol import mesh_pb2 as pb

Schemas = Mapping[str, Mapping[str, Any]]
"""Of tools' arguments, by the name of a tool."""


class FieldReader(Protocol):
    """Reads one occurrence of a field."""

    @property
    def called(self) -> int:
        """Calls in it that have begun."""

    @property
    def complete(self) -> int:
        """Those of them that have ended."""

    @property
    def told(self) -> bool:
        """Whether something of a text has been told."""

    def push(self, text: str) -> Iterator[Part]:
        """The parts that are certain with this text."""

    def close(self) -> Iterator[Part]:
        """What is left, as no more text will come."""


class LeftOut:
    """Reads what an answer has no place for."""

    called = complete = 0
    told = False

    def push(self, text: str) -> Iterator[Part]:
        yield from ()

    def close(self) -> Iterator[Part]:
        yield from ()


class Text:
    """Reads what is said or thought.

    Args:
        kind: ``content`` or ``reasoning``.
        strip: whether whitespace at both ends is left out.
        before: stands before the first word.
    """

    called = complete = 0

    def __init__(self, kind: str, strip: bool, before: str) -> None:
        self._kind, self._before = kind, before
        self._text = _Text(strip)
        self.told = False

    def push(self, text: str) -> Iterator[Part]:
        if said := self._text.push(text):
            said, self._before, self.told = self._before + said, "", True
            yield Part(content=said) if self._kind == "content" else Part(reasoning=said)

    def close(self) -> Iterator[Part]:
        yield from ()


class Calls:
    """Reads calls that are whole, names among them.

    Args:
        index: of the first of them.
    """

    told = False

    def __init__(self, calls: CallsWithin, index: int, schemas: Schemas) -> None:
        self._parts = AnswerParts(calls.form, None, False, schemas)
        self._index = index
        for _ in self._parts.push(BEGIN):
            pass  # it is but a mark

    @property
    def called(self) -> int:
        return self._parts.called

    @property
    def complete(self) -> int:
        return self._parts.complete

    def push(self, text: str) -> Iterator[Part]:
        yield from self._counted(self._parts.push(text))

    def close(self) -> Iterator[Part]:
        yield from self._counted(self._parts.flush())

    def _counted(self, parts: Iterator[Part]) -> Iterator[Part]:
        for part in parts:
            if part.call is not None:
                part.call.index += self._index
            yield part


class NamedCall:
    """Reads the arguments of a call whose name is known, as they come.

    Args:
        called: what the model calls the call; empty: nothing.
    """

    told = False

    def __init__(
        self,
        written: Literal["json", "noted"],
        name: str,
        called: str,
        index: int,
        schemas: Schemas,
        patience: Patience,
    ) -> None:
        self._begun = begun_call(index, name, called)
        self._index, self._patience = index, patience
        self._arguments: _Arguments = _Text(strip=True) if written == "json" else _Noted(schemas.get(name, {}))
        self.called = self.complete = 0

    def push(self, text: str) -> Iterator[Part]:
        if not self.called:
            self.called = 1
            yield self._begun
        yield from _arguments(self._index, self._arguments.push(text))

    def close(self) -> Iterator[Part]:
        yield from self.push("")
        yield from _arguments(self._index, self._arguments.close())
        self.complete = 1
        if self._patience.lost and (behind := self._arguments.behind.strip()):
            yield Part(content=behind)  # nothing has looked for the end of the call


class WholeCall:
    """Reads a call whose name is known and whose arguments are in tags or on lines: it is told when it is whole, or as
    a text if that takes too long, as it may be without its arguments then, or have others."""

    told = False

    def __init__(
        self, written: Tags | Lines, name: str, called: str, index: int, schemas: Schemas, patience: Patience
    ) -> None:
        self._begun = begun_call(index, name, called)
        self._index = index
        self._written, self._schemas, self._patience = written, schemas.get(name, {}), patience
        self._body = ""
        self.called = self.complete = 0

    def push(self, text: str) -> Iterator[Part]:
        self._body += text
        yield from ()

    def close(self) -> Iterator[Part]:
        try:
            arguments = _in_object(self._written, self._pairs(), self._schemas)
        except TimeoutError:
            if body := self._body.strip():
                yield Part(content=body)
            return
        self.called = self.complete = 1
        yield self._begun
        yield from _arguments(self._index, arguments)

    def _pairs(self) -> list[tuple[str, str]]:
        """Keys and values; a `TimeoutError` as `Patience` has it, also if it was another pattern that took too long,
        as nothing has looked for the end of the call then."""
        written, body = self._written, self._body
        if isinstance(written, Tags):
            tags = self._patience(lambda **options: [*written.tag.finditer(body, **options)])
            return [(tag["key"] or "", tag["value"] or "") for tag in tags]
        if self._patience.lost:
            raise TimeoutError
        return _on_lines(written, body)


def _arguments(index: int, text: str) -> Iterator[Part]:
    if text:
        yield Part(call=pb.CallPiece(index=index, arguments=text))


class _Arguments(Protocol):
    """Makes JSON of arguments as a model writes them."""

    @property
    def behind(self) -> str:
        """What has come behind their end."""

    def push(self, text: str) -> str:
        """What is certain with this text."""

    def close(self) -> str:
        """What is left."""


class _Text:
    """A text as it is, but for whitespace at its ends."""

    behind = ""

    def __init__(self, strip: bool) -> None:
        self._strip, self._begun, self._space = strip, False, ""

    def push(self, text: str) -> str:
        if not self._strip:
            return text
        text = self._space + text if self._begun else text.lstrip()
        told = text.rstrip()
        self._space, self._begun = text[len(told) :], bool(told) or self._begun
        return told

    def close(self) -> str:
        return ""


class _Noted:
    """JSON whose names and texts are written otherwise; what is no object is told as it is."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas, self._body = schemas, ""
        self._reader: NotedArguments | None = None
        self._end = 0
        """Where they end; 0: they have not yet."""

    @property
    def behind(self) -> str:
        return self._body[self._end :] if self._end else ""

    def push(self, text: str) -> str:
        self._body += text
        if self._reader is None and self._body.lstrip().startswith("{"):
            self._reader = NotedArguments(self._schemas, self._body.index("{") + 1, "")
        return self._look(last=False) if self._reader else ""

    def close(self) -> str:
        return self._look(last=True) if self._reader else self._body.strip()

    def _look(self, last: bool) -> str:
        assert self._reader is not None, "they have begun"
        told, end = self._reader.look(self._body, last)
        self._end = self._end or end
        return told


def _in_object(written: Tags | Lines, pairs: list[tuple[str, str]], schemas: Mapping[str, Any]) -> str:
    """Arguments as JSON."""
    found = dict[str, list[str]]()
    for key, text in pairs:
        found.setdefault(key, []).append(_value(text, written.value_parser, schemas.get(key)))
    several = isinstance(written, Tags) and written.merge_duplicates
    members = (
        f"{json.dumps(key, ensure_ascii=False)}: "
        + (f"[{', '.join(values)}]" if several and len(values) > 1 else values[-1])
        for key, values in found.items()
    )
    return f"{{{', '.join(members)}}}"


def _on_lines(lines: Lines, text: str) -> list[tuple[str, str]]:
    parted = [line.partition(lines.kv_sep) for line in text.split(lines.line_sep)]
    pairs = [(key, value) for key, found, value in parted if found]
    return [(key.strip(), value.strip()) for key, value in pairs] if lines.strip else pairs


def _value(text: str, parser: ValueParser | None, schema: object) -> str:
    """A value as JSON. The tool's schema tells best what it is."""
    if parser is not None and parser.args.strip:
        text = text.strip()
    kind = parser.name if parser else "text"
    if types_of(schema) or kind in ("json", "int", "float"):
        return as_json(text, schema)
    if kind == "bool":
        return json.dumps(text.lower() in ("true", "1"))
    return json.dumps(text, ensure_ascii=False)
