"""The parts of an answer of gpt-oss, which writes messages to *channels* (https://github.com/openai/harmony).

======================================================================  ================
``<|channel|>analysis<|message|>...<|end|>``                            what it thinks
``<|channel|>commentary to=functions.f <|constrain|>json<|message|>``   a call of a tool
``<|channel|>commentary<|message|>...<|end|>``                          what it says before calls
``<|channel|>final<|message|>...``                                      what it says
======================================================================  ================

``<|start|>assistant`` stands before each but the first, for which the prompt has it; the receiver may stand there, too.
An answer ends with ``<|return|>`` or, behind the one call that it has, ``<|call|>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from motley.daemon.sampling.constraint import JSON_OPTIONS
from motley.daemon.text.answer_parts import Part, begun_call
from motley.daemon.text.stops import held_back
from motley.protocol import mesh_pb2 as pb

START, CHANNEL, MESSAGE, CONSTRAIN, END = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END)
_FINAL = "final"
_HEAD = re.compile(r"\s*(?:<\|start\|>assistant)?(?P<to>[^<]*)<\|channel\|>(?P<rest>.*)", re.DOTALL)
_RECEIVER = re.compile(r"to=functions\.([^\s<]+)")


def has_channels(template: str) -> bool:
    """Whether a chat template is of a model that writes to channels."""
    return CHANNEL in template


class ChannelParts:
    """Takes an answer's text apart as it comes, marks among it; see `motley.daemon.text.answer_parts.AnswerParts`."""

    def __init__(self) -> None:
        self.complete = 0
        """Calls that have ended."""
        self._held = ""
        self._kind = ""
        """What the message under way is: "reasoning", "content" or "call"; empty: its head is not whole yet."""
        self._called = 0
        self._name = ""
        """Of the tool that it calls."""
        self._told = False
        """Whether the message under way has said something."""
        self._said = False
        """Whether one before has."""

    def push(self, text: str) -> Iterator[Part]:
        """The parts that are certain with this text."""
        self._held += text
        while self._held:
            if not self._kind and not self._read_head():
                return
            if self._kind == "call" and self._called == self.complete:
                self._called += 1
                yield begun_call(self._called - 1, self._name)
            said, found, rest = self._held.partition(END)
            keep = 0 if found else held_back(said, END)
            self._held = rest if found else said[len(said) - keep :]
            if piece := said[: len(said) - keep]:
                yield self._part(piece)
            if not found:
                return
            self._end()

    def flush(self) -> Iterator[Part]:
        """What is left at the end."""
        held, self._held = self._held, ""
        if held and self._kind:
            yield self._part(held)
        elif held and not _HEAD.fullmatch(held) and START not in held:
            yield Part(content=held)
        self._end()

    def _read_head(self) -> bool:
        """Take the head of a message; False: it is not whole yet."""
        head, found, rest = self._held.partition(MESSAGE)
        if not found:
            opening = self._held.lstrip()
            begins = (START, CHANNEL, "to=")
            if any(opening.startswith(each) or each.startswith(opening) for each in begins):
                return False
            self._kind = "content"  # no message of a channel: a model that was not taught, or is kept to something
            return True
        self._held = rest
        known = _HEAD.fullmatch(head)
        channel = known["rest"].split(CONSTRAIN)[0].split(maxsplit=1)[:1] if known else []
        if receiver := _RECEIVER.search(head):
            self._kind, self._name = "call", receiver[1]
        else:
            self._kind = "reasoning" if channel == ["analysis"] or "to=" in head else "content"
        return True

    def _part(self, text: str) -> Part:
        if self._kind == "reasoning":
            return Part(reasoning=text)
        if self._kind == "call":
            return Part(call=pb.CallPiece(index=self._called - 1, arguments=text))
        between = "\n\n" if self._said and not self._told else ""
        self._told = True
        return Part(content=between + text)

    def _end(self) -> None:
        """The message under way has ended, if there is one."""
        if self._kind == "call":
            self.complete = self._called
        self._said, self._told = self._said or self._told, False
        self._kind = ""


def channel_grammar(
    tools: Sequence[Any], marks: Mapping[str, int], strict: Collection[str] | None, said: str = ""
) -> str:
    """A grammar, in Lark's notation, of an answer that calls one of these tools behind its thoughts, or says something
    on the final channel; the other arguments as `motley.daemon.text.answer_parts.calls_grammar`.

    Args:
        said: what it says there, as a symbol of the grammar; empty: any text.
    """

    def mark(text: str) -> str:
        return f"<[{marks[text]}]>" if text in marks else json.dumps(text)

    ends = ["call"] * bool(tools) + ["final"] * (strict is not None)
    rules = [
        f"start: before* ({' | '.join(ends)})",
        f'before: {mark(CHANNEL)} ("analysis" | "commentary") {mark(MESSAGE)} SAID {mark(END)} next',
        f'next: {mark(START)} "assistant"',
        f'final: {mark(CHANNEL)} "{_FINAL}" {mark(MESSAGE)} {said or "SAID"}',
        r"SAID: /(.|\n)*/",
    ]
    if tools:
        rules.append("call: " + " | ".join(f"tool_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        function = tool["function"]
        name, json_follows = f"to=functions.{function['name']}", f'{mark(CONSTRAIN)}? "json" {mark(MESSAGE)}'
        first = f"{mark(CHANNEL)} {json.dumps(f'commentary {name} ')}"
        other = f"{json.dumps(f' {name}')} {mark(CHANNEL)} {json.dumps('commentary ')}"
        rules.append(f"tool_{index}: ({first} | {other}) {json_follows} arguments_{index}")
        bound = strict is None or function["name"] in strict
        schema = {"type": "object", **(function.get("parameters", {}) if bound else {}), "x-guidance": JSON_OPTIONS}
        rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
    return "\n".join(rules)
