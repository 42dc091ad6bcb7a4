"""The parts of an answer by the model's own response template; see `motley.daemon.text.response_template`.

As transformers does it: outside of all fields, what opens any of them is looked for; within one, what closes it; the
earliest counts, of those the longest. What may become one of them is held back. Where transformers keeps the latest of
several texts of a field, all of them are told, as a stream takes nothing back; and a call that cannot be read is told
as a text, or with the arguments that it has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace

import regex

from motley.daemon.text.answer_parts import NO_SCHEMAS, Part
from motley.daemon.text.response_fields import Calls, FieldReader, LeftOut, NamedCall, Schemas, Text
from motley.daemon.text.response_template import (
    PATIENCE_S,
    CallsWithin,
    Delimiter,
    NamedByOpening,
    ResponseField,
    ResponseTemplate,
)

logger = logging.getLogger(__name__)

_PATIENCE_S_PER_CHARACTER = 50e-6
"""What patterns may take anew with every character that the model writes."""
_BEHIND = 1024
"""Characters that patterns can look back."""
_AHEAD = 32
"""Characters behind what a pattern has matched that are waited for, as long as they could be part of a longer match."""
_ALL = ResponseField("", "content", None, None, strip=False)
"""Has what is left of an answer whose patterns take too long."""

Found = tuple[ResponseField | None, "regex.Match[str]"]
"""A delimiter, and the field that it opens; None: it closes one."""


class ResponseParts:
    """Takes an answer's text apart as it comes, special tokens among it.

    Args:
        prompt: the end of the prompt's text, in which the chat template may have begun the answer, with a thought say.
        schemas: of the tools' arguments, by the name of a tool.
    """

    def __init__(self, template: ResponseTemplate, prompt: str = "", schemas: Schemas = NO_SCHEMAS) -> None:
        self._fields, self._schemas = template.fields, schemas
        self._implicit = next((field for field in template.fields if field.open is None), None)
        self._field: ResponseField | None = None
        """The field that has been opened; None: none has."""
        self._reader: FieldReader | None = None
        """Reads that field, or the implicit one if there is anything of it; None: there is nothing to read."""
        self._held, self._at = "", 0
        """The text, and how much of it has been read."""
        self._empty = -1
        """Where the latest delimiter without characters was: a place has one, else there would be no end of them."""
        self._said: set[str] = set()
        """Fields that have occurred."""
        self._aside = ""
        """What is outside of all fields, as long as none has occurred."""
        self._called = self._ended = 0
        """Calls in what has been read; those of them that have ended."""
        self._patience = PATIENCE_S
        for _ in self.push(_begun(template.start.pattern, prompt)):
            pass  # the model has not written it

    @property
    def complete(self) -> int:
        """Calls that have ended."""
        return self._ended + (self._reader.complete if self._reader else 0)

    def push(self, text: str) -> Iterator[Part]:
        """The parts that are certain with this text."""
        self._held += text
        self._patience = min(PATIENCE_S, self._patience + _PATIENCE_S_PER_CHARACTER * len(text))
        yield from self._read(last=False)
        if (gone := self._at - _BEHIND) > _BEHIND:
            self._held, self._at, self._empty = self._held[gone:], _BEHIND, self._empty - gone

    def flush(self) -> Iterator[Part]:
        """What is left at the end."""
        yield from self._read(last=True)
        yield from self._close()
        if not self._said and (aside := self._aside.strip()):
            yield Part(content=aside)  # the model was not taught, or the template is another's

    def _read(self, last: bool) -> Iterator[Part]:
        while True:
            found, certain = self._next(last)
            yield from self._tell(found[1].start() if found else certain)
            if found is None:
                return
            self._field, match = found
            self._at = match.end()
            if match.start() == match.end():
                self._empty = self._at
            yield from self._close()
            if self._field is not None:
                self._reader = self._reader_of(self._field, match)
                yield from self._reader.push("")

    def _tell(self, until: int) -> Iterator[Part]:
        """Have what is no delimiter read, up to there."""
        text, self._at = self._held[self._at : until], max(self._at, until)
        if text and self._reader is None and self._implicit is not None:
            self._reader = self._reader_of(self._implicit, None)
        if text and self._reader is not None:
            yield from self._reader.push(text)
        elif text and not self._said:
            self._aside += text

    def _close(self) -> Iterator[Part]:
        """End what is read."""
        if self._reader is not None:
            yield from self._reader.close()
            self._called += self._reader.called
            self._ended += self._reader.complete
            self._reader = None

    def _reader_of(self, field: ResponseField, opening: regex.Match[str] | None) -> FieldReader:
        before = field.between if field.name in self._said else ""
        self._said.add(field.name)
        match field.calls:
            case NamedByOpening() as calls:
                assert opening is not None, "it has the name"
                name, called = (opening[group] or "" if group else "" for group in (calls.name, calls.id))
                return NamedCall(calls, name.strip(), called.strip(), self._called, self._schemas)
            case CallsWithin() as calls:
                return Calls(calls, self._called, self._schemas)
        return Text(field.kind, field.strip, before) if field.kind else LeftOut()

    def _next(self, last: bool) -> tuple[Found | None, int]:
        """The next delimiter that is certain, if there is one, and characters before any that may become one."""
        best: Found | None = None
        best_rank, certain = None, len(self._held)
        try:
            for delimiter, opens in self._watched():
                match = self._search(delimiter, last)
                if match is None:
                    continue
                if not last and (match.partial or self._may_grow(delimiter, match)):
                    certain = min(certain, match.start())
                    continue
                rank = (match.start(), -match.end(), opens is None, opens.name if opens else "")
                if best_rank is None or rank < best_rank:
                    best_rank, best = rank, (opens, match)
        except TimeoutError:
            self._give_up()
            return None, len(self._held)
        return (best if best and best[1].start() < certain else None), certain

    def _watched(self) -> Iterator[tuple[Delimiter, ResponseField | None]]:
        """What may come: delimiters, and what they open."""
        if self._field is None:
            yield from ((field.open, field) for field in self._fields if field.open is not None)
        field = self._field or self._implicit
        if field is not None and field.close is not None:
            yield field.close, None

    def _search(self, delimiter: Delimiter, last: bool) -> regex.Match[str] | None:
        match = self._patiently(delimiter, self._at, last)
        if match is not None and not match.partial and match.start() == match.end() == self._empty:
            match = self._patiently(delimiter, self._at + 1, last)
        return match

    def _patiently(self, delimiter: Delimiter, at: int, last: bool) -> regex.Match[str] | None:
        """Search for a delimiter, or for what may become one.

        Raises:
            TimeoutError: patterns have had all the time that they may take.
        """
        begun = time.thread_time()
        try:
            return delimiter.pattern.search(self._held, at, partial=not last, timeout=max(0.0, self._patience))
        finally:
            self._patience -= time.thread_time() - begun

    def _may_grow(self, delimiter: Delimiter, match: regex.Match[str]) -> bool:
        """Whether a delimiter that stands there could be another one when more text comes."""
        start, end, pattern, patience = match.start(), len(self._held), delimiter.pattern, max(0.0, self._patience)
        if delimiter.texts:
            rest = self._held[start : start + len(delimiter.texts[0])]
            return any(len(text) > len(rest) and text.startswith(rest) for text in delimiter.texts)
        if match.end() == end:
            return True
        if end - match.end() < _AHEAD and delimiter.pattern.fullmatch(
            self._held, start, partial=True, timeout=patience
        ):
            return True
        # What has `$`, or looks ahead, may have seen where the text ends as yet.
        longer = pattern.match(self._held + "\0", start, timeout=patience)
        return longer is None or longer.span() != match.span() or longer.groupdict() != match.groupdict()

    def _give_up(self) -> None:
        """Take all that is still to come for what is under way, or for what is said."""
        logger.warning(
            "the model's response_template: its patterns take too long, so the rest of an answer is not taken apart"
        )
        if self._field is None and self._reader is None:
            self._implicit = _ALL
        self._fields = ()
        self._field = self._field and replace(self._field, close=None)
        self._implicit = self._implicit and replace(self._implicit, close=None)


def _begun(start: regex.Pattern[str], prompt: str) -> str:
    """What a prompt has of the answer."""
    try:
        ends = [match.end() for match in start.finditer(prompt, timeout=PATIENCE_S)]
    except TimeoutError:
        ends = []
    return prompt[ends[-1] :] if ends else ""
