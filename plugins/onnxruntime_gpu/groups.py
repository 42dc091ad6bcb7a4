"""Which rows of a step attend together, and where the keys and values are that they see. Pure.

A layer's keys are one array f32[P + 1, kv_heads * d] in the GPU's memory, its values another: a *slot* for each
position of each block, and one more that stays zero. The spans of a step attend in *groups* of S pieces of R rows each.
Pieces with fewer rows repeat their last one, and those that see fewer than C positions see the zero slot. Layers with a
window have groups of their own, which see no more than the window of their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from motley.plugins.engine import F32, Span

I64 = npt.NDArray[np.int64]

MOST_ROWS = 64
"""Rows of a span that attend together."""
MOST_SCORES = 1 << 24
"""Scores of all heads that a call may compute, unless a single piece has more."""
SEEN_TILE = 32
"""The number of positions that a group sees is a multiple of this one, so that the same calls serve for a while."""


class Group(NamedTuple):
    """Pieces of spans that attend in one call.

    Attributes:
        rows: i64[S, R], which rows of the step they are.
        slots: i64[S, C], where the keys and values are that each piece sees: of consecutive positions.
        positions: f32[S, R], where the rows stand, counted from the first position that their piece sees.
    """

    rows: I64
    slots: I64
    positions: F32

    @property
    def shape(self) -> tuple[int, int, int]:
        """(S, R, C)."""
        return (*self.rows.shape, self.slots.shape[1])


def slots_of(span: Span, own_blocks: bool, begin: int, end: int, tokens: int) -> I64:
    """Where the positions from `begin` to `end` of a span's sequence are.

    Args:
        own_blocks: whether the layers are such as have blocks of their own (`Span.windowed`).
        tokens: positions in a block.
    """
    table = span.windowed if own_blocks else span.blocks
    assert table is not None
    positions = np.arange(begin, end)
    slots: I64 = table[positions // tokens].astype(np.int64) * tokens + positions % tokens
    return slots


class Pieces(NamedTuple):
    """How the spans of a step are cut in pieces for layers of a kind.

    Attributes:
        tokens: positions in a block.
        heads: how many scores a row has at a position.
        nothing: the slot that stays zero.
        window: how many positions a row sees, its own among them; 0: all.
        own_blocks: whether these layers have blocks of their own (`Span.windowed`).
    """

    tokens: int
    heads: int
    nothing: int
    window: int = 0
    own_blocks: bool = False

    def first_seen(self, span: Span) -> int:
        """The first position that a row of a span sees."""
        return max(0, span.position - self.window + 1) if self.window else 0

    def seen(self, span: Span) -> int:
        """How many positions the rows of a span see."""
        return span.position + span.rows - self.first_seen(span)

    def grouped(self, spans: Sequence[tuple[int, Span]]) -> list[Group]:
        """Cut spans in pieces that attend together; each comes with its first row in the step."""
        kinds: dict[int, list[tuple[int, Span]]] = {}
        for row, span in spans:
            for begin in range(0, span.rows, MOST_ROWS):
                count = min(MOST_ROWS, span.rows - begin)
                piece = span._replace(position=span.position + begin, rows=count)
                kinds.setdefault((count - 1).bit_length(), []).append((row + begin, piece))
        groups = []
        for pieces in kinds.values():
            rows = max(piece.rows for _, piece in pieces)
            pieces.sort(key=lambda each: each[1].position)
            while pieces:
                together: list[tuple[int, Span]] = []
                while pieces:
                    most = max(self.seen(each) for _, each in (*together, pieces[-1]))
                    if together and (len(together) + 1) * rows * most * self.heads > MOST_SCORES:
                        break
                    together.append(pieces.pop())
                groups.append(self._group(together, rows))
        return groups

    def _group(self, pieces: Sequence[tuple[int, Span]], rows: int) -> Group:
        seen = max(self.seen(piece) for _, piece in pieces)
        slots = np.full((len(pieces), -(-seen // SEEN_TILE) * SEEN_TILE), self.nothing, np.int64)
        numbers = np.empty((len(pieces), rows), np.int64)
        positions = np.empty((len(pieces), rows), np.float32)
        for number, (first, piece) in enumerate(pieces):
            begin, end = self.first_seen(piece), piece.position + piece.rows
            slots[number, : end - begin] = slots_of(piece, self.own_blocks, begin, end, self.tokens)
            within = np.minimum(np.arange(rows), piece.rows - 1)
            numbers[number] = first + within
            positions[number] = piece.position - begin + within
        return Group(numbers, slots, positions)
