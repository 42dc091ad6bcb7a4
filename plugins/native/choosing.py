"""Which positions the rows of several sequences see: those that an indexer scores best, by index keys in blocks."""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np
import numpy.typing as npt

from .attention import FORMATS, LONGEST, LayerBlocks, Spans, tier
from .library import address, library, place
from .matmul import Pool
from .rows import Action
from .structs import AWAIT, Attention, Choice, Tier

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


def bind_choice(
    q: F32,
    k: F32,
    weights: F32 | None,
    near: LayerBlocks,
    chosen: I64,
    spans: Spans,
    rope: int,
    *,
    heads: int,
    turned: int,
    context: int,
    pool: Pool,
    far: LayerBlocks | None = None,
    block: int = 1,
    latest: int = 0,
    pooling: F32 | None = None,
    gain: F32 | None = None,
    epsilon: float = 0.0,
    copies: int = 1,
) -> Action:
    """The choice of all spans of a step, in one layer; ``motley.ChosenPositions`` and its kin say what is chosen.

    A call first writes the keys of all rows, turned, to their blocks. Rows of M that no span has are left alone. It
    raises `IndexError` as a call of `motley.plugins.native.attention.bind_attention` does.

    Args:
        q: f32[M, heads * d]; not read of rows that see no more positions than are chosen, nor are `weights`.
        k: f32[M, d]; where keys are pooled f32[M, 2 * d], keys and their gates.
        weights: f32[M, heads]; None: each head chooses, or, where keys are means, all count alike.
        near: the blocks of this layer, whose keys [N, 1, tokens, d], or 2 * d, are written to; the values are the keys.
        chosen: i64[M, count], or [M, heads * count] where each head chooses, overwritten: positions, ascending, then
            -1; each list is there `copies` times, side by side.
        spans, rope, turned, context, pool, far: as of an attention.
        block: positions that are chosen together, from a multiple of it on; `count` is a multiple of it, and where keys
            are pooled, or means, ``block - 1`` more.
        latest: so many blocks up to a row's own are always chosen.
        pooling: f32[block, d], what is added to gates; None: keys are not pooled by gates.
        gain, epsilon: f32[d], of the norm of keys that are means; None: they are none.

    Raises:
        ValueError: an operand has another shape or type, is not contiguous or aligned, or is to be written but
            read-only; or a number is out of range. The message names it.
        MemoryError: there is no memory for the scores.
    """
    keys = near.keys
    if keys.ndim != 4 or keys.shape[1] != 1 or not min(keys.shape[2:]) or keys.dtype not in FORMATS:
        raise ValueError(f"keys must be [N, 1, tokens, d] of float32, float16 or int8, not {keys.dtype}{keys.shape}")
    blocks, _, tokens, size = keys.shape
    if heads < 1 or chosen.ndim != 2 or not chosen.size:
        raise ValueError(f"some heads must choose some positions, not {heads} heads {list(chosen.shape)}")
    if not 1 <= context <= LONGEST or not 0 <= 2 * turned <= size:
        raise ValueError(f"a context of {context} positions, or {turned} angles for heads of {size}, cannot be")
    if turned and not 0 <= rope < spans.struct.ropes:
        raise ValueError(f"rope must be one of the {spans.struct.ropes} tables that spans have, not number {rope}")
    rows, lists = len(chosen), heads if weights is None and gain is None else 1
    count = chosen.shape[1] // (lists * copies)
    behind = 0 if pooling is None and gain is None else block - 1
    if block < 1 or count < block or count % block != behind or not 0 <= latest <= count // block:
        raise ValueError(f"{count} positions in blocks of {block}, {latest} of them the latest, cannot be chosen")
    numbers = keys.dtype, 1, tokens, size
    choice = Choice(
        attention=Attention(
            pool=pool.handle,
            spans=ctypes.pointer(spans.struct),
            near=tier(near, "", place, 0, blocks, *numbers),
            far=Tier() if far is None else tier(far, "far ", address, blocks, len(far.keys), *numbers),
            rows=rows,
            heads=heads,
            kv_heads=1,
            size=size,
            tokens=tokens,
            turned=turned,
            rope=rope,
            context=context,
            format=FORMATS.index(keys.dtype.type),
            keys_alone=1,
            await_told=AWAIT(),
        ),
        q=address("q", q, np.float32, rows, heads * size // (1 if pooling is None else 2)),
        k=address("k", k, np.float32, rows, size),
        weights=None if weights is None else address("weights", weights, np.float32, rows, heads),
        pooling=None if pooling is None else address("pooling", pooling, np.float32, block, size // 2),
        gain=None if gain is None else address("gain", gain, np.float32, size),
        chosen=place("chosen", chosen, np.int64, rows, lists * copies * count),
        count=count,
        block=block,
        latest=latest,
        copies=copies,
        epsilon=epsilon,
    )
    if not library().motley_prepare_choice(choice):
        raise MemoryError(f"no memory to choose from {context} positions with {heads} heads of {size}")
    choice.kept = (q, k, weights, pooling, gain, near, chosen, spans, far, pool)
    return partial(library().motley_choose, ctypes.byref(choice))
