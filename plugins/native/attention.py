"""Our own attention to cached keys and values, which lie in *blocks* of some positions each, in any order.

A step has rows of several sequences. Those that are consecutive tokens of one sequence are a *span*, which says in
which blocks the sequence's keys and values are. One call computes the attention of all spans of a step, in one layer.

The arithmetic is stated in attention.c. Results are the same to the bit on every CPU and for any number of threads. A
row's depend neither on which other rows are computed with it, nor on how its sequence is cut in blocks or steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .library import F32, address, library, place
from .matmul import Pool
from .structs import AWAIT, Attention, Span, SpanList, Table, Tier

I32 = npt.NDArray[np.int32]
Cached = npt.NDArray[np.float32] | npt.NDArray[np.float16] | npt.NDArray[np.int8]

SIGHT = 128
"""Positions in a stretch, which are attended to at a time; stated in attention.h."""

FORMATS = (np.float32, np.float16, np.int8)
"""What keys and values may be cached as; the numbers that attention.h calls them by are their places."""

LONGEST = 2**31 - 1
"""The longest context that attention can be bound for, in positions."""


class SpanRows(NamedTuple):
    """Some rows of a step that are consecutive tokens of one sequence.

    Attributes:
        row: the first of them, counted from the first row of the step's ``qkv``.
        rows: how many there are, at least 1.
        position: where the first of them stands in its sequence.
        blocks: i32[N], the sequence's blocks by number: position p is in ``blocks[p // tokens]``, at place
            ``p % tokens``. Numbers may be changed in place; only those are read whose positions are seen.
        tables: of each rotary embedding, the cosines and sines f32[P, r/2] of its angles by position, where r is how
            many dimensions of a head turn (i turns with i + r/2). The sequence itself must not be changed afterwards.
        away: those stretches of the sequence before its rows whose blocks are not here; None: all are.
    """

    row: int
    rows: int
    position: int
    blocks: I32
    tables: Sequence[tuple[F32, F32]]
    away: Away | None = None


class Away(NamedTuple):
    """Stretches of a sequence, of `SIGHT` positions each, that are attended to elsewhere.

    Attributes:
        stretches: i32[F], their numbers, ascending; stretch s is of the positions from ``s * SIGHT`` on.
        told: f32[at least F * rows * heads * (d + 2)], where their summaries are by the time that a call has awaited
            them; see `bind_attention` and `motley.plugins.native.summaries`.
    """

    stretches: I32
    told: F32


class LayerBlocks(NamedTuple):
    """What is cached of one layer in F blocks.

    Attributes:
        keys: [F, kv_heads, tokens, d] of one of `FORMATS`.
        values: the same.
        key_scales: f32[F, kv_heads, tokens] of int8, else None.
        value_scales: the same.
    """

    keys: Cached
    values: Cached
    key_scales: F32 | None = None
    value_scales: F32 | None = None


class Spans:
    """The spans of a step, as every attention reads them that was bound to this. They are set before each step.

    Args:
        most: how many spans a step may have.
        ropes: how many tables each span has.
    """

    def __init__(self, most: int, ropes: int) -> None:
        self._ropes = ropes
        spans, tables = (Span * most)(), (Table * (most * ropes))()
        self._spans, self._tables = list(spans), list(tables)
        self._kept: list[tuple[I32, Sequence[tuple[F32, F32]], Away | None] | None] = [None] * most
        self.struct = SpanList(all=spans, tables=tables, count=0, ropes=ropes)

    def set(self, spans: Sequence[SpanRows]) -> None:
        """Take the spans of the next step; arrays and tables that are the same objects as last time cost nothing.

        The arrays are used where they are, until this is called again.

        Raises:
            ValueError: there are too many spans, or one has no row, blocks that are no contiguous i32[N], or another
                number, shape or type of tables. Then no spans are set.
        """
        self.struct.count = 0
        if len(spans) > len(self._kept):
            raise ValueError(f"a step has at most {len(self._kept)} spans, not {len(spans)}")
        for n, span in enumerate(spans):
            (blocks, tables, away), of = self._kept[n] or (None, None, None), self._spans[n]
            if span.rows < 1:
                raise ValueError(f"a span must have a row; number {n} has {span.rows}")
            self._kept[n] = None
            if blocks is not span.blocks:
                of.blocks = address("blocks", span.blocks, np.int32, span.blocks.size)
                of.count = span.blocks.size
            if tables is not span.tables:
                self._set_tables(n, span.tables)
            if away is not span.away:
                self._set_away(of, span.away)
            of.row, of.rows, of.position = span.row, span.rows, span.position
            self._kept[n] = span.blocks, span.tables, span.away
        self.struct.count = len(spans)

    def _set_away(self, span: Span, away: Away | None) -> None:
        """
        Raises:
            ValueError: it does not fit.
        """
        span.away_count = 0
        if away is not None:
            span.away = address("stretches", away.stretches, np.int32, away.stretches.size)
            span.told = address("told", away.told, np.float32, away.told.size)
            span.away_count = away.stretches.size

    def _set_tables(self, n: int, tables: Sequence[tuple[F32, F32]]) -> None:
        """Set the block tables of span n.

        Raises:
            ValueError: they do not fit.
        """
        if len(tables) != self._ropes:
            raise ValueError(f"a span must have {self._ropes} tables; number {n} has {len(tables)}")
        for (cos, sin), table in zip(tables, self._tables[n * self._ropes :], strict=False):
            if cos.ndim != 2:
                raise ValueError(f"cos must be float32[P, r/2], not of shape {cos.shape}")
            table.places, table.turned = cos.shape
            table.cos = address("cos", cos, np.float32, *cos.shape)
            table.sin = address("sin", sin, np.float32, *cos.shape)


class Attending(partial[None]):
    """An attention that is bound; a call computes it, see `bind_attention`."""

    def queries(self, span: int, out: F32) -> None:
        """The queries of a span, turned and scaled, as a question about it has them.

        Args:
            span: which of those that are set.
            out: f32[rows, heads, d], C-contiguous, overwritten.

        Raises:
            IndexError: as a call.
        """
        library().motley_queries(self.args[0], span, out.ctypes.data)


def bind_attention(
    qkv: F32,
    keys: Cached,
    values: Cached | None,
    y: F32,
    spans: Spans,
    rope: int,
    *,
    heads: int,
    kv_heads: int,
    scale: float,
    window: int,
    context: int,
    turned: int,
    pool: Pool,
    soft_cap: float = 0.0,
    sinks: F32 | None = None,
    key_scales: F32 | None = None,
    value_scales: F32 | None = None,
    far: LayerBlocks | None = None,
    await_told: Callable[[], None] | None = None,
    chunked: bool = False,
    gains: tuple[F32, F32] | None = None,
    warmth: F32 | None = None,
    chosen: npt.NDArray[np.int64] | None = None,
) -> Attending:
    """The attention of all spans of a step, in one layer: each row sees its sequence's positions up to its own.

    A call first writes keys, turned, and values of all rows to their blocks. Rows of M that no span has are left alone
    in `y`.

    A call raises `IndexError`, and writes nothing, if the rows of a span are not among the M, or if one of their
    positions is not below `context` or has no block or no angles, or only a far block where it is to be written.

    Args:
        qkv: f32[M, (heads + 2 * kv_heads) * d], queries first, values last; if there are none, (heads + kv_heads) * d.
        keys: [N, kv_heads, tokens, d] of one of `FORMATS`, the blocks of this layer; written to. Keys and values are
            rounded when they are written; what is computed with them is in float32. Those beyond 65504 do not fit
            float16: what sees them is not finite.
        values: the same; None: the cached keys are the values too.
        y: f32[M, heads * d], overwritten.
        spans: read by every call. No two write to the same block, and none reads what another one writes.
        rope: by which of `SpanRows.tables` queries and keys turn.
        heads: of q; groups of ``heads / kv_heads`` share a head of k and v.
        scale: of the products of q and k.
        window: how many positions a token sees, its own among them; 0: all.
        context: how many positions a sequence may have; room is made for so many.
        turned: angles for each position, r/2; 0: nothing turns, and no table is read.
        pool: computes; several threads if there is enough to see.
        soft_cap: products are ``cap * tanh(product / cap)``; 0: they are not.
        sinks: f32[heads], a logit each that takes part in the softmax and is no position.
        key_scales: f32[N, kv_heads, tokens] of int8, else None: by what the numbers of each token's head of keys are
            multiplied; written to.
        value_scales: the same of values.
        far: more blocks, from number N on, which are only read; None: there are none. Where a block lies does not
            change a bit.
        await_told: returns when the summaries of the stretches that are `Away` are there; called once by a call with
            any, after it has attended to what is here. It must not raise, nor use the pool.
        chunked: positions are cut in chunks of `window`, and a token sees those of its own chunk alone.
        gains: f32[d] twice, by which turned queries and keys are multiplied.
        warmth: f32[context], by which queries are multiplied besides, by their positions.
        chosen: i64[M, kv_heads * N], which positions each KV head of rows sees that could see more than N, ascending,
            one at least, then -1; others see all. A call raises `IndexError` where these are not ascending positions
            up to the row's own. None: all rows see all.

    Raises:
        ValueError: an operand has another shape or type, is not contiguous or aligned, or is to be written but
            read-only; or a number is out of range. The message names it.
        MemoryError: there is no memory for what the pool's threads find.
    """
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, not {heads} of {kv_heads}")
    if window < chunked:
        raise ValueError(f"window must be positive, or 0 without chunks, not {window}")
    if not 1 <= context <= LONGEST:
        raise ValueError(f"context must be 1 to {LONGEST} positions, not {context}")
    if keys.ndim != 4 or not min(keys.shape[2:]):
        raise ValueError(f"keys must be [N, {kv_heads}, tokens, d], not of shape {keys.shape}")
    if keys.dtype not in FORMATS:
        raise ValueError(f"keys must be float32, float16 or int8, not {keys.dtype}")
    blocks, _, tokens, size = keys.shape
    if not 0 <= 2 * turned <= size:
        raise ValueError(f"turned must be at most {size // 2} angles for heads of {size}, not {turned}")
    if turned and not 0 <= rope < spans.struct.ropes:
        raise ValueError(f"rope must be one of the {spans.struct.ropes} tables that spans have, not number {rope}")
    width = (heads + (1 if values is None else 2) * kv_heads) * size
    if qkv.ndim != 2 or not len(qkv):
        raise ValueError(f"qkv must be float32[M, {width}], not of shape {qkv.shape}")
    rows, keys_alone = len(qkv), values is None
    if values is None:
        values, value_scales = keys, key_scales
    numbers = keys.dtype, kv_heads, tokens, size
    choices = 0 if chosen is None else chosen.shape[-1] // kv_heads
    if chosen is not None and (window or not choices):
        raise ValueError(f"rows must have chosen some positions, {choices}, without a window")
    near = tier(LayerBlocks(keys, values, key_scales, value_scales), "", place, 0, blocks, *numbers)
    beyond = Tier() if far is None else tier(far, "far ", address, blocks, len(far.keys), *numbers)
    attention = Attention(
        pool=pool.handle,
        spans=ctypes.pointer(spans.struct),
        qkv=address("qkv", qkv, np.float32, rows, width),
        near=near,
        far=beyond,
        sinks=None if sinks is None else address("sinks", sinks, np.float32, heads),
        q_gain=address("gains", gains[0], np.float32, size) if gains else None,
        k_gain=address("gains", gains[1], np.float32, size) if gains else None,
        warmth=None if warmth is None else address("warmth", warmth, np.float32, context),
        chosen=None if chosen is None else address("chosen", chosen, np.int64, rows, kv_heads * choices),
        y=place("y", y, np.float32, rows, heads * size),
        rows=rows,
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        tokens=tokens,
        turned=turned,
        window=window,
        rope=rope,
        context=context,
        choices=choices,
        scale=scale,
        soft_cap=soft_cap,
        format=FORMATS.index(keys.dtype.type),
        keys_alone=keys_alone,
        chunked=chunked,
        await_told=AWAIT(await_told) if await_told else AWAIT(),
    )
    if not library().motley_prepare_attention(attention):
        raise MemoryError(f"no memory to attend to {context} positions with {heads} heads of {size}")
    attention.kept = (qkv, keys, values, y, spans, sinks, gains, warmth, chosen, key_scales, value_scales, far, pool)
    return Attending(library().motley_attention, ctypes.byref(attention))


def tier(
    of: LayerBlocks,
    whose: str,
    found: Callable[..., int],
    first: int,
    count: int,
    dtype: np.dtype[Any],
    kv_heads: int,
    tokens: int,
    size: int,
) -> Tier:
    """What is cached in `count` blocks from number `first` on, for the kernel.

    Args:
        whose: begins the names of these arrays in messages.
        found: `address`, or `place` where they are written to.

    Raises:
        ValueError: an array has another shape or type, or cannot be used as it lies.
    """
    if (of.key_scales is None) == (dtype == np.int8):
        raise ValueError(f"{whose}key_scales must be given if keys are int8, and only then")
    if (of.value_scales is None) == (dtype == np.int8):
        raise ValueError(f"{whose}value_scales must be given if keys are int8, and only then")

    def scales(name: str, array: F32 | None) -> int | None:
        return None if array is None else found(whose + name, array, np.float32, count, kv_heads, tokens)

    return Tier(
        keys=found(f"{whose}keys", of.keys, dtype, count, kv_heads, tokens, size),
        values=found(f"{whose}values", of.values, dtype, count, kv_heads, tokens, size),
        key_scales=scales("key_scales", of.key_scales),
        value_scales=scales("value_scales", of.value_scales),
        first=first,
        count=count,
    )
