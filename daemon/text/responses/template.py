"""How a model's answers are taken apart, as its own files tell: ``response_template`` in ``tokenizer_config.json``, as
transformers has it since 5.13 (https://huggingface.co/docs/transformers/main/chat_response_parsing).

A template names fields, each with what opens and closes it (texts, or patterns), and how what stands between is read.
It comes from strangers, and so do its patterns, whose time `motley.daemon.text.responses.patience.Patience` bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import regex
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from motley.daemon.text.calls.formats import LFM2, CallFormat

KINDS = {"content": "content", "thinking": "reasoning", "reasoning": "reasoning", "reasoning_content": "reasoning"}
"""Fields that are texts, and what they are of an answer."""
CALLS = "tool_calls"
_LONGEST_PATTERN = 1000
_MOST_REPEATS = 10_000
"""The product of all counts in a pattern: the library writes repetitions out."""
_BACKWARDS = regex.compile(r"(?<!\\)(?:\\\\)*\\K")
"""Has a match begin at another place than where it was found, behind its end even."""
_QUOTES = {'<|"|>', "<escape>", '"', "'"}
"""What `motley.daemon.text.calls.notation` knows around texts."""
BEGIN = "\0"
"""Stands for what opens calls, where their format has no mark of its own."""


class InvalidResponseTemplate(ValueError):
    """A response template that is malformed, or has a feature that is not supported."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _FieldAsWritten(_Model):
    open: StrictStr | list[StrictStr] | None = None
    open_pattern: StrictStr | None = None
    close: StrictStr | list[StrictStr] | None = None
    close_pattern: StrictStr | None = None
    content: Literal["text", "int", "float", "bool", "json", "xml-inline", "kv-lines", "python-call-list"] = "text"
    content_args: dict[StrictStr, Any] = {}
    repeats: StrictBool = False  # without it, too, all texts and calls are told, as a stream takes nothing back
    join: StrictStr | None = None
    optional: StrictBool = True  # an answer that lacks the field is told as it is: it cannot be asked for anew
    transform: Any = None
    transform_each: StrictBool = False


class _AsWritten(_Model):
    version: Literal[1] = 1
    defaults: dict[StrictStr, Any] = {}
    fields_: dict[StrictStr, _FieldAsWritten] = Field(alias="fields", min_length=1, max_length=32)
    start_anchor: StrictStr | list[StrictStr] | None = None
    start_anchor_pattern: StrictStr | None = None


class _NoArgs(_Model):
    pass


class _TextArgs(_Model):
    strip: StrictBool = True


class _JsonArgs(_Model):
    unquoted_keys: StrictBool = False
    string_delims: list[tuple[StrictStr, StrictStr]] = []
    allow_non_json: StrictBool = False  # what is no JSON is told as it is, in any case


class _ValueArgs(_Model):
    strip: StrictBool = True
    allow_non_json: StrictBool = False  # what is no JSON is a text, in any case


class ValueParser(_Model):
    """How a value among named arguments is read."""

    name: Literal["text", "int", "float", "bool", "json"] = "text"
    args: _ValueArgs = _ValueArgs()


class _TagsAsWritten(_Model):
    tag_pattern: StrictStr
    value_parser: ValueParser | None = None
    merge_duplicates: StrictBool = False


class Lines(_Model):
    """Arguments on lines."""

    line_sep: StrictStr = Field(default="\n", min_length=1)
    kv_sep: StrictStr = Field(default=":", min_length=1)
    value_parser: ValueParser | None = None
    strip: StrictBool = True


@dataclass(frozen=True)
class Tags:
    """Arguments between tags.

    Attributes:
        tag: one of them; it has the groups ``key`` and ``value``.
        merge_duplicates: whether several values of a key are a list; else the last one counts.
    """

    tag: regex.Pattern[str]
    value_parser: ValueParser | None
    merge_duplicates: bool


@dataclass(frozen=True)
class Delimiter:
    """What opens or closes a field.

    Attributes:
        begun: matches nothing, but in part what may become a match; the pattern itself tells of none of these that is
            before a match.
        texts: it is one of these, of which the longest is the first; empty: it is whatever the pattern matches.
    """

    pattern: regex.Pattern[str]
    begun: regex.Pattern[str]
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallsWithin:
    """Calls whose names are within what a field has.

    Attributes:
        form: how they are written there, behind `BEGIN`.
    """

    form: CallFormat


@dataclass(frozen=True)
class NamedByOpening:
    """A call whose name is in what opens the field; all of the rest are its arguments.

    Attributes:
        name, id: groups of the opening's pattern; an empty `id`: there is none.
        written: how arguments are written: as JSON, with names and texts noted otherwise, in tags, on lines.
    """

    name: str
    id: str
    written: Literal["json", "noted"] | Tags | Lines


