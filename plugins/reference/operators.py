"""The standard operators that rank graphs consist of, each a few lines of array code; by ONNX name in `OPERATORS`.

An operator is called as ``operator(xp, *inputs, **attributes)`` with exactly the attributes that the graphs use. It
gives one array, or a list of them if the node has several outputs.

`xp` is the array module of the device: NumPy or CuPy, whose arrays do not mix. On the device is all that is floats,
follows from floats, or was read from the share file. On the host, as NumPy arrays whatever `xp` is, are the integers
and booleans that follow from the graph's constants and inputs: shapes, positions and masks. Where an operator needs
these on the device, it takes them there with ``xp.asarray``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from motley.plugins.reference.device import Array, ArrayModule
from motley.plugins.streams import LEAST_MATCH, STREAM_GATES

Operator = Callable[..., Any]


def _module_of(xp: ArrayModule, array: Array) -> ArrayModule:
    """What computes with an array: NumPy for those on the host, which may be NumPy's scalars too."""
    return np if isinstance(array, np.ndarray | np.generic) else xp


def _beside(xp: ArrayModule, array: Array, indices: Array) -> Array:
    """Indices, on the host or not, where `array` is."""
    return indices if _module_of(xp, array) is np else xp.asarray(indices)


# -- floats --------------------------------------------------------------------------------------------------


def rms_normalization(xp: ArrayModule, x: Array, scale: Array, *, axis: int, epsilon: float) -> Array:
    mean_square = xp.mean(xp.square(x), axis=axis, keepdims=True)
    return x / xp.sqrt(mean_square + x.dtype.type(epsilon)) * scale


def layer_normalization(
    xp: ArrayModule, x: Array, scale: Array, bias: Array | None = None, *, axis: int, epsilon: float
) -> Array:
    centred = x - xp.mean(x, axis=axis, keepdims=True)
    normed = rms_normalization(xp, centred, scale, axis=axis, epsilon=epsilon)
    return normed if bias is None else normed + bias


def gemm(xp: ArrayModule, a: Array, b: Array, c: Array | None = None, *, transB: int) -> Array:
    product = a @ (b.T if transB else b)
    return product if c is None else product + c


def softmax(xp: ArrayModule, x: Array, *, axis: int) -> Array:
    powers = xp.exp(x - x.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


def sparse_mixer(xp: ArrayModule, logits: Array, *, tolerance: float) -> list[Array]:
    """``motley.SparseMixer``: the two largest logits of each row, and their softmax among those that are near."""
    two = np.array([2])
    largest, chosen = top_k(xp, logits, two, axis=-1, largest=1, sorted=1)
    weights, gone = [], xp.zeros(logits.shape, bool)
    for number in range(2):
        best = largest[:, number : number + 1]
        far = (best - logits) / xp.maximum(xp.abs(logits), best) > logits.dtype.type(tolerance)
        odds = xp.where(far | gone, 0, xp.exp(xp.where(gone, 0, logits - best)))
        weights.append(1 / odds.sum(axis=-1))
        gone = xp.asarray(np.arange(logits.shape[1])) == chosen[:, number : number + 1]
    return [xp.stack(weights, axis=-1), chosen]


def sigmoid(xp: ArrayModule, x: Array) -> Array:
    # exp of a non-positive number only, so that nothing overflows.
    decay = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1, decay) / (1 + decay)


def softplus(xp: ArrayModule, x: Array) -> Array:
    return xp.log1p(xp.exp(-xp.abs(x))) + xp.maximum(x, 0)


def top_k(xp: ArrayModule, x: Array, k: Array, *, axis: int, largest: int, sorted: int) -> list[Array]:
    """The largest values and where they are, descending; of equal ones the first."""
    assert (axis, largest, sorted) == (-1, 1, 1)
    places = xp.argsort(-x, axis=-1, kind="stable")[..., : int(k[0])]
    return [xp.take_along_axis(x, places, axis=-1), xp.asarray(places, np.int64)]


