"""Our own kernels for what a token needs between two products: norms, gates, cached attention, a few microseconds each.

The arithmetic is stated in rows.c and attention.c. Results are the same to the bit on every CPU and for any number of
threads, and a row's do not depend on which other rows are computed with it.

Operands are bound once; each call of what a function here returns then computes, and allocates nothing. All functions
raise `ValueError` if an operand has another shape or type, is not contiguous or aligned, or is to be written but
read-only (the message names it), and `ImportError` if the compiled kernels are missing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from .library import F32, Attention, Gated, Norm, address, library, place
from .matmul import Pool

Action = Callable[[], None]
"""A call computes something on buffers that were bound to it."""


def bind_norm(x: F32, skip: F32 | None, weight: F32, epsilon: float, y: F32, total: F32 | None) -> Action:
    """RMS norm of rows: ``total = x + skip``, ``y = total / sqrt(mean(total ** 2) + epsilon) * weight``.

    Args:
        x: f32[M, D].
        skip: f32[M, D]; None: nothing is added.
        weight: f32[D].
        y: f32[M, D], overwritten.
        total: f32[M, D], overwritten, may be `x` or `skip` itself; None: it is not wanted.
    """
    rows, columns = x.shape if x.ndim == 2 else (0, 0)
    norm = Norm(
        x=address("x", x, np.float32, rows, columns),
        skip=None if skip is None else address("skip", skip, np.float32, rows, columns),
        weight=address("weight", weight, np.float32, columns),
        y=place("y", y, np.float32, rows, columns),
        total=None if total is None else place("total", total, np.float32, rows, columns),
        rows=rows,
        columns=columns,
        epsilon=epsilon,
    )
    norm.kept = (x, skip, weight, y, total)
    return partial(library().motley_norm, ctypes.byref(norm))


ACTIVATIONS = ("silu", "gelu_tanh", "clamped")
"""What gates may be opened by, see rows.c: the numbers that rows.h calls them by are their places."""


def bind_gated(gate_up: F32, y: F32, activation: str = "silu") -> Action:
    """What a gated MLP makes of gate and up: ``y = silu(gate) * up``, or with another of `ACTIVATIONS`.

    Args:
        gate_up: f32[M, 2F], gates first.
        y: f32[M, F], overwritten.
    """
    rows, columns = y.shape if y.ndim == 2 else (0, 0)
    gated = Gated(
        y=place("y", y, np.float32, rows, columns),
        gate_up=address("gate_up", gate_up, np.float32, rows, 2 * columns),
        rows=rows,
        columns=columns,
        activation=ACTIVATIONS.index(activation),
    )
    gated.kept = (gate_up, y)
    return partial(library().motley_gated, ctypes.byref(gated))


def bind_attention(
    qkv: F32,
    key_cache: F32,
    value_cache: F32,
    cos: F32,
    sin: F32,
    position: npt.NDArray[np.int64],
    y: F32,
    *,
    heads: int,
    kv_heads: int,
    scale: float,
    window: int,
    pool: Pool,
    soft_cap: float = 0.0,
    sinks: F32 | None = None,
) -> Action:
    """The attention of M consecutive tokens, each to the positions up to its own, of ``C`` that the caches have.

    The tokens' keys and values are written to the caches first. A row's result does not depend on which other rows are
    computed with it. A call raises `IndexError`, and writes nothing, if a position is outside of the caches, or of the
    angles.

    Args:
        qkv: f32[M, (heads + 2 * kv_heads) * d], queries first, values last.
        key_cache: f32[1, kv_heads, C, d].
        value_cache: the same.
        cos: f32[P, r/2], of the angles by position of a rotary embedding that turns the first ``r <= d`` dimensions of
            q and k: i with i + r/2. r may be 0.
        sin: the same.
        position: i64[1], where the first token stands; read by every call.
        y: f32[M, heads * d], overwritten.
        heads: of q; groups of ``heads / kv_heads`` share a head of k and v.
        scale: of the products of q and k.
        window: how many positions a token sees, its own among them; 0: all.
        soft_cap: products are ``cap * tanh(product / cap)``; 0: they are not.
        sinks: f32[heads], a logit each that takes part in the softmax and is no position.
        pool: computes; several threads if there is enough to see.

    Raises:
        MemoryError: there is no memory for what the pool's threads find.
    """
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, not {heads} of {kv_heads}")
    if window < 0:
        raise ValueError(f"window must be positive, or 0, not {window}")
    if key_cache.ndim != 4:
        raise ValueError(f"key_cache must be float32[1, {kv_heads}, C, d], not of shape {key_cache.shape}")
    capacity, size = key_cache.shape[2:]
    if cos.ndim != 2:
        raise ValueError(f"cos must be float32[P, r/2], not of shape {cos.shape}")
    if qkv.ndim != 2 or not len(qkv):
        raise ValueError(f"qkv must be float32[M, {(heads + 2 * kv_heads) * size}], not of shape {qkv.shape}")
    rows = len(qkv)
    places, turned = cos.shape
    if 2 * turned > size:
        raise ValueError(f"cos must have at most {size // 2} angles for heads of {size}, not {turned}")
    attention = Attention(
        pool=pool.handle,
        qkv=address("qkv", qkv, np.float32, rows, (heads + 2 * kv_heads) * size),
        keys=place("key_cache", key_cache, np.float32, 1, kv_heads, capacity, size),
        values=place("value_cache", value_cache, np.float32, 1, kv_heads, capacity, size),
        cos=address("cos", cos, np.float32, places, turned),
        sin=address("sin", sin, np.float32, places, turned),
        position=address("position", position, np.int64, 1),
        sinks=None if sinks is None else address("sinks", sinks, np.float32, heads),
        y=place("y", y, np.float32, rows, heads * size),
        rows=rows,
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        capacity=capacity,
        places=places,
        turned=turned,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
    )
    if not library().motley_prepare_attention(attention):
        raise MemoryError(f"no memory to attend to {capacity} positions with {heads} heads of {size}")
    attention.kept = (qkv, key_cache, value_cache, cos, sin, position, y, sinks, pool)
    return partial(library().motley_attention, ctypes.byref(attention))
