"""The parts of a chat's answer: what a model thinks first, what it says, and the tools that it calls.

Models write all of it into one text. How they mark calls is told by the chat template that taught them:

=====================  =====================================================================
Qwen, Hermes           ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, several
Mistral                ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``
Llama 3, any others    an answer that is ``{"name": ..., "parameters": {...}}``
=====================  =====================================================================

Thoughts stand in ``<think>...</think>`` before all else.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from motley.daemon.sampling.constraint import JSON_OPTIONS
from motley.daemon.text.call_formats import CallFormat
from motley.daemon.text.tokenizer import Tokenizer
from motley.protocol import mesh_pb2 as pb

THINK, THOUGHT = "<think>", "</think>"
_BETWEEN = " \t\r\n,;[]"
"""What may stand between calls, and around a list of them."""
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""A call up to its arguments, as models write it."""


def calls_grammar(
    calls: CallFormat,
    tools: Sequence[Any],
    one: bool,
    marks: Mapping[str, int],
    strict: Collection[str] | None = None,
    said: str = "",
) -> str:
    """A grammar, in Lark's notation, of an answer that calls some of these tools, each with arguments that are valid by
    its schema.

    Args:
        one: there is one call, not several.
        marks: those marks that are special tokens, by their ids.
        strict: the answer may be a text, and call tools in it or not: once it has written the mark of a call, it is
            kept to one. Arguments are then valid by the schemas of the tools of these names, and any objects of others.
            None: it is nothing but calls.
        said: what an answer is that calls nothing, as a symbol of the grammar; empty: any text, also before calls.
    """

    def mark(text: str, ahead: str, behind: str) -> str:
        own = f"<[{marks[text]}]>" if text in marks else json.dumps(text, ensure_ascii=False) if text else ""
        return " ".join(filter(None, (ahead and json.dumps(ahead), own, behind and json.dumps(behind))))

    begin, end = mark(calls.begin, "", calls.lead), mark(calls.end, calls.tail, "")
    kinds = " | ".join(f"tool_{index}" for index in range(len(tools)))
    if one or not calls.begin:
        several, rules = "marked", [f"marked: opened call {end}"]
    elif calls.end:
        several, rules = 'marked ("\\n" marked)*', [f"marked: opened call {end}"]
    else:
        several, rules = "marked", [f'marked: opened call (", " call)* {end}']
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
            rules += [f"text[lazy]: SAID {json.dumps(calls.begin)}", f"opened: text {json.dumps(calls.lead)}"]
    rules.append(f"call: {kinds}")
    for index, tool in enumerate(tools):
        function = tool["function"]
        head = f'{{"name": {json.dumps(function["name"])}, "{calls.arguments}": '
        rules.append(f'tool_{index}: {json.dumps(head)} arguments_{index} "}}"')
        bound = strict is None or function["name"] in strict
        schema = {"type": "object", **(function.get("parameters", {}) if bound else {}), "x-guidance": JSON_OPTIONS}
        rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
    return "\n".join(rules)


@dataclass(frozen=True)
class Part:
    """A piece of an answer: of one of these, the others are empty."""

    content: str = ""
    reasoning: str = ""
    call: pb.CallPiece | None = None


