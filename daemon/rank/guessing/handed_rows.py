"""Last hidden rows of each sequence's latest tokens, kept for the model's own head that guesses from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from motley.plugins.engine import F32

MOST = 32
"""Rows of a sequence that are kept at most, so that they take little memory where the head is not asked for long: 58 MB
of 64 sequences of DeepSeek V3, which what is planned for the head's runtime has room for."""


@dataclass
class _Kept:
    """Rows f32[D] of a sequence, of neighbouring positions, and the first of these."""

    first: int
    rows: list[F32]


class HandedRows:
    """The rows of every sequence that is open, by slot. Those of guesses that turn out to be wrong are replaced by the
    next step of their sequence, which begins at the first of their positions; until then nobody may read them."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def keep(self, slot: int, position: int, rows: F32) -> None:
        """Take the rows f32[R, D] of a step, the first of which stands at a position; they are copied."""
        kept = self._kept.get(slot)
        if kept is None or not kept.first <= position <= kept.first + len(kept.rows):
            kept = self._kept[slot] = _Kept(position, [])
        kept.rows[position - kept.first :] = rows.copy()
        passed = max(0, len(kept.rows) - MOST)
        kept.first += passed
        del kept.rows[:passed]

    def between(self, slot: int, first: int, end: int) -> tuple[int, Sequence[F32]]:
        """The rows of a sequence from position `first` up to `end`; where not all are kept, from the first that is.

        Returns:
            the position of the first, and the rows; none where the last of them is not kept.
        """
        kept = self._kept.get(slot)
        if kept is None or not kept.first < end <= kept.first + len(kept.rows):
            return end, ()
        first = max(first, kept.first)
        return first, kept.rows[first - kept.first : end - kept.first]

    def forget(self, slot: int) -> None:
        """The sequence in a slot is closed."""
        self._kept.pop(slot, None)
