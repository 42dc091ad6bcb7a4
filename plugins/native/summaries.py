"""Summaries of stretches of a sequence, for rows of it that another machine computes.

Who has some of a sequence's keys and values, but not its rows, is asked with the rows' queries, and tells for each
stretch of `SIGHT` positions what the rows find there: from these summaries and its own the asker has the result, with
the same bits as if all were with it (attention.c states the arithmetic).
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from .attention import FORMATS, I32, LONGEST, Cached, LayerBlocks, tier
from .library import F32, address, library, place
from .matmul import Pool
from .structs import Attention, Question


class Layer(NamedTuple):
    """What of a layer's attention its summaries depend on; numbers as in `bind_attention`."""

    heads: int
    kv_heads: int
    size: int
    """d, of a head."""
    window: int
    soft_cap: float
    chunked: bool


def summary_floats(heads: int, size: int) -> int:
    """How many float32 one row's summary of one stretch has: for each head the sums of weighed values, the largest
    score, and the sum of exponentials."""
    return heads * (size + 2)


class Summaries:
    """Answers questions about the blocks of one layer. One thread owns it.

    Args:
        keys: [N, kv_heads, tokens, d] of one of `FORMATS`, the blocks; read by every call.
        values: the same.
        key_scales: f32[N, kv_heads, tokens] where keys are int8, else None.
        value_scales: the same of values.

    Raises:
        ValueError: an array has another shape or type, or is not contiguous or aligned, or read-only.
    """

    def __init__(
        self, layer: Layer, keys: Cached, values: Cached, key_scales: F32 | None, value_scales: F32 | None, pool: Pool
    ) -> None:
        blocks, _, tokens, _ = keys.shape
        own = LayerBlocks(keys, values, key_scales, value_scales)
        self._layer = layer
        self._kept = own, pool
        self._attention = Attention(
            pool=pool.handle,
            near=tier(own, "", place, 0, blocks, keys.dtype, layer.kv_heads, tokens, layer.size),
            heads=layer.heads,
            kv_heads=layer.kv_heads,
            size=layer.size,
            tokens=tokens,
            window=layer.window,
            context=LONGEST,
            soft_cap=layer.soft_cap,
            chunked=layer.chunked,
            format=FORMATS.index(keys.dtype.type),
        )
        self._question = Question(attention=ctypes.pointer(self._attention))

    def answer(self, queries: F32, position: int, blocks: I32, stretches: I32, out: F32) -> None:
        """Compute the summaries of some stretches.

        Args:
            queries: f32[rows, heads, d], turned and scaled, of consecutive tokens of a sequence.
            position: where the first of them stands, behind all of the stretches.
            blocks: i32[N], the sequence's blocks as `SpanRows` has them; only those of the stretches are read.
            stretches: i32[F], ascending.
            out: f32[F, rows, heads, d + 2], overwritten.

        Raises:
            IndexError: stretches are not ascending, not before the rows, or have no block; nothing is written.
            ValueError: an array has another shape or type, or is not contiguous or aligned.
            MemoryError: there is no memory to compute them with.
        """
        rows, layer, asked = len(queries), self._layer, self._question
        asked.queries = address("queries", queries, "float32", rows, layer.heads, layer.size)
        asked.blocks, asked.block_count = address("blocks", blocks, "int32", blocks.size), blocks.size
        asked.stretches, asked.count = address("stretches", stretches, "int32", stretches.size), stretches.size
        asked.summaries = place("out", out, "float32", stretches.size, rows, layer.heads, layer.size + 2)
        asked.position, asked.rows = position, rows
        match library().motley_answer(ctypes.byref(asked)):
            case 1:
                raise IndexError(
                    f"stretches {stretches.tolist()} of {blocks.size} blocks, whose numbers must be below"
                    f" {self._attention.near.count}, cannot be told to rows at position {position}"
                )
            case 2:
                raise MemoryError(f"no memory for the summaries of {stretches.size} stretches for {rows} rows")