@dataclass(frozen=True)
class ResponseField:
    """A field of an answer.

    Attributes:
        kind: ``content``, ``reasoning`` or ``call``; empty: of nothing that an answer has, so it is left out.
        open: None: what no other field opens is of this one.
        close: None: nothing but the end does.
        strip: whether whitespace at both ends is left out of a text.
        between: stands between two texts of the field.
        calls: how a field of calls is read.
    """

    name: str
    kind: str
    open: Delimiter | None
    close: Delimiter | None
    strip: bool = True
    between: str = ""
    calls: CallsWithin | NamedByOpening | None = None


@dataclass(frozen=True)
class ResponseTemplate:
    """A model's response template.

    Attributes:
        start: behind its last place in the prompt the answer starts.
    """

    fields: tuple[ResponseField, ...]
    start: Delimiter

    @property
    def has_calls(self) -> bool:
        """Whether it tells how calls of tools are read."""
        return any(field.kind == "call" for field in self.fields)

    @property
    def left_out(self) -> list[str]:
        """The fields that answers have no place for."""
        return [field.name for field in self.fields if not field.kind]


def read_response_template(written: object) -> ResponseTemplate:
    """Read what a model's files have under ``response_template``.

    Raises:
        InvalidResponseTemplate: it is malformed, or what it says is not supported; by the name of the field.
    """
    template = _read(_AsWritten, written, "")
    for name, value in template.defaults.items():
        if value and name != "role":  # what answers lack is empty in any case, and whose they are the APIs say
            raise InvalidResponseTemplate(f"defaults.{name}: not supported")
    start = _delimiter(template.start_anchor, template.start_anchor_pattern, "start_anchor")
    if start is None:
        raise InvalidResponseTemplate("neither start_anchor nor start_anchor_pattern")
    fields = tuple(_field(name, field) for name, field in template.fields_.items())
    implicit = [field.name for field in fields if field.open is None]
    if len(implicit) > 1:
        raise InvalidResponseTemplate(f"several fields that nothing opens: {', '.join(implicit)}")
    if not implicit and "content" not in template.fields_:  # else what is said were lost
        fields += (_field("content", _FieldAsWritten()),)
    return ResponseTemplate(fields, start)


Read = TypeVar("Read", bound=_Model)


def _read(model: type[Read], written: object, where: str) -> Read:
    try:
        return model.model_validate(written)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join([*filter(None, [where]), *map(str, first["loc"])])
        raise InvalidResponseTemplate(f"{place}: {first['msg']}" if place else first["msg"]) from error


def _field(name: str, field: _FieldAsWritten) -> ResponseField:
    where = f"fields.{name}"
    opening = _delimiter(field.open, field.open_pattern, f"{where}.open")
    closing = _delimiter(field.close, field.close_pattern, f"{where}.close")
    if field.join is not None and not field.repeats:
        raise InvalidResponseTemplate(f"{where}: join without repeats")
    if name == CALLS:
        return ResponseField(name, "call", opening, closing, calls=_calls(field, opening, where))
    kind = KINDS.get(name, "")
    if not kind:
        return ResponseField(name, kind, opening, closing)
    if field.content != "text" or field.transform not in (None, "{content}"):
        raise InvalidResponseTemplate(f"{where}: is no plain text, which alone is supported there")
    strip = _read(_TextArgs, field.content_args, f"{where}.content_args").strip
    between = field.join if field.join is not None else "\n\n" if strip else ""
    return ResponseField(name, kind, opening, closing, strip, between)


def _delimiter(texts: str | Sequence[str] | None, pattern: str | None, where: str) -> Delimiter | None:
    if texts is None:
        return (
            None if pattern is None else delimiter_of(compiled(pattern, f"{where}_pattern"), where=f"{where}_pattern")
        )
    if pattern is not None:
        raise InvalidResponseTemplate(f"{where} beside {where}_pattern")
    among = tuple(sorted({texts} if isinstance(texts, str) else set(texts), key=len, reverse=True))
    if not all(among) or not among:
        raise InvalidResponseTemplate(f"{where}: a text is empty, or there is none")
    if sum(map(len, among)) > _LONGEST_PATTERN:
        raise InvalidResponseTemplate(f"{where}: the texts are too long")
    return delimiter_of(regex.compile("|".join(map(regex.escape, among))), among)


def delimiter_of(pattern: regex.Pattern[str], texts: tuple[str, ...] = (), where: str = "") -> Delimiter:
    """What opens or closes a field, by its pattern; errors as `compiled`."""
    end = "\n" if pattern.flags & regex.VERBOSE else ""  # there, a comment goes up to a line's end
    return Delimiter(pattern, _compile(f"(?:{pattern.pattern}{end})(?!)", pattern.flags, where), texts)


