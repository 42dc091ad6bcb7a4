"""Which rows of a step attend together, and where the keys and values are that they see. Pure.

A layer's keys are one array f32[P + 1, kv_heads * d] in the GPU's memory, its values another: a *slot* for each
position of each block, and one more that stays zero. The spans of a step attend in *groups* of S pieces of R rows each.
Pieces with fewer rows repeat their last one, and those that see fewer than C positions see the zero slot.
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
        slots: i64[S, C], where the keys and values are that each piece sees.
        positions: f32[S, R], where the rows stand.
    """

    rows: I64
    slots: I64
    positions: F32

    @property
    def shape(self) -> tuple[int, int, int]:
        """(S, R, C)."""
        return (*self.rows.shape, self.slots.shape[1])


def slots_of(span: Span, begin: int, end: int, tokens: int) -> I64:
    """Where the positions from `begin` to `end` of a span's sequence are, with blocks of so many tokens."""
    positions = np.arange(begin, end)
    slots: I64 = span.blocks[positions // tokens].astype(np.int64) * tokens + positions % tokens
    return slots


def grouped(spans: Sequence[tuple[int, Span]], tokens: int, heads: int, nothing: int) -> list[Group]:
    """Cut spans in pieces that attend together.

    Args:
        spans: each with its first row in the step.
        tokens: positions in a block.
        heads: how many scores a row has at a position.
        nothing: the slot that stays zero.
    """
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
                _, piece = pieces[-1]
                end = max(each.position + each.rows for _, each in (*together, pieces[-1]))
                if together and (len(together) + 1) * rows * end * heads > MOST_SCORES:
                    break
                together.append(pieces.pop())
            groups.append(_group(together, rows, tokens, nothing))
    return groups


def _group(pieces: Sequence[tuple[int, Span]], rows: int, tokens: int, nothing: int) -> Group:
    seen = max(piece.position + piece.rows for _, piece in pieces)
    slots = np.full((len(pieces), -(-seen // SEEN_TILE) * SEEN_TILE), nothing, np.int64)
    numbers = np.empty((len(pieces), rows), np.int64)
    positions = np.empty((len(pieces), rows), np.float32)
    for number, (first, piece) in enumerate(pieces):
        end = piece.position + piece.rows
        slots[number, :end] = slots_of(piece, 0, end, tokens)
        within = np.minimum(np.arange(rows), piece.rows - 1)
        numbers[number] = first + within
        positions[number] = piece.position + within
    return Group(numbers, slots, positions)
