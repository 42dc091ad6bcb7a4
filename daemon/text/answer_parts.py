"""The parts of a chat's answer: what a model thinks first, what it says, and the tools that it calls.

Models write all of it into one text; `motley.daemon.text.calls` knows how they write calls. Thoughts stand before all
else, in ``<think>...</think>`` or in marks of the model's own.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from motley.daemon.text.calls.formats import CallFormat
from motley.daemon.text.calls.reading import CallReader, Ended, Named, reader_of
from motley.daemon.text.stops import held_back
from motley.daemon.text.tokenizer import Tokenizer
from motley.protocol import mesh_pb2 as pb


@dataclass(frozen=True)
class ThoughtMarks:
    """What stands around thoughts; and a title behind `begin`, which is no thought itself."""

    begin: str
    end: str
    title: str = ""


THINK = ThoughtMarks("<think>", "</think>")
GEMMA_THOUGHT = ThoughtMarks("<|channel>", "<channel|>", "thought\n")
_BETWEEN = re.compile(r"[\s,;\[\]]*")
"""What may stand between calls, and around a list of them."""
NO_SCHEMAS: Mapping[str, Mapping[str, Any]] = {}


def thought_marks(template: str) -> ThoughtMarks | None:
    """How a model with this chat template marks its thoughts; None: it has none."""
    return next((marks for marks in (GEMMA_THOUGHT, THINK) if marks.end in template), None)


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
        marks: of what it may think first; None: it does not.
        thinking: whether it does already, as the prompt ends with the mark for that.
        schemas: of the tools' arguments, by the name of a tool.
    """

    def __init__(
        self,
        calls: CallFormat | None,
        marks: ThoughtMarks | None,
        thinking: bool,
        schemas: Mapping[str, Mapping[str, Any]] = NO_SCHEMAS,
    ) -> None:
        self._marks, self.thinking = marks, thinking
        self._format, self._schemas = calls, schemas
        self._held = ""
        self._state = "title" if thinking else "start" if marks else "begin"
        self._bare = calls is not None and not calls.begin
        self._aside = ""
        """What stands before the first call of a bare answer, which is text if that turns out to be none."""
        self.called = 0
        """Calls that have begun."""
        self.complete = 0
        """Those of them that have ended."""
        self._reader: CallReader | None = None
        """Reads the call under way, which is at the head of what is held."""

    def thoughts(self, tokenizer: Tokenizer) -> pb.Thoughts | None:
        """What the model may think before what an answer is kept to. None: nothing; then no text of it is taken for
        thoughts either."""
        marks = self._marks
        begin, end = (tokenizer.token(marks.begin), tokenizer.token(marks.end)) if marks else (None, None)
        if begin is None or end is None:
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
        elif self._state == "call" and self.called > self.complete:
            assert self._reader is not None, "it has begun"
            yield from _some(self._arguments(self._reader.rest(held)))
        elif self._state in ("title", "opening"):
            pass  # no thought has begun
        elif self._state != "between" or (self._bare and not self.called):
            yield from _some(Part(content=self._aside + held))

    def _start(self) -> Iterator[Part]:
        """Before thoughts, if there are any."""
        assert self._marks is not None, "there may be some"
        text, begin = self._held.lstrip(), self._marks.begin
        if text.startswith(begin):
            self._held, self._state = text.removeprefix(begin), "title"
        elif not begin.startswith(text):
            self._state = "begin"
        yield from ()

    def _title(self) -> Iterator[Part]:
        """Before the title of a thought, if it has one."""
        assert self._marks is not None, "it has begun"
        text, title = self._held.lstrip(), self._marks.title
        if text.startswith(title) or not title.startswith(text):
            self._held, self._state = text.removeprefix(title), "opening"
        yield from ()

    def _opening(self) -> Iterator[Part]:
        """Before the first word of a thought."""
        self._held = self._held.lstrip()
        if self._held:
            self._state = "thinking"
        yield from ()

    def _thinking(self) -> Iterator[Part]:
        assert self._marks is not None, "they have begun"
        thought, ended = self._until(self._marks.end)
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
        begin, end = self._format.begin, self._format.end
        for mark in filter(None, (begin, end)):  # before `_BETWEEN`, of which one may be made
            held = self._held.lstrip()
            if held.startswith(mark):
                self._held = held.removeprefix(mark)
                self._state = "behind" if mark == end else "between"
                return
            if held and mark.startswith(held):
                return
        before, self._held = self._held, _BETWEEN.sub("", self._held, count=1)
        if self._bare and not self.called:
            self._aside += before[: len(before) - len(self._held)]
        if not self._held:
            return
        if any(mark.startswith(self._held[: len(mark)]) for mark in (begin, end) if mark):
            return  # once more, without what stood before the mark
        readable = self._held[0] == "{" or not self._format.is_json
        self._state = "call" if readable else "content"
        if readable:
            self._reader = reader_of(self._format, self._held, self._schemas)
        else:
            self._held, self._aside = self._aside + self._held, ""
        yield from ()

    def _call(self) -> Iterator[Part]:
        assert self._reader is not None, "it has begun"
        for found in self._reader.look(self._held):
            match found:
                case Named():
                    yield self._begun(found)
                case str():
                    yield self._arguments(found)
                case Ended():
                    whole, self._held = self._held[: found.at], self._held[found.at :]
                    self._state = "between" if found.is_call else "content"
                    if found.is_call:
                        self.complete += 1
                    else:
                        yield Part(content=self._aside + whole)
                        self._aside = ""

    def _begun(self, named: Named) -> Part:
        self.called += 1
        self._aside = ""
        return begun_call(self.called - 1, named.name, named.id)

    def _arguments(self, text: str) -> Part:
        return Part(call=pb.CallPiece(index=self.called - 1, arguments=text)) if text else Part()

    def _until(self, mark: str) -> tuple[str, bool]:
        """Take the held text up to a mark, and the mark with it; without one, up to where one may begin."""
        text, found, rest = self._held.partition(mark)
        if found:
            self._held = rest
            return text, True
        keep = held_back(text, mark)
        if self._state != "thinking":  # nor is whitespace before calls part of what is said
            keep = len(text) - len(text[: len(text) - keep].rstrip())
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def begun_call(index: int, name: str, called: str = "") -> Part:
    """The first piece of a call of a tool.

    Args:
        called: what the model calls the call; empty: nothing.
    """
    return Part(call=pb.CallPiece(index=index, id=called or f"call_{secrets.token_hex(12)}", name=name))


def _some(part: Part) -> Iterator[Part]:
    if part != Part():
        yield part