def swish(xp: ArrayModule, x: Array, *, alpha: float = 1.0) -> Array:
    return x * sigmoid(xp, x * x.dtype.type(alpha))


def gelu(xp: ArrayModule, x: Array, *, approximate: bytes) -> Array:
    """By the approximation with tanh: ``x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))``."""
    assert approximate == b"tanh"
    inner = x.dtype.type(2 * (2 / np.pi) ** 0.5) * (x + x.dtype.type(0.044715) * x * x * x)
    return x * sigmoid(xp, inner)


def xielu(xp: ArrayModule, x: Array, a: Array, b: Array) -> Array:
    """``motley.Xielu``."""
    half, low = x.dtype.type(0.5), xp.minimum(x, 0)
    bend, fall = xp.log1p(xp.exp(a)), half + xp.log1p(xp.exp(b))
    return half * x + bend * xp.maximum(x, 0) * x + fall * (xp.expm1(low) - low)


def stream_gates(
    xp: ArrayModule,
    logits: Array,
    scale: Array,
    base: Array,
    *,
    streams: int,
    epsilon: float,
    written: float,
    least: float,
    rounds: int,
) -> Array:
    """``motley.StreamGates`` and its kin, see `motley.plugins.streams`."""
    number = logits.dtype.type
    parts = np.repeat(np.arange(3), [streams, streams, streams**2])[: logits.shape[1]]
    raw = logits * scale[xp.asarray(parts)] + base
    read = sigmoid(xp, raw[:, :streams]) + number(epsilon)
    write = number(written) * sigmoid(xp, raw[:, streams : 2 * streams]) + number(least)
    mix = raw[:, 2 * streams :].reshape(len(raw), -1, streams)
    if rounds:
        mix = softmax(xp, mix, axis=-1) + number(epsilon)
        for axis in (1, *(2, 1) * (rounds - 1)):
            mix = mix / (mix.sum(axis=axis, keepdims=True) + number(epsilon))
    return xp.concatenate([read, write, mix.reshape(len(raw), -1)], axis=1)


def read_streams(xp: ArrayModule, x: Array, gates: Array, *, streams: int) -> Array:
    """``motley.ReadStreams``, see `motley.plugins.streams`."""
    apart = x.reshape(len(x), streams, -1)
    return (apart * gates[..., :streams].reshape(-1, streams, 1)).sum(axis=1)


def write_streams(xp: ArrayModule, x: Array, gates: Array, rows: Array | None = None, *, streams: int) -> Array:
    """``motley.WriteStreams``, see `motley.plugins.streams`."""
    apart = x.reshape(len(x), streams, -1)
    if gates.shape[-1] > 2 * streams:
        apart = gates[..., 2 * streams :].reshape(-1, streams, streams).swapaxes(1, 2) @ apart
    if rows is not None:
        apart = apart + gates[..., streams : 2 * streams].reshape(-1, streams, 1) * rows[:, None]
    return apart.reshape(x.shape)


def match_streams(xp: ArrayModule, x: Array, keys: Array, rows: Array, *, streams: int, scale: float) -> Array:
    """``motley.MatchStreams``, see `motley.plugins.streams`."""
    number = x.dtype.type
    fit = (x * keys).reshape(len(x), streams, -1).sum(axis=-1, keepdims=True) * number(scale)
    root = xp.sqrt(xp.maximum(xp.abs(fit), number(LEAST_MATCH))) * xp.sign(fit)
    return (sigmoid(xp, root) * rows[:, None]).reshape(x.shape)


def dequantize_linear(
    xp: ArrayModule, x: Array, scale: Array, zero_point: Array, *, axis: int, block_size: int
) -> Array:
    assert axis == 1
    values = xp.asarray(x, scale.dtype).reshape(*scale.shape, block_size)  # a copy: codes are integers
    values -= xp.asarray(zero_point, scale.dtype)[..., None]
    values *= scale[..., None]
    return values.reshape(x.shape)


