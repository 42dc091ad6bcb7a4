"""The parts of an answer by the model's own response template; see `motley.daemon.text.responses.template`.

As transformers does it: outside of all fields, what opens any of them is looked for; within one, what closes it; the
earliest counts, of those the longest. What may become one of them is held back. Where transformers keeps the latest of
several texts of a field, all of them are told, as a stream takes nothing back; and a call that cannot be read is told
as a text, or with the arguments that it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import regex

from motley.daemon.text.answer_parts import NO_SCHEMAS, Part
from motley.daemon.text.responses.fields import Calls, FieldReader, LeftOut, NamedCall, Schemas, Text, WholeCall
from motley.daemon.text.responses.patience import Patience
from motley.daemon.text.responses.template import (
    CallsWithin,
    Delimiter,
    NamedByOpening,
    ResponseField,
    ResponseTemplate,
)

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
        patience: what all answers by this template have; None: it takes no other one apart.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        prompt: str = "",
        schemas: Schemas = NO_SCHEMAS,
        patience: Patience | None = None,
    ) -> None:
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
        self._reading = ""
        """The field that it reads."""
        self._said: dict[str, bool] = {}
        """Fields that have occurred, and whether something of them has been told."""
        self._aside = ""
        """What is outside of all fields, as long as none has occurred."""
        self._called = self._ended = 0
        """Calls in what has been read; those of them that have ended."""
        self._patience = patience or Patience()
        for _ in self.push(self._begun(template.start, prompt)):
            pass  # the model has not written it
        self._said.clear()
        self._aside = ""

    def _begun(self, start: Delimiter, prompt: str) -> str:
        """What a prompt has of the answer."""
        try:
            starts = self._patience(lambda **options: [*start.pattern.finditer(prompt, **options)])
        except TimeoutError:
            return ""
        return prompt[starts[-1].end() :] if starts else ""

    @property
    def complete(self) -> int:
        """Calls that have ended."""
        return self._ended + (self._reader.complete if self._reader else 0)

    def push(self, text: str) -> Iterator[Part]:
        """The parts that are certain with this text."""
        self._held += text
        self._patience.grant(len(text))
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
            self._at = max(self._at, match.end())  # never back, whatever the library finds
            if match.end() <= match.start():
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
            self._said[self._reading] = self._said.get(self._reading, False) or self._reader.told
            self._reader = None

    def _reader_of(self, field: ResponseField, opening: regex.Match[str] | None) -> FieldReader:
        self._reading = field.name
        match field.calls:
            case NamedByOpening() as calls:
                assert opening is not None, "it has the name"
                name, called = (opening[group] or "" if group else "" for group in (calls.name, calls.id))
                whose = name.strip(), called.strip(), self._called, self._schemas, self._patience
                if isinstance(calls.written, str):
                    return NamedCall(calls.written, *whose)
                return WholeCall(calls.written, *whose)
            case CallsWithin() as calls:
                return Calls(calls, self._called, self._schemas)
        before = field.between if self._said.get(field.name) else ""
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
                if not last and not match.partial:
                    certain = min(certain, self._begun_before(delimiter, match))
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
        """The next place of a delimiter, or of what may become one; a `TimeoutError` as `Patience` has it."""
        search = delimiter.pattern.search
        match = self._patience(search, self._held, self._at, partial=not last)
        if match is not None and not match.partial and match.end() <= match.start() == self._empty:
            match = self._patience(search, self._held, self._at + 1, partial=not last)
        return match

    def _begun_before(self, delimiter: Delimiter, match: regex.Match[str]) -> int:
        """Where what may become this delimiter begins before one that is whole; else where the text ends."""
        begun = self._patience(delimiter.begun.search, self._held, self._at, partial=True)
        return begun.start() if begun and begun.start() < match.start() else len(self._held)

    def _may_grow(self, delimiter: Delimiter, match: regex.Match[str]) -> bool:
        """Whether a delimiter that stands there could be another one when more text comes."""
        start, end, pattern = match.start(), len(self._held), delimiter.pattern
        if delimiter.texts:
            rest = self._held[start : start + len(delimiter.texts[0])]
            return any(len(text) > len(rest) and text.startswith(rest) for text in delimiter.texts)
        if match.end() == end:
            return True
        if end - match.end() < _AHEAD and self._patience(pattern.fullmatch, self._held, start, partial=True):
            return True
        # What has `$`, or looks ahead, may have seen where the text ends as yet.
        longer = self._patience(pattern.match, self._held + "\0", start)
        return longer is None or longer.span() != match.span() or longer.groupdict() != match.groupdict()

    def _give_up(self) -> None:
        """Take all that is still to come for what is under way; for what is said, if that is nothing or left out."""
        self._fields = ()
        reading = self._field or (self._implicit if self._reader else None)
        if reading is not None and reading.kind:
            self._field = self._field and replace(self._field, close=None)
            self._implicit = self._implicit and replace(self._implicit, close=None)
            return
        self._field, self._reader, self._implicit = None, None, _ALL
        if not self._said:
            self._held, self._at, self._aside = self._aside + self._held[self._at :], 0, ""
