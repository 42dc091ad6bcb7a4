"""Our own kernels for what a token needs between two products: norms and gates, a few microseconds each.

The arithmetic is stated in rows.c. Results are the same to the bit on every CPU, and a row's do not depend on which
other rows are computed with it.

Operands are bound once; each call of what a function here returns then computes, and allocates nothing. All functions
raise `ValueError` if an operand has another shape or type, is not contiguous or aligned, or is to be written but
read-only (the message names it), and `ImportError` if the compiled kernels are missing.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from .library import F32, address, library, place
from .structs import Gated, HeadNorms, Norm, StreamGates, Streams

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


MOST_STREAMS = 8
"""Residual streams of a row, see rows.h."""

ACTIVATIONS = ("silu", "gelu_tanh", "clamped", "sigmoid")
"""What gates may be opened by, see rows.c: the numbers that rows.h calls them by are their places."""


ANY = (math.inf, math.inf)
"""Limits of gates and ups that are not bounded."""


def bind_gated(
    gate_up: F32,
    y: F32,
    activation: str = "silu",
    up: F32 | None = None,
    first: int = 0,
    limits: tuple[float, float] = ANY,
) -> Action:
    """What a gated MLP makes of gate and up: ``y = silu(gate) * up``, or with another of `ACTIVATIONS`.

    Args:
        gate_up: f32[M, 2F], gates first; or f32[M, W], of which F are gates.
        y: f32[M, F], overwritten.
        up: f32[M, F], where it is apart; else None.
        first: where it is apart, which of the W are the first that are gates.
        limits: with SiLU, the largest that a gate is, and that up is in magnitude.
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
        gate_limit=limits[0],
        up_limit=limits[1],
    )
    gated.kept = (gate_up, up, y)
    return partial(library().motley_gated, ctypes.byref(gated))


def bind_stream_gates(
    logits: F32,
    scale: F32,
    base: F32,
    y: F32,
    *,
    streams: int,
    epsilon: float,
    written: float,
    least: float,
    rounds: int,
) -> Action:
    """How residual streams are read, written to and mixed, see `motley.plugins.streams`.

    Args:
        logits: f32[M, N], of N = S, 2 S or, with rounds, 2 S + S S columns.
        scale: f32[1 to 3], one for each of these parts.
        base: f32[N].
        y: f32[M, N], overwritten; may be `logits` itself.
    """
    rows, columns = logits.shape if logits.ndim == 2 else (0, 0)
    parts = [streams, 2 * streams, (2 + streams) * streams]
    if not 2 <= streams <= MOST_STREAMS or columns not in parts or (columns == parts[2]) != (rounds > 0):
        raise ValueError(f"logits: {columns} columns and {rounds} rounds are not for {streams} streams")
    gates = StreamGates(
        logits=address("logits", logits, np.float32, rows, columns),
        scale=address("scale", scale, np.float32, parts.index(columns) + 1),
        base=address("base", base, np.float32, columns),
        y=place("y", y, np.float32, rows, columns),
        rows=rows,
        columns=columns,
        streams=streams,
        epsilon=epsilon,
        written=written,
        least=least,
        rounds=rounds,
    )
    gates.kept = (logits, scale, base, y)
    return partial(library().motley_stream_gates, ctypes.byref(gates))


def bind_streams(x: F32, gates: F32, y: F32, streams: int, own: F32 | None = None) -> Action:
    """What is read of residual streams, or streams that are written to, see `motley.plugins.streams`.

    Args:
        x: f32[M, S * D].
        gates: f32[M, N], or f32[N] of all rows.
        y: f32[M, D], or f32[M, S * D] where streams are written to; overwritten.
        own: f32[M, D], of which each stream gets some; None: streams are read.
    """
    rows, width = x.shape if x.ndim == 2 else (0, 0)
    columns, of_row = width // streams, gates.shape[-1]
    parts = [streams, 2 * streams, (2 + streams) * streams]
    if not 2 <= streams <= MOST_STREAMS or width % streams or of_row not in parts[own is not None :]:
        raise ValueError(f"gates: {of_row} of a row are not for {streams} streams of {width} elements together")
    shape = (of_row,) if gates.ndim == 1 else (rows, of_row)
    both = Streams(
        x=address("x", x, np.float32, rows, width),
        gates=address("gates", gates, np.float32, *shape),
        own=None if own is None else address("own", own, np.float32, rows, columns),
        y=place("y", y, np.float32, rows, columns if own is None else width),
        rows=rows,
        columns=columns,
        streams=streams,
        gates_stride=0 if gates.ndim == 1 else of_row,
        mixes=of_row == parts[2],
    )
    both.kept = (x, gates, y, own)
    return partial(library().motley_streams, ctypes.byref(both))
