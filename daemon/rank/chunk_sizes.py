"""How many tokens of a prompt one step computes: every size is tried on prompts, then the fastest is kept.

Which is fastest depends on the engines, the links and the slowest rank, so it is measured and not predicted. Only the
first chunk of a prompt is timed, because later ones attend to more.

Whatever the size, the text is the same, as every row meets the same kernels: chunks begin at even rows, because some
kernels take rows by twos, and none but a prompt of one token is a single row, which is what decoding has kernels for.
(Where they are cuBLAS's, they depend on the size: a last bit may differ.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SIZES = (64, 128, 256)
"""The sizes that are tried, in rows."""
TRIES = 2
"""Times that each size is tried. The first time that a size is met, memory is allocated and plans are made."""
NEARLY = 0.95
"""The smallest chunk is taken whose rate is at least this part of the highest: the requests of others wait for it."""
WORTH_HALVING = 32
"""Rows that a chunk has at least, to be computed in halves; halves of fewer take the engine as long as the whole."""


class Chunk(NamedTuple):
    """Rows that one step computes, and whether as two micro-chunks (see `motley.plugins.engine.micro_chunks`)."""

    rows: int
    halved: bool


class ChunkSizes:
    """Chooses the chunks of a session's prompts and learns from how long they took. Touches no clock."""

    def __init__(self, max_rows: int, halves: bool) -> None:
        """
        Args:
            max_rows: the most rows that a chunk may have.
            halves: whether chunks may be computed in halves, as there are sums that could hide behind computing.
        """
        sizes = [size for size in SIZES if size <= max_rows] or [max_rows]
        self._chunks = [Chunk(size, halved) for size in sizes for halved in ((False, True) if halves else (False,))]
        self._rates: dict[Chunk, list[float]] = {chunk: [] for chunk in self._chunks}
        self._best = Chunk(sizes[-1], False)

    def choose(self, position: int, left: int) -> Chunk:
        """Choose the next chunk of a prompt.

        Args:
            position: tokens of it that have been computed.
            left: tokens of it that have not, at least one.
        """
        if position == 0:
            untried = [chunk for chunk in self._chunks if len(self._rates[chunk]) < TRIES and _fits(chunk, left)]
            if untried:
                return min(untried, key=lambda chunk: len(self._rates[chunk]))
        rows = min(self._best.rows, left)
        if left - rows == 1 and rows > 2:
            rows -= 2
        return Chunk(rows, self._best.halved and rows >= WORTH_HALVING)

    def took(self, chunk: Chunk, position: int, seconds: float) -> None:
        """Learn that a chunk which began at `position` took so many seconds."""
        rates = self._rates.get(chunk)
        if position or rates is None or len(rates) == TRIES:
            return
        rates.append(chunk.rows / seconds)
        self._best = _smallest_of_the_fastest(self._chunks, self._rates)


def _fits(chunk: Chunk, left: int) -> bool:
    """Whether a chunk can be taken of so many tokens, without leaving a single one."""
    return chunk.rows <= left and left - chunk.rows != 1


def _smallest_of_the_fastest(chunks: Sequence[Chunk], rates: dict[Chunk, list[float]]) -> Chunk:
    best = {chunk: max(rates[chunk]) for chunk in chunks if rates[chunk]}
    return next(chunk for chunk, rate in best.items() if rate >= NEARLY * max(best.values()))