class AnswerParts:
    """Takes an answer's text apart as it comes. What may be the beginning of a mark is held back until that is known.

    Args:
        calls: how the model calls tools; None: it cannot.
        thinks: whether it may think first.
        thinking: whether it does already, as the prompt ends with the mark for that.
    """

    def __init__(self, calls: CallFormat | None, thinks: bool, thinking: bool) -> None:
        self.thinks, self.thinking = thinks, thinking
        self._format = calls
        self._held = ""
        self._state = "opening" if thinking else "start" if thinks else "begin"
        self._bare = calls is not None and not calls.begin
        self.called = 0
        """Calls that have begun."""
        self.complete = 0
        """Those of them that have ended."""
        self._at = 0
        """Characters of the call under way, at the head of what is held, that have been looked at."""
        self._depth = 0
        self._quoted = self._escaped = False
        self._told = -1
        """Characters of it, up to which its arguments have been told; -1: they have not begun."""

    def thoughts(self, tokenizer: Tokenizer) -> pb.Thoughts | None:
        """What the model may think before what an answer is kept to. None: nothing; then no text of it is taken for
        thoughts either."""
        begin, end = map(tokenizer.token, (THINK, THOUGHT))
        if not self.thinks or begin is None or end is None:
            self._state = "begin"
            return None
        return pb.Thoughts(begin=begin, end=[end], begun=self.thinking)

    def push(self, text: str) -> Iterator[Part]:
        """The parts that are certain with this text."""
        self._held += text
        before = None
        while before != (self._held, self._state):
            before = (self._held, self._state)
            yield from getattr(self, f"_{self._state}")()

    def flush(self) -> Iterator[Part]:
        """What is left at the end."""
        held, self._held = self._held, ""
        if self._state == "thinking":
            yield from _some(Part(reasoning=held))
        elif self._state == "call" and self._told >= 0:
            yield from _some(self._arguments(held[self._told :]))
        elif self._state != "between":
            yield from _some(Part(content=held))

    def _start(self) -> Iterator[Part]:
        """Before thoughts, if there are any."""
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._held, self._state = text.removeprefix(THINK), "opening"
        elif not THINK.startswith(text):
            self._state = "begin"
        yield from ()

    def _opening(self) -> Iterator[Part]:
        """Before the first word of a thought."""
        self._held = self._held.lstrip()
        if self._held:
            self._state = "thinking"
        yield from ()

    def _thinking(self) -> Iterator[Part]:
        thought, ended = self._until(THOUGHT)
        yield from _some(Part(reasoning=thought))
        if ended:
            self._state = "behind"

    def _behind(self) -> Iterator[Part]:
        """Behind thoughts or calls, where models leave lines empty."""
        self._held = self._held.lstrip()
        if self._held:
            self._state = "begin"
        yield from ()

    def _begin(self) -> Iterator[Part]:
        """Before what the model says: an answer may be calls and nothing else."""
        text = self._held.lstrip()
        if not text:
            return
        self._state = "between" if self._bare and text[0] in "{[" else "content"
        yield from ()

    def _content(self) -> Iterator[Part]:
        if self._format is None or self._bare:
            text, self._held = self._held, ""
            yield from _some(Part(content=text))
            return
        text, called = self._until(self._format.begin)
        yield from _some(Part(content=text.rstrip() if called else text))
        if called:
            self._state = "between"

    def _between(self) -> Iterator[Part]:
        """Before a call, or behind the last one."""
        assert self._format is not None, "there are marks of it"
        self._held = self._held.lstrip(_BETWEEN)
        if end := self._format.end:
            if self._held.startswith(end):
                self._held, self._state = self._held.removeprefix(end), "behind"
                return
            if end.startswith(self._held):
                return
        if self._held:
            self._at = self._depth = 0
            self._quoted = self._escaped = False
            self._told = -1
            self._state = "call" if self._held[0] == "{" else "content"
        yield from ()

    def _call(self) -> Iterator[Part]:
        if self._told < 0 and (head := _HEAD.match(self._held)):
            self._told = head.end()
            yield self._begun(json.loads(head[1]))
        inner, end = self._look()
        if self._told >= 0 and inner > self._told:
            yield self._arguments(self._held[self._told : inner])
            self._told = inner
        if not end:
            return
        whole, self._held, self._state = self._held[:end], self._held[end:], "between"
        if self._told >= 0:
            self.complete += 1
        elif parts := self._whole(whole):
            self.complete += 1
            yield from parts
        else:
            self._state = "content"
            yield Part(content=whole)

    def _look(self) -> tuple[int, int]:
        """Go through the call as far as it is there: up to where its arguments may be told, and its end, or 0."""
        end = 0
        inner = self._told if self._depth == 1 and self._at > self._told >= 0 else 0
        for at in range(self._at, len(self._held)):
            letter = self._held[at]
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
                if self._depth == 1 and 0 <= self._told <= at and not inner:
                    inner = at + 1
                if not self._depth:
                    end = at + 1
                    break
        return (inner or (len(self._held) if self._depth > 1 else 0)), end

    def _whole(self, text: str) -> list[Part]:
        """A call that is not written as usual; nothing, if it only looks like one."""
        try:
            call = json.loads(text)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
        except (ValueError, LookupError):
            name = arguments = None
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            return []
        told = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return [self._begun(name), self._arguments(told)]

    def _begun(self, name: str) -> Part:
        self.called += 1
        return begun_call(self.called - 1, name)

    def _arguments(self, text: str) -> Part:
        return Part(call=pb.CallPiece(index=self.called - 1, arguments=text)) if text else Part()

    def _until(self, mark: str) -> tuple[str, bool]:
        """Take the held text up to a mark, and the mark with it; without one, up to where one may begin."""
        text, found, rest = self._held.partition(mark)
        if found:
            self._held = rest
            return text, True
        keep = held_back(text, mark)
        if mark != THOUGHT:  # nor is whitespace before calls part of what is said
            keep = len(text) - len(text[: len(text) - keep].rstrip())
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def begun_call(index: int, name: str) -> Part:
    """The first piece of a call of a tool."""
    return Part(call=pb.CallPiece(index=index, id=f"call_{secrets.token_hex(12)}", name=name))


def held_back(text: str, mark: str) -> int:
    """How many letters at the end of a text may be the beginning of a mark."""
    return next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)


def _some(part: Part) -> Iterator[Part]:
    if part != Part():
        yield part