def rotary_embedding(
    xp: ArrayModule, x: Array, cos_cache: Array, sin_cache: Array, position_ids: Array, *, rotary_embedding_dim: int
) -> Array:
    """x: f32[B, heads, T, head_dim]; of each head's first elements, as many as the attribute says, one half is rotated
    against the other."""
    positions = xp.asarray(position_ids)
    cos, sin = cos_cache[positions][:, None], sin_cache[positions][:, None]
    half = rotary_embedding_dim // 2
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return xp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def tensor_scatter(xp: ArrayModule, cache: Array, update: Array, write_indices: Array, *, axis: int) -> Array:
    """A copy of the cache f32[1, heads, C, head_dim] with rows written from an index on."""
    assert axis == 2
    start = int(write_indices[0])
    updated = cache.copy()
    updated[:, :, start : start + update.shape[2]] = update
    return updated


def head_products(xp: ArrayModule, x: Array, w: Array, *, heads: int, first: int, last: int, width: int) -> Array:
    """``motley.HeadProducts``: elements `first` to `last` of each head of x f32[T, heads * S] by its matrix of w."""
    used = x.reshape(len(x), heads, -1)[..., first:last].swapaxes(0, 1)
    products = used @ w.reshape(heads, -1, last - first).swapaxes(1, 2)
    return products.swapaxes(0, 1).reshape(len(x), len(w))


def attention(xp: ArrayModule, q: Array, k: Array, v: Array, mask: Array, *, scale: float, softcap: float) -> Array:
    """q: f32[1, heads, T, head_dim], k and v: f32[1, kv_heads, C, head_dim], mask: bool[T, C], true where seen."""
    group = q.shape[1] // k.shape[1]
    keys, values = xp.repeat(k, group, axis=1), xp.repeat(v, group, axis=1)
    products = q @ keys.swapaxes(-1, -2) * q.dtype.type(scale)
    if softcap:
        products = q.dtype.type(softcap) * xp.tanh(products / q.dtype.type(softcap))
    scores = xp.where(xp.asarray(mask), products, -xp.inf)
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ values


def logical_and(xp: ArrayModule, a: Array, b: Array) -> Array:
    """Of masks, which may be on the host."""
    return a & b if _module_of(xp, a) is _module_of(xp, b) else xp.asarray(a) & xp.asarray(b)


def scatter_elements(xp: ArrayModule, x: Array, indices: Array, updates: Array, *, axis: int) -> Array:
    """A copy of the matrix x with some columns of each row replaced; -1 is the last column."""
    assert axis == 1
    written = x.copy()
    written[xp.asarray(np.arange(len(x)))[:, None], indices] = updates
    return written


# -- shapes --------------------------------------------------------------------------------------------------


def split(xp: ArrayModule, x: Array, widths: Array, *, axis: int) -> list[Array]:
    return list(xp.split(x, np.cumsum(widths)[:-1].tolist(), axis=axis))


def shape(xp: ArrayModule, x: Array, *, start: int = 0, end: int | None = None) -> Array:
    return np.array(x.shape[start:end], np.int64)


def constant(
    xp: ArrayModule,
    *,
    value_int: int | None = None,
    value_ints: list[int] | None = None,
    value_float: float | None = None,
) -> Array:
    if value_float is not None:
        return xp.asarray(value_float, np.float32)
    return np.array(value_ints if value_int is None else value_int, np.int64)


def expand(xp: ArrayModule, x: Array, dims: Array) -> Array:
    """Broadcast both ways: a dimension of 1 in either is that of the other."""
    return _module_of(xp, x).broadcast_to(x, np.broadcast_shapes(x.shape, tuple(dims.tolist())))


def slice_(xp: ArrayModule, x: Array, starts: Array, ends: Array, axes: Array) -> Array:
    places = [slice(None)] * x.ndim
    for axis, start, end in zip(axes.tolist(), starts.tolist(), ends.tolist(), strict=True):
        places[axis] = slice(start, end)
    return x[tuple(places)]


