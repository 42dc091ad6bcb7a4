"""Which rows of a step attend together, and where the keys and values are that they see. Pure.

A layer's keys are one array f32[P + 1, kv_heads * d] in the GPU's memory, its values another: a *slot* for each
position of each block, and one more that stays zero. The spans of a step attend in *groups* of S pieces of R rows each.
Pieces with fewer rows repeat their last one; where they see fewer than C positions, the GPU reads the zero slot. Layers
with a window have groups of their own, which see no more than the window of their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
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


SEQUENCES_KEPT = 32
"""Tables of blocks whose slots are kept; the one not used for longest goes first."""


class Piece(NamedTuple):
    """Rows of a span that attend together.

    Attributes:
        row: the first of them in the step.
        rows: how many there are.
    """

    row: int
    rows: int


class Group(NamedTuple):
    """S pieces of spans that attend in one call, as R rows each, which see C positions.

    Attributes:
        pieces: which rows of the step they are.
        spans: the same as parts of the spans.
        shape: (S, R, C).
    """

    pieces: Sequence[Piece]
    spans: Sequence[Span]
    shape: tuple[int, int, int]

    def rows(self) -> I64:
        """i64[S, R], which rows of the step they are."""
        return np.stack([piece.row + _steps(piece.rows, self.shape[1]).astype(np.int64) for piece in self.pieces])


def slots_of(span: Span, own_blocks: bool, begin: int, end: int, tokens: int) -> I64:
    """Where the positions from `begin` to `end` of a span's sequence are. Not to be changed.

    Args:
        own_blocks: whether the layers are such as have blocks of their own (`Span.windowed`).
        tokens: positions in a block.
    """
    table = span.windowed if own_blocks else span.blocks
    assert table is not None
    return _all_slots(table.tobytes(), table.dtype.char, tokens)[begin:end]


@lru_cache(SEQUENCES_KEPT)
def _all_slots(table: bytes, kind: str, tokens: int) -> I64:
    """Where all positions are of a sequence with these blocks."""
    blocks = np.frombuffer(table, kind).astype(np.int64)
    return (blocks[:, None] * tokens + np.arange(tokens)).ravel()


@cache
def _steps(rows: int, most: int) -> F32:
    """f32[most]: 0, 1, 2 and so on for so many rows, and then the last one again."""
    return np.minimum(np.arange(most, dtype=np.float32), rows - 1)


def _in_tiles(seen: int) -> int:
    """A number of positions, and some more so that the same calls serve for a while."""
    return -(-seen // SEEN_TILE) * SEEN_TILE


class Pieces(NamedTuple):
    """How the spans of a step are cut in pieces for layers of a kind.

    Attributes:
        tokens: positions in a block.
        heads: how many scores a row has at a position.
        window: how many positions a row sees, its own among them; 0: all.
        own_blocks: whether these layers have blocks of their own (`Span.windowed`).
    """

    tokens: int
    heads: int
    window: int = 0
    own_blocks: bool = False

    def first_seen(self, span: Span) -> int:
        """The first position of the first block of which a row of a span sees any: it changes only as often."""
        return max(0, span.position - self.window + 1) // self.tokens * self.tokens if self.window else 0

    def seen(self, span: Span) -> int:
        """How many positions there are from the first that the rows of a span see, to the last."""
        return span.position + span.rows - self.first_seen(span)

    def grouped(self, spans: Sequence[tuple[int, Span]]) -> list[Group]:
        """Cut spans in pieces that attend together; each comes with its first row in the step."""
        if len(spans) == 1 and spans[0][1].rows <= MOST_ROWS:  # as nearly always, and nothing is to be found out
            row, span = spans[0]
            return [Group([Piece(row, span.rows)], [span], (1, span.rows, _in_tiles(self.seen(span))))]
        kinds: dict[int, list[tuple[int, Span]]] = {}
        for row, span in spans:
            for begin in range(0, span.rows, MOST_ROWS):
                count = min(MOST_ROWS, span.rows - begin)
                whole = count == span.rows
                piece = span if whole else span._replace(position=span.position + begin, rows=count)
                kinds.setdefault((count - 1).bit_length(), []).append((row + begin, piece))
        groups = []
        for pieces in kinds.values():
            rows = max(piece.rows for _, piece in pieces)
            pieces.sort(key=lambda each: each[1].position)
            while pieces:
                together = [pieces.pop()]
                most = self.seen(together[0][1])
                while pieces:
                    wider = max(most, self.seen(pieces[-1][1]))
                    if (len(together) + 1) * rows * wider * self.heads > MOST_SCORES:
                        break
                    most = wider
                    together.append(pieces.pop())
                shape = len(together), rows, _in_tiles(most)
                groups.append(Group([Piece(row, each.rows) for row, each in together], [s for _, s in together], shape))
        return groups

    def write_positions(self, group: Group, positions: F32) -> None:
        """Write where the rows of a group stand, counted from the first position that their piece sees.

        Args:
            positions: f32[T], of all rows of the step.
        """
        for piece, span in zip(group.pieces, group.spans, strict=True):
            stands = positions[piece.row : piece.row + piece.rows]
            stands[:] = span.position - self.first_seen(span)
            if piece.rows > 1:
                stands += _steps(piece.rows, piece.rows)

    def write_slots(self, group: Group, slots: F32) -> bool:
        """Write where the keys and values are of C positions from the first one that each piece sees, as far as its
        sequence has blocks; whether that changes anything.

        Args:
            slots: f32[S, C].
        """
        changed = False
        for span, own in zip(group.spans, slots, strict=True):
            begin = self.first_seen(span)
            found = slots_of(span, self.own_blocks, begin, begin + len(own), self.tokens)
            there = own[: len(found)]
            if not np.array_equal(there, found):
                there[:] = found
                changed = True
        return changed
