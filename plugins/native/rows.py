"""Our own kernels for what a token needs between two products: norms and gates, a few microseconds each.

The arithmetic is stated in rows.c. Results are the same to the bit on every CPU, and a row's do not depend on which
other rows are computed with it.

Operands are bound once; each call of what a function here returns then computes, and allocates nothing. All functions
raise `ValueError` if an operand has another shape or type, is not contiguous or aligned, or is to be written but
read-only (the message names it), and `ImportError` if the compiled kernels are missing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from .library import F32, Gated, HeadNorms, Norm, address, library, place

Action = Callable[[], None]
"""A call computes something on buffers that were bound to it."""


def bind_norm(
    x: F32,
    skip: F32 | None,
    weight: F32,
    epsilon: float,
    y: F32,
    total: F32 | None,
    *,
    factor: float = 1.0,
    bias: F32 | None = None,
    centred: bool = False,
) -> Action:
    """Norm of rows: ``y = total / sqrt(mean(total ** 2) + epsilon) * weight + bias``, ``total = x * factor + skip``.

    Args:
        x: f32[M, D].
        skip: f32[M, D]; None: nothing is added, and there is no factor.
        weight: f32[D].
        y: f32[M, D], overwritten.
        total: f32[M, D], overwritten, may be `x` or `skip` itself; None: it is not wanted.
        bias: f32[D]; None: nothing is added.
        centred: y is a layer norm: of ``total - mean(total)`` in the place of `total`.
    """
    rows, columns = x.shape if x.ndim == 2 else (0, 0)
    norm = Norm(
        x=address("x", x, np.float32, rows, columns),
        skip=None if skip is None else address("skip", skip, np.float32, rows, columns),
        weight=address("weight", weight, np.float32, columns),
        bias=None if bias is None else address("bias", bias, np.float32, columns),
        y=place("y", y, np.float32, rows, columns),
        total=None if total is None else place("total", total, np.float32, rows, columns),
        rows=rows,
        columns=columns,
        epsilon=epsilon,
        factor=factor,
        centred=centred,
    )
    norm.kept = (x, skip, weight, y, total, bias)
    return partial(library().motley_norm, ctypes.byref(norm))


def bind_head_norms(
    x: F32, firsts: Sequence[int], gains: Sequence[F32 | None], heads: Sequence[int], size: int, epsilon: float, y: F32
) -> Action:
    """RMS norms of the heads of parts of rows, such as queries, keys and values, which then lie side by side.

    Args:
        x: f32[M, W].
        firsts: where each part begins in a row of x.
        gains: f32[size] of each part, at most `PARTS_OF_HEADS`; None: its heads are as they were.
        heads: how many each part has.
        y: f32[M, H * size], overwritten; not `x`.
    """
    rows, width = x.shape if x.ndim == 2 else (0, 0)
    least = max(first + count * size for first, count in zip(firsts, heads, strict=True))
    norms = HeadNorms(
        x=address("x", x, np.float32, rows, max(width, least)),
        y=place("y", y, np.float32, rows, sum(heads) * size),
        rows=rows,
        size=size,
        width=width,
        epsilon=epsilon,
    )
    for part, (first, gain, count) in enumerate(zip(firsts, gains, heads, strict=True)):
        norms.firsts[part], norms.heads[part] = first, count
        norms.gains[part] = None if gain is None else address("gains", gain, np.float32, size)
    norms.kept = (x, gains, y)
    return partial(library().motley_head_norms, ctypes.byref(norms))


ACTIVATIONS = ("silu", "gelu_tanh", "clamped", "sigmoid")
"""What gates may be opened by, see rows.c: the numbers that rows.h calls them by are their places."""


def bind_gated(gate_up: F32, y: F32, activation: str = "silu", up: F32 | None = None, first: int = 0) -> Action:
    """What a gated MLP makes of gate and up: ``y = silu(gate) * up``, or with another of `ACTIVATIONS`.

    Args:
        gate_up: f32[M, 2F], gates first; or f32[M, W], of which F are gates.
        y: f32[M, F], overwritten.
        up: f32[M, F], where it is apart; else None.
        first: where it is apart, which of the W are the first that are gates.
    """
    rows, columns = y.shape if y.ndim == 2 else (0, 0)
    given = gate_up.shape[1] if gate_up.ndim == 2 else 0
    stride = 2 * columns if up is None else max(given, first + columns)
    result, gates = place("y", y, np.float32, rows, columns), address("gate_up", gate_up, np.float32, rows, stride)
    gates += 4 * first
    gated = Gated(
        y=result,
        gate=gates,
        up=gates + 4 * columns if up is None else address("up", up, np.float32, rows, columns),
        rows=rows,
        columns=columns,
        gate_stride=stride,
        up_stride=stride if up is None else columns,
        activation=ACTIVATIONS.index(activation),
    )
    gated.kept = (gate_up, up, y)
    return partial(library().motley_gated, ctypes.byref(gated))
