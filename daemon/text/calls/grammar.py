"""A grammar of an answer that calls tools, in the model's own way of writing, with arguments that are valid by their
schemas. In Lark's notation, as llguidance has it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from motley.daemon.sampling.constraint import JSON_OPTIONS, ConstraintError
from motley.daemon.text.calls.formats import CallFormat
from motley.daemon.text.calls.values import constants_of, is_text, mapping_of


def calls_grammar(
    calls: CallFormat,
    tools: Sequence[Any],
    one: bool,
    marks: Mapping[str, int],
    strict: Collection[str] | None = None,
    said: str = "",
) -> str:
    """A grammar of an answer that calls some of these tools, each with arguments that are valid by its schema.

    Args:
        one: there is one call, not several.
        marks: those marks that are special tokens, by their ids.
        strict: the answer may be a text, and call tools in it or not: once it has written the mark of a call, it is
            kept to one. Arguments are then valid by the schemas of the tools of these names, and any objects of others.
            None: it is nothing but calls.
        said: what an answer is that calls nothing, as a symbol of the grammar; empty: any text, also before calls.

    Raises:
        ConstraintError: the model writes calls in a way in which it cannot be kept to the schema of a tool.
    """
    write = _Writing(calls, marks)
    begin, end = write.literal(calls.begin + calls.lead), write.literal(calls.tail + calls.end)
    kinds = " | ".join(f"tool_{index}" for index in range(len(tools)))
    if one or not calls.begin or calls.joint is None:
        repeats = not one and bool(calls.begin)
        several = f"marked ({write.literal(calls.end and _BETWEEN_MARKED)} marked)*" if repeats else "marked"
        rules = [f"marked: opened call {end}"]
    else:
        several, rules = "marked", [f"marked: opened call ({write.literal(calls.joint)} call)* {end}"]
    if strict is None:
        rules += [f"start: {several}", f"opened: {begin}"]
    elif said:
        rules += [f"start: {several} | {said}", f"opened: {begin}"]
    elif not calls.begin:
        rules += ["start: marked | SAID", "opened:", r"SAID: /\s*([^\s{\[](.|\n)*)?/"]
    else:
        repeated = calls.end and not one
        rules += [f"start: {'marked* SAID' if repeated else 'marked | SAID'}", r"SAID: /(.|\n)*/"]
        if calls.begin in marks:
            rules.append(f"opened: SAID {begin}")
        else:  # what a mark is spelt of is text, too, so the text ends where the mark does first
            rules += [
                f"text[lazy]: SAID {json.dumps(calls.begin)}",
                f"opened: text {write.literal(calls.lead)}",
            ]
    rules.append(f"call: {kinds}")
    for index, tool in enumerate(tools):
        function = tool["function"]
        bound = strict is None or function["name"] in strict
        rules += write.rules_of(index, function["name"], function.get("parameters", {}) if bound else {}, bound)
    return "\n".join(rules)


_OF_OBJECTS = {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
    *("$schema", "$id", "$comment", "title", "description", "default", "examples"),
}
"""Keys of an object's schema that models can be kept to which write each property by itself."""
_BETWEEN_MARKED = "\n"
"""Between two calls with marks of their own."""


