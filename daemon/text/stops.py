"""Stop strings: an answer ends before the first of them. What may become one, or a mark, is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Cuts a stream of text before the first stop string that comes to its end; sends no part of one.

    Text that may be the start of a stop string is held back until that is decided. What comes out depends on the
    text alone, not on how it was cut into pieces: of several stop strings the one that ends first wins, and of
    those that end together the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """
        Raises:
            ValueError: one of the stop strings is empty.
        """
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False
        self.stopped_by = ""
        """The stop string that the text came to; empty: none yet."""

    def push(self, text: str) -> str:
        """The text that may be shown now. Empty once `stopped`."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.stopped_by = min(found)
            self.stopped = True
            self._held = ""
            return text[:at]
        first = max(0, len(text) + 1 - max(map(len, self._stops), default=0))
        show = next(
            (at for at in range(first, len(text)) if any(stop.startswith(text[at:]) for stop in self._stops)),
            len(text),
        )
        self._held = text[show:]
        return text[:show]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def held_back(text: str, mark: str) -> int:
    """How many letters at the end of a text may be the beginning of a mark."""
    return next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)
