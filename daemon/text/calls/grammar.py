"""A grammar of an answer that calls tools, in the model's own way of writing, with arguments that are valid by their
schemas. In Lark's notation, as llguidance has it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from motley.daemon.sampling.constraint import JSON_OPTIONS
from motley.daemon.text.calls.formats import CallFormat
from motley.daemon.text.calls.parameters import ParameterRules


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
    joint = write.literal(calls.joint)
    rules = [f"marked: opened call {f'({joint} call)*' if calls.listed and not one else ''} {end}"]
    several = f"marked ({joint} marked)*" if calls.begin and not calls.listed and not one else "marked"
    if strict is None:
        rules += [f"start: {several}", f"opened: {begin}"]
    elif said:
        rules += [f"start: {several} | {said}", f"opened: {begin}"]
    elif not calls.begin:
        rules += ["start: marked | SAID", f"opened: {begin}", r"SAID: /\s*([^\s{\[](.|\n)*)?/"]
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
        if calls.parameters is None:
            whole = {"type": "object", **schema, "x-guidance": JSON_OPTIONS}
            arguments, rules = f"arguments_{index}", [f"arguments_{index}: %json {json.dumps(whole)}"]
        else:
            parameters = ParameterRules(calls.parameters, self.literal, f"arguments_{index}", name, schema)
            arguments = parameters.bound() if bound else parameters.free()
            rules = parameters.rules
        return [f"tool_{index}: {begun} {arguments} {self.literal(after)}", *rules]