class _Writing:
    """What the model writes, as rules."""

    def __init__(self, calls: CallFormat, marks: Mapping[str, int]) -> None:
        self._calls = calls
        self._marks = marks
        self._split = re.compile("(" + "|".join(map(re.escape, marks)) + ")") if marks else None

    def literal(self, text: str) -> str:
        """A text, in which marks may be special tokens."""
        parts = self._split.split(text) if self._split else [text]
        written = [
            f"<[{self._marks[part]}]>" if part in self._marks else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        ]
        return " ".join(written)

    def rules_of(self, index: int, name: str, schema: Mapping[str, Any], bound: bool) -> list[str]:
        """The rules of a call of a tool, `tool_<index>`.

        Args:
            schema: of its arguments.
            bound: they must be valid by it; else any will do.
        """
        calls = self._calls
        before, after = calls.before.replace("{name}", name), calls.after
        head, _, rest = before.partition("{index}")
        begun = f"{self.literal(head)} /[0-9]+/ {self.literal(rest)}" if rest else self.literal(head)
        if not calls.parameter:
            whole = {"type": "object", **schema, "x-guidance": JSON_OPTIONS}
            return [
                f"tool_{index}: {begun} arguments_{index} {self.literal(after)}",
                f"arguments_{index}: %json {json.dumps(whole)}",
            ]
        ends = re.escape(calls.value_end.strip()).replace("/", r"\/")
        text = f"/(.|\\n)*/ & ~/(.|\\n)*{ends}(.|\\n)*/"
        value_end = self.literal(calls.value_end)
        ahead, _, behind = calls.parameter.partition("{key}")
        if not bound:
            key = f'{self.literal(ahead)} /[^<>"\\n]+/ {self.literal(behind)}'
            return [
                f"tool_{index}: {begun} any_{index}* {self.literal(after)}",
                f"any_{index}: {key} ANY_{index} {value_end}",
                f"ANY_{index}: {text}",
            ]
        properties, required = mapping_of(schema.get("properties")), schema.get("required") or []
        _check_object(name, schema, properties, required)
        rules, parameters = [], []
        for number, (key, kind) in enumerate(properties.items()):
            each = f"{index}_{number}"
            parameters.append(f"parameter_{each}{'' if key in required else '?'}")
            begins = self.literal(calls.parameter.replace("{key}", key))
            if constants := constants_of(kind):
                spelt = [value if isinstance(value, str) else json.dumps(value) for value in constants]
                value = f"({' | '.join(self.literal(one) or json.dumps('') for one in spelt)})"
            elif is_text(kind):
                value = f"TEXT_{each}"
                rules.append(f"{value}: {' & '.join([text, *_bounds(name, key, kind)])}")
            else:
                value = f"value_{each}"
                defined = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
                whole = {**defined, **mapping_of(kind), "x-guidance": JSON_OPTIONS}
                rules.append(f"{value}: %json {json.dumps(whole)}")
            rules.append(f"parameter_{each}: {begins} {value} {value_end}")
        return [f"tool_{index}: {' '.join([begun, *parameters, self.literal(after)])}", *rules]


def _check_object(name: str, schema: Mapping[str, Any], properties: Mapping[str, Any], required: object) -> None:
    """
    Raises:
        ConstraintError: arguments that the model writes each by itself cannot be kept to this schema.
    """
    what = [repr(key) for key in schema if key not in _OF_OBJECTS]
    if schema.get("type", "object") != "object":
        what.append(f"type {schema['type']!r}")
    if not isinstance(required, list) or any(key not in properties for key in required):
        what.append("'required' that is no property")
    if what:
        raise ConstraintError(
            f"{name!r} has parameters with {', '.join(what)}, which is not supported for this model, as it writes each"
            " parameter by itself; supported are objects with properties"
        )


def _bounds(name: str, key: str, kind: Mapping[str, Any]) -> list[str]:
    """What a text must be besides by its schema, as terminals.

    Raises:
        ConstraintError: the schema has more than is supported of texts.
    """
    if "format" in kind:
        raise ConstraintError(
            f"{name!r} has a parameter {key!r} with 'format', which is not supported for this model; use a pattern"
        )
    bounds = []
    if isinstance(pattern := kind.get("pattern"), str):
        begun, ended = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
        inner = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern[begun : len(pattern) - ended])
        bounds.append(f"/{'' if begun else _ANY}({inner}){'' if ended else _ANY}/")
    least, most = kind.get("minLength", 0), kind.get("maxLength")
    if least or most is not None:
        bounds.append(rf"/(.|\n){{{least},{'' if most is None else most}}}/")
    return bounds


_ANY = r"(.|\n)*"