def compiled(pattern: str, where: str) -> regex.Pattern[str]:
    """A pattern of a template.

    Raises:
        InvalidResponseTemplate: it is none, too large, or does not go forward.
    """
    if len(pattern) > _LONGEST_PATTERN or _repeats(pattern) > _MOST_REPEATS:
        raise InvalidResponseTemplate(f"{where}: the pattern is too large")
    found = _compile(pattern, regex.DOTALL, where)
    if _BACKWARDS.search(pattern) or found.flags & regex.REVERSE:
        raise InvalidResponseTemplate(f"{where}: \\K and (?r) are not supported")
    return found


def _compile(pattern: str, flags: int, where: str) -> regex.Pattern[str]:
    try:
        return regex.compile(pattern, flags)
    except Exception as error:  # a stranger's pattern: it can exceed any limit
        raise InvalidResponseTemplate(f"{where}: not a valid pattern: {error}") from error


def _repeats(pattern: str) -> int:
    counts = [int(count) for inner in regex.findall(r"\{([^{}]*)\}", pattern) for count in regex.findall(r"\d+", inner)]
    return math.prod(filter(None, counts))


_PLACE = regex.compile(r"\{(\w+(?:\.\w+)?)\}")


def _calls(field: _FieldAsWritten, opening: Delimiter | None, where: str) -> CallsWithin | NamedByOpening:
    """How calls are read, by what becomes of them: ``{"type": "function", "function": {...}}`` with places for what was
    read."""
    groups = opening.pattern.groupindex if opening else {}
    match field.transform:
        case {"function": "{content}", **rest} if not field.transform_each:
            name, arguments = "content.name", "content.arguments"
        case {"function": {"name": str(name), "arguments": str(arguments), **more}, **rest} if not more:
            name, arguments = _place(name), _place(arguments)
        case _:
            raise InvalidResponseTemplate(f"{where}.transform: calls are not made in a way that is supported")
    identity = _place(str(rest.get("id", "")))
    if not name or not arguments or rest.keys() - {"type", "id"} or ("id" in rest and not identity):
        raise InvalidResponseTemplate(f"{where}.transform: calls are not made in a way that is supported")
    if name in groups and arguments == "content" and not field.transform_each:
        return NamedByOpening(name, identity if identity in groups else "", _arguments(field, where))
    within = "" if field.transform_each else "content."
    keys = [each.removeprefix(within) for each in (name, arguments) if each.startswith(within)]
    if len(keys) == 2 and "." not in "".join(keys):
        if field.content == "json" and not _is_noted(field, where):
            return CallsWithin(CallFormat(BEGIN, "", before=f'{{"{keys[0]}": "{{name}}", "{keys[1]}": '))
        if field.content == "python-call-list":
            _read(_NoArgs, field.content_args, f"{where}.content_args")
        if field.content == "python-call-list" and (within, *keys) == ("", "name", "arguments"):
            form = CallFormat(BEGIN, "", LFM2.before, LFM2.after, LFM2.parameters, LFM2.joint, listed=True)
            return CallsWithin(form)
    raise InvalidResponseTemplate(f"{where}: {field.content} with this transform is not supported")


def _place(text: str) -> str:
    """What a text of a transform is a place for; empty: it is none."""
    found = _PLACE.fullmatch(text)
    return found[1] if found else ""


def _is_noted(field: _FieldAsWritten, where: str) -> bool:
    """Whether names or texts in JSON are not written as JSON has them."""
    args = _read(_JsonArgs, field.content_args, f"{where}.content_args")
    if others := [pair for pair in args.string_delims if pair[0] != pair[1] or pair[0] not in _QUOTES]:
        raise InvalidResponseTemplate(f"{where}.content_args.string_delims: {others[0]} is not supported")
    return args.unquoted_keys or bool(args.string_delims)


def _arguments(field: _FieldAsWritten, where: str) -> Literal["json", "noted"] | Tags | Lines:
    inside = f"{where}.content_args"
    match field.content:
        case "json":
            return "noted" if _is_noted(field, where) else "json"
        case "xml-inline":
            tags = _read(_TagsAsWritten, field.content_args, inside)
            tag = compiled(tags.tag_pattern, f"{inside}.tag_pattern")
            if not tag.groupindex.keys() >= {"key", "value"}:
                raise InvalidResponseTemplate(f"{inside}.tag_pattern: no groups 'key' and 'value'")
            return Tags(tag, tags.value_parser, tags.merge_duplicates)
        case "kv-lines":
            return _read(Lines, field.content_args, inside)
    raise InvalidResponseTemplate(f"{where}.content: {field.content} are no arguments")