def constant_of_shape(xp: ArrayModule, dims: Array, *, value: onnx.TensorProto | None = None) -> Array:
    """Zeros, or a zero point: uint4 values are held as uint8."""
    if value is None:
        return xp.zeros(dims.tolist(), np.float32)
    return xp.full(dims.tolist(), int(numpy_helper.to_array(value)[0]), np.uint8)


OPERATORS: dict[str, Operator] = {
    "Add": lambda xp, a, b: a + b,
    "And": logical_and,
    "Attention": attention,
    "Clip": lambda xp, x, low, high: xp.clip(x, low, high),
    "Concat": lambda xp, *inputs, axis: _module_of(xp, inputs[0]).concatenate(inputs, axis),
    "Constant": constant,
    "ConstantOfShape": constant_of_shape,
    "DequantizeLinear": dequantize_linear,
    "Div": lambda xp, a, b: a / b,
    "Equal": lambda xp, a, b: a == b,
    "Expand": expand,
    "Gather": lambda xp, x, indices, axis: x.take(_beside(xp, x, indices), axis),
    "GatherElements": lambda xp, x, indices, axis: xp.take_along_axis(x, indices, axis),
    "Gelu": gelu,
    "Gemm": gemm,
    "HeadProducts": head_products,
    "GreaterOrEqual": lambda xp, a, b: a >= b,
    "LayerNormalization": layer_normalization,
    "Less": lambda xp, a, b: a < b,
    "LessOrEqual": lambda xp, a, b: a <= b,
    "Log": lambda xp, x: xp.log(x),
    "MatchStreams": match_streams,
    "MatMul": lambda xp, a, b: a @ b,
    "Min": lambda xp, a, b: xp.minimum(a, b),
    "Mod": lambda xp, a, b: a % b,
    "Mul": lambda xp, a, b: a * b,
    "Or": lambda xp, a, b: a | b,
    "RMSNormalization": rms_normalization,
    "Range": lambda xp, start, limit, delta: np.arange(start, limit, delta),
    "ReduceSum": lambda xp, x, axes, keepdims: x.sum(axis=tuple(axes.tolist()), keepdims=bool(keepdims)),
    "ReduceMax": lambda xp, x, axes, keepdims: x.max(axis=tuple(axes.tolist()), keepdims=bool(keepdims)),
    "ReduceMin": lambda xp, x, axes, keepdims: x.min(axis=tuple(axes.tolist()), keepdims=bool(keepdims)),
    "ReadStreams": read_streams,
    "Relu": lambda xp, x: xp.maximum(x, 0),
    "Reshape": lambda xp, x, dims: x.reshape(dims.tolist()),
    "RotaryEmbedding": rotary_embedding,
    "Shape": shape,
    "ScatterElements": scatter_elements,
    "Sigmoid": sigmoid,
    "Slice": slice_,
    "Softmax": softmax,
    "Softplus": softplus,
    "SparseMixer": sparse_mixer,
    "Split": split,
    "Sqrt": lambda xp, x: xp.sqrt(x),
    "Squeeze": lambda xp, x: x.squeeze(),
    "Sub": lambda xp, a, b: a - b,
    "Swish": swish,
    "Tanh": lambda xp, x: xp.tanh(x),
    "TensorScatter": tensor_scatter,
    "TopK": top_k,
    "Transpose": lambda xp, x, perm: x.transpose(perm),
    "Unsqueeze": lambda xp, x, axes: _module_of(xp, x).expand_dims(x, tuple(axes.tolist())),
    "Xielu": xielu,
    **dict.fromkeys(STREAM_GATES, stream_gates),
    "WriteStreams": write_streams,
    "Where": lambda xp, condition, a, b: xp.where(xp.asarray(condition), xp.asarray(a), xp.asarray(b)),
}
