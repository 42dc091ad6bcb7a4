"""The reference engine: a rank's graph executed node by node, the readable definition of what engines compute.

Functions of domain ``motley`` are inlined, so that only standard operators are left and each is a few lines of
array code below; a ``DistCollective`` is handed to the transport, and the graphs of an ``Experts`` node are executed
for the rows that chose them (without graphs, they are elsewhere). Weights stay in the share file and are read where a
node uses them, and dequantised some rows at a time.

Arithmetic is float32, or float64 with ``extra={"dtype": "float64"}``. Collectives always carry float32, as every
engine's do, so the float64 yardstick is a single rank, where nothing is rounded in between.

The array module is passed to every operator that computes with floats (NumPy; CuPy has the same interface);
integers and booleans, which are shapes, positions and masks, stay NumPy arrays on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx.inliner
from onnx import TensorProto, helper, numpy_helper

from motley.plugins.engine import (
    DOMAIN,
    F32,
    Collectives,
    EngineError,
    EngineOptions,
    OneByOne,
    RankGraph,
    check_skip,
    grown_capacity,
    micro_chunks,
)
from motley.plugins.expert_engine import ExpertGraph
from motley.plugins.experts import Sent, Terms, add_mixture, as_terms

Array: TypeAlias = Any
"""An array of the array module, or a NumPy array on the host."""
Operator = Callable[..., Any]
"""``operator(xp, *inputs, **attributes)`` gives one array, or a list of them if the node has several outputs."""

ROWS_AT_ONCE = 4096
"""Rows of a narrow matrix that are widened at a time: a large head would not fit beside an engine."""
INEXACT = (
    "the reference engine cannot keep exact=true: NumPy's matmuls depend on the number of rows; "
    "use engine 'onnxruntime'"
)
_WIDENING = ("Cast", "DequantizeLinear")
FIRST_CAPACITY = 64
"""Tokens that the cache of a new slot holds; it doubles when it is full."""


class _Interpreter:
    """Executes the nodes of a graph, whose weights are in a share file.

    Raises:
        EngineError: the graph has an operator that is not known.
    """

    def __init__(self, graph: onnx.GraphProto, share_file: Path, dtype: np.dtype[Any]) -> None:
        self._xp: ModuleType = np
        self._dtype = dtype
        # Mapped once: the file may be unlinked while it is in use.
        empty = share_file.stat().st_size == 0
        self._weights = np.empty(0, np.uint8) if empty else np.memmap(share_file, np.uint8, "r")
        self._stored = {tensor.name: tensor for tensor in graph.initializer}
        self._nodes = self._prepared_nodes(graph.node)
        _mark_last_uses(self._nodes, keep={output.name for output in graph.output})

    def _run(self, nodes: Sequence[_Node], values: dict[str, Any]) -> None:
        """Execute nodes: values that are read later are added, others are forgotten."""
        for node in nodes:
            results = node.operator(self._xp, *(self._value(values, name) for name in node.inputs), **node.attributes)
            values.update(zip(node.outputs, results if len(node.outputs) > 1 else [results], strict=True))
            for name in node.last_uses:
                values.pop(name, None)

    def _prepared_nodes(self, nodes: Sequence[onnx.NodeProto]) -> list[_Node]:
        """All nodes; narrow matrices are widened where they are multiplied with, some rows at a time."""
        made = {node.output[0]: node for node in nodes if node.op_type in _WIDENING}
        return [
            self._narrow_gemm(node, made[node.input[1]])
            if node.op_type == "Gemm" and node.input[1] in made
            else self._prepared(node)
            for node in nodes
            if node.op_type not in _WIDENING
        ]

    def _narrow_gemm(self, node: onnx.NodeProto, made: onnx.NodeProto) -> _Node:
        """``a @ weight.T + c``, where `made` widens the weight."""
        matrix = self._stored[made.input[0]]
        weight = self._cast(matrix) if made.op_type == "Cast" else self._dequantised(made)
        computed = [name for name in made.input if name not in self._stored]

        def multiply(xp: ModuleType, a: Array, *others: Array) -> Array:
            bias = others[len(computed) :]
            product = xp.empty((len(a), matrix.dims[0]), a.dtype)
            for start in range(0, matrix.dims[0], ROWS_AT_ONCE):
                rows = slice(start, min(matrix.dims[0], start + ROWS_AT_ONCE))
                product[:, rows] = a @ weight(xp, rows, *others[: len(computed)]).T
            return product + bias[0] if bias else product

        return _Node(multiply, [node.input[0], *computed, *node.input[2:]], list(node.output), {})

    def _cast(self, matrix: onnx.TensorProto) -> Callable[..., Array]:
        """Makes rows of an FP16 matrix."""
        return lambda xp, rows: self._floats(_read(self._weights, matrix, rows))

    def _dequantised(self, made: onnx.NodeProto) -> Callable[..., Array]:
        """Makes rows of a matrix in blocks of codes, given the zero points if they are computed."""
        codes, scales = (self._stored[name] for name in made.input[:2])
        zeros = self._stored.get(made.input[2])
        block = next(each.i for each in made.attribute if each.name == "block_size")

        def weight(xp: ModuleType, rows: slice, *computed: Array) -> Array:
            centres = _read(self._weights, zeros, rows) if zeros is not None else computed[0][rows]
            scale = self._floats(_read(self._weights, scales, rows))
            stored = _read(self._weights, codes, rows)
            return dequantize_linear(xp, stored, scale, centres, axis=1, block_size=block)

        return weight

    def _prepared(self, node: onnx.NodeProto) -> _Node:
        if node.domain or node.op_type not in OPERATORS:
            raise EngineError(f"the reference engine has no operator {node.domain}.{node.op_type} ({node.name})")
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        return _Node(OPERATORS[node.op_type], list(node.input), list(node.output), attributes)

    def _value(self, values: dict[str, Any], name: str) -> Any:
        if not name:
            return None  # an input that is absent, before others
        if name in values:
            return values[name]
        value = _read(self._weights, self._stored[name])
        return self._floats(value) if value.dtype == np.float32 else value

    def _floats(self, array: Array) -> Array:
        return self._xp.asarray(array, self._dtype)


class ReferenceEngine(_Interpreter, OneByOne):
    """Engine (see `motley.plugins.engine.Engine`) by interpretation. ``extra``: ``dtype`` = float32 or float64.

    Raises:
        EngineError: an unknown option, or the graph has an operator or collective this engine does not know.
    """

    keeps_fp16 = True

    def __init__(self, graph: RankGraph, collectives: Collectives, options: EngineOptions) -> None:
        unknown = set(options.extra) - {"dtype"}
        if unknown:
            raise EngineError(f"the reference engine has no option {', '.join(sorted(unknown))}; it has: dtype")
        if options.exact:
            raise EngineError(INEXACT)
        dtype = options.extra.get("dtype", "float32")
        if dtype not in ("float32", "float64"):
            raise EngineError(f"the reference engine computes in float32 or float64, not in {dtype!r}")
        self._graph = graph
        self._collectives = collectives
        self._max_rows = options.max_rows
        self._micro_chunks: list[slice] = []
        self._slots: dict[int, _Slot] = {}
        self._rows = (0, graph.hidden)
        """(T, D) of this step."""
        self._widths = {
            value.name: value.type.tensor_type.shape.dim[1].dim_value for value in graph.proto.graph.value_info
        }
        """Of values that cross collectives."""

        super().__init__(onnx.inliner.inline_local_functions(graph.proto).graph, graph.share_file, np.dtype(dtype))

    def open_slot(self, slot: int, prompt: int = 0) -> None:
        if slot in self._slots:
            raise EngineError(f"slot {slot} is open already")
        empty = {}
        for spec in self._graph.caches:
            for kind in ("key", "value"):
                shape = (1, spec.heads, 0, spec.head_dim)
                empty[f"{kind}_cache.{spec.layer}"] = self._xp.zeros(shape, self._dtype)
        constants = {name: self._floats(table) for name, table in self._graph.constants(prompt).items()}
        self._slots[slot] = _Slot(constants, empty, capacity=0, written=0)

    def close_slot(self, slot: int) -> None:
        self._slot(slot)
        del self._slots[slot]

    def skip(self, slot: int, position: int) -> None:
        state = self._slot(slot)
        check_skip(slot, state.written, position, self._graph.context)
        self._make_room(state, position)
        for cache in state.caches.values():
            cache[:, :, state.written : position] = 0
        state.written = position

    def step(self, slot: int, hidden: F32, position: int, rows: Sequence[int], halved: bool = False) -> F32:
        state = self._slot(slot)
        count, width = hidden.shape
        if not 1 <= count <= self._max_rows or width != self._graph.hidden:
            raise EngineError(f"a step takes f32[1..{self._max_rows}, {self._graph.hidden}], not f32[{count}, {width}]")
        if not 0 <= position <= state.written:
            raise EngineError(f"slot {slot} has {state.written} tokens; position {position} is not among or after them")
        if position + count > self._graph.context:
            raise EngineError(f"slot {slot}: {position} + {count} tokens exceed the context of {self._graph.context}")
        if not all(0 <= row < count for row in rows):
            raise EngineError(f"logits of rows {list(rows)} were asked for; the step has {count} rows")
        self._make_room(state, position + count)
        self._rows = count, width
        self._micro_chunks = micro_chunks(count, halved)

        values: dict[str, Any] = {
            **state.constants,
            **state.caches,
            "hidden": self._floats(hidden),
            "position": np.array([position], np.int64),
            "rows": np.array(rows, np.int64),
        }
        self._run(self._nodes, values)

        state.caches = {name: values[f"{name}.out"] for name in state.caches}
        state.written = position + count
        if self._graph.vocabulary == 0:
            return np.zeros((len(rows), 0), np.float32)
        logits: F32 = np.asarray(values["logits"], np.float32)
        return logits

    def close(self) -> None:
        self._slots.clear()

    def _prepared(self, node: onnx.NodeProto) -> _Node:
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        if (node.domain, node.op_type) == (DOMAIN, "DistCollective"):
            kind, ranks = attributes["collective_operation"], attributes["nb_rank"]
            collectives: dict[bytes, Operator] = {b"all_reduce": self._all_reduce, b"all_gather": self._all_gather}
            if kind not in collectives or ranks != self._collectives.size:
                raise EngineError(
                    f"the reference engine cannot do collective {node.name!r}, {kind.decode()} among {ranks} ranks; "
                    f"it does all_reduce and all_gather among {self._collectives.size} ranks"
                )
            gathers = kind == b"all_gather"
            more = {"counts": attributes["counts"], "width": self._widths.get(node.output[0])} if gathers else {}
            return _Node(collectives[kind], list(node.input), list(node.output), more)
        if (node.domain, node.op_type) == (DOMAIN, "Experts"):
            compute = (
                self._computed_here(attributes["experts"])
                if "experts" in attributes
                else as_terms(self._collectives.experts(attributes["layer"]))
            )
            more = {"results": len(node.output), "compute": compute}
            return _Node(self._experts, list(node.input), list(node.output), more)
        return super()._prepared(node)

    def _prepared_expert(self, graph: onnx.GraphProto) -> _Expert:
        nodes = self._prepared_nodes(graph.node)
        results = [output.name for output in graph.output]
        _mark_last_uses(nodes, keep={*results})
        return _Expert(graph.input[0].name, results, nodes)

    def _computed_here(self, graphs: Sequence[onnx.GraphProto]) -> Terms:
        experts = [self._prepared_expert(graph) for graph in graphs]

        def compute(x: Array, sent: Sequence[Sent]) -> Iterator[list[Array]]:
            for own in sent:
                expert = experts[own.expert]
                values = {expert.x: x[own.rows]}
                self._run(expert.nodes, values)
                yield [values[name] for name in expert.results]

        return compute

    def _experts(
        self, xp: ModuleType, x: Array, weights: Array, chosen: Array, *bases: Array, results: int, compute: Terms
    ) -> Array:
        """The weighted sums: an array, or a list where there are several."""
        totals = [base.copy() for base in bases] or [xp.zeros_like(x) for _ in range(results)]
        for chunk in self._micro_chunks:
            add_mixture([total[chunk] for total in totals], x[chunk], weights[chunk], chosen[chunk], compute)
        return totals if results > 1 else totals[0]

    def _all_reduce(self, xp: ModuleType, x: Array) -> Array:
        buffer = np.array(x, np.float32)
        for chunk in self._micro_chunks:
            self._collectives.all_reduce(buffer[chunk])
        return self._floats(buffer)

    def _all_gather(self, xp: ModuleType, *own: Array, counts: Sequence[int], width: int | None) -> Array:
        """The operands of all ranks, by rank: an array, or a list where there are several."""
        rows, hidden = self._rows
        parts = [np.empty((count, rows, width or hidden), np.float32) for count in counts]
        for place, operand in zip(parts[self._collectives.rank], own, strict=True):
            place[...] = operand
        self._collectives.all_gather(parts[self._collectives.rank], parts)
        gathered = [self._floats(term) for part in parts for term in part]
        return gathered if len(gathered) > 1 else gathered[0]

    def _slot(self, slot: int) -> _Slot:
        if slot not in self._slots:
            raise EngineError(f"slot {slot} is not open; open: {sorted(self._slots)}")
        return self._slots[slot]

    def _make_room(self, state: _Slot, tokens: int) -> None:
        if tokens <= state.capacity:
            return
        capacity = grown_capacity(state.capacity, tokens, FIRST_CAPACITY, self._graph.context)
        for name, cache in state.caches.items():
            grown = self._xp.zeros((*cache.shape[:2], capacity, cache.shape[3]), self._dtype)
            grown[:, :, : state.capacity] = cache
            state.caches[name] = grown
        state.capacity = capacity


class ReferenceExperts:
    """Expert engine (see `motley.plugins.expert_engine.ExpertEngine`) by interpretation, in float32.

    Raises:
        EngineError: an option; it has none, nor an exact mode.
    """

    def __init__(self, options: EngineOptions) -> None:
        if options.extra:
            raise EngineError(f"the reference engine has no option {', '.join(sorted(options.extra))} for experts")
        if options.exact:
            raise EngineError(INEXACT)

    def open(self, graph: ExpertGraph) -> ReferenceExpert:
        return ReferenceExpert(graph)

    def close(self) -> None:
        pass


class ReferenceExpert(_Interpreter):
    """See `motley.plugins.expert_engine.Expert`."""

    def __init__(self, graph: ExpertGraph) -> None:
        whole = graph.proto.graph
        super().__init__(whole, graph.share_file, np.dtype(np.float32))
        self._x, self._y = whole.input[0].name, whole.output[0].name

    def __call__(self, x: F32) -> F32:
        values = {self._x: x}
        self._run(self._nodes, values)
        return values[self._y]

    def close(self) -> None:
        self._nodes.clear()
        self._weights = np.empty(0, np.uint8)


@dataclass
class _Slot:
    constants: dict[str, Array]
    caches: dict[str, Array]
    capacity: int
    written: int


@dataclass
class _Node:
    operator: Operator
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]
    last_uses: Sequence[str] = ()
    """Values that no later node reads."""


@dataclass
class _Expert:
    """The graph of one expert: names of what it takes and makes, and what it executes."""

    x: str
    results: list[str]
    nodes: list[_Node]


def _mark_last_uses(nodes: list[_Node], keep: set[str]) -> None:
    seen = set(keep)
    for node in reversed(nodes):
        names = {*node.inputs, *node.outputs} - seen
        node.last_uses = sorted(names)
        seen |= names


def _read(weights: Array, tensor: onnx.TensorProto, rows: slice | None = None) -> Array:
    """An initializer or some of its rows: a view of the share file, or unpacked from it if it is uint4, as uint8."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return numpy_helper.to_array(tensor)
    offset = next(int(entry.value) for entry in tensor.external_data if entry.key == "offset")
    packed = tensor.data_type == TensorProto.UINT4
    dtype = np.dtype(np.uint8) if packed else helper.tensor_dtype_to_np_dtype(tensor.data_type)
    shape = tuple(tensor.dims)
    first, stop = (0, shape[0]) if rows is None else (rows.start, rows.stop)
    row = prod(shape[1:]) * dtype.itemsize // (2 if packed else 1)
    values = weights[offset + first * row : offset + stop * row]
    if packed:
        values = np.stack([values & 0xF, values >> 4], axis=-1)
    return values.view(dtype).reshape(stop - first, *shape[1:])


# ---------------------------------------------------------------- floats


def rms_normalization(xp: ModuleType, x: Array, scale: Array, *, axis: int, epsilon: float) -> Array:
    mean_square = xp.mean(xp.square(x), axis=axis, keepdims=True)
    return x / xp.sqrt(mean_square + x.dtype.type(epsilon)) * scale


def gemm(xp: ModuleType, a: Array, b: Array, c: Array | None = None, *, transB: int) -> Array:
    product = a @ (b.T if transB else b)
    return product if c is None else product + c


def softmax(xp: ModuleType, x: Array, *, axis: int) -> Array:
    powers = xp.exp(x - x.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


def sigmoid(xp: ModuleType, x: Array) -> Array:
    # exp of a non-positive number only, so that nothing overflows.
    decay = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1, decay) / (1 + decay)


def top_k(xp: ModuleType, x: Array, k: Array, *, axis: int, largest: int, sorted: int) -> list[Array]:
    """The largest values and where they are, descending; of equal ones the first."""
    assert (axis, largest, sorted) == (-1, 1, 1)
    places = xp.argsort(-x, axis=-1, kind="stable")[..., : int(k[0])]
    return [xp.take_along_axis(x, places, axis=-1), np.asarray(places, np.int64)]


def swish(xp: ModuleType, x: Array, *, alpha: float = 1.0) -> Array:
    return x * sigmoid(xp, x * x.dtype.type(alpha))


def gelu(xp: ModuleType, x: Array, *, approximate: bytes) -> Array:
    """By the approximation with tanh: ``x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))``."""
    assert approximate == b"tanh"
    inner = x.dtype.type(2 * (2 / np.pi) ** 0.5) * (x + x.dtype.type(0.044715) * x * x * x)
    return x * sigmoid(xp, inner)


def clip(xp: ModuleType, x: Array, low: Array | None = None, high: Array | None = None) -> Array:
    return xp.clip(x, low, high)


def expand(xp: ModuleType, x: Array, dims: Array) -> Array:
    """Broadcast both ways: a dimension of 1 in either is that of the other."""
    return xp.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(dims.tolist())))


def slice_(xp: ModuleType, x: Array, starts: Array, ends: Array, axes: Array) -> Array:
    places = [slice(None)] * x.ndim
    for axis, start, end in zip(axes.tolist(), starts.tolist(), ends.tolist(), strict=True):
        places[axis] = slice(start, end)
    return x[tuple(places)]


def dequantize_linear(
    xp: ModuleType, x: Array, scale: Array, zero_point: Array, *, axis: int, block_size: int
) -> Array:
    assert axis == 1
    values = xp.asarray(x, scale.dtype).reshape(*scale.shape, block_size)  # a copy: codes are integers
    values -= xp.asarray(zero_point, scale.dtype)[..., None]
    values *= scale[..., None]
    return values.reshape(x.shape)


def rotary_embedding(
    xp: ModuleType, x: Array, cos_cache: Array, sin_cache: Array, position_ids: Array, *, rotary_embedding_dim: int
) -> Array:
    """x: f32[B, heads, T, head_dim]; of each head's first elements, as many as the attribute says, one half is rotated
    against the other."""
    cos, sin = cos_cache[position_ids][:, None], sin_cache[position_ids][:, None]
    half = rotary_embedding_dim // 2
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return xp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def tensor_scatter(xp: ModuleType, cache: Array, update: Array, write_indices: Array, *, axis: int) -> Array:
    """A copy of the cache f32[1, heads, C, head_dim] with rows written from an index on."""
    assert axis == 2
    start = int(write_indices[0])
    updated = cache.copy()
    updated[:, :, start : start + update.shape[2]] = update
    return updated


def attention(xp: ModuleType, q: Array, k: Array, v: Array, mask: Array, *, scale: float, softcap: float) -> Array:
    """q: f32[1, heads, T, head_dim], k and v: f32[1, kv_heads, C, head_dim], mask: bool[T, C], true where seen."""
    group = q.shape[1] // k.shape[1]
    keys, values = xp.repeat(k, group, axis=1), xp.repeat(v, group, axis=1)
    products = q @ keys.swapaxes(-1, -2) * q.dtype.type(scale)
    if softcap:
        products = q.dtype.type(softcap) * xp.tanh(products / q.dtype.type(softcap))
    scores = xp.where(xp.asarray(mask), products, -xp.inf)
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ values


# ---------------------------------------------------------------- shapes


def split(xp: ModuleType, x: Array, widths: Array, *, axis: int) -> list[Array]:
    return list(xp.split(x, np.cumsum(widths)[:-1].tolist(), axis=axis))


def shape(xp: ModuleType, x: Array, *, start: int = 0, end: int | None = None) -> Array:
    return np.array(x.shape[start:end], np.int64)


def constant(
    xp: ModuleType,
    *,
    value_int: int | None = None,
    value_ints: list[int] | None = None,
    value_float: float | None = None,
) -> Array:
    if value_float is not None:
        return xp.asarray(value_float, np.float32)
    return np.array(value_ints if value_int is None else value_int, np.int64)


def constant_of_shape(xp: ModuleType, dims: Array, *, value: onnx.TensorProto | None = None) -> Array:
    """Zeros, or a zero point: uint4 values are held as uint8."""
    if value is None:
        return xp.zeros(dims.tolist(), np.float32)
    return np.full(dims.tolist(), int(numpy_helper.to_array(value)[0]), np.uint8)


OPERATORS: dict[str, Operator] = {
    "Add": lambda xp, a, b: a + b,
    "And": lambda xp, a, b: a & b,
    "Attention": attention,
    "Clip": clip,
    "Concat": lambda xp, *inputs, axis: np.concatenate(inputs, axis),
    "Constant": constant,
    "ConstantOfShape": constant_of_shape,
    "DequantizeLinear": dequantize_linear,
    "Div": lambda xp, a, b: a / b,
    "Equal": lambda xp, a, b: a == b,
    "Expand": expand,
    "Gather": lambda xp, x, indices, axis: xp.take(x, indices, axis),
    "GatherElements": lambda xp, x, indices, axis: xp.take_along_axis(x, xp.asarray(indices), axis),
    "Gelu": gelu,
    "Gemm": gemm,
    "GreaterOrEqual": lambda xp, a, b: a >= b,
    "Identity": lambda xp, x: x,
    "Less": lambda xp, a, b: a < b,
    "MatMul": lambda xp, a, b: a @ b,
    "Mul": lambda xp, a, b: a * b,
    "Or": lambda xp, a, b: a | b,
    "RMSNormalization": rms_normalization,
    "Range": lambda xp, start, limit, delta: np.arange(start, limit, delta),
    "ReduceSum": lambda xp, x, axes, keepdims: x.sum(axis=tuple(axes.tolist()), keepdims=bool(keepdims)),
    "ReduceMin": lambda xp, x, axes, keepdims: x.min(axis=tuple(axes.tolist()), keepdims=bool(keepdims)),
    "Reshape": lambda xp, x, dims: x.reshape(dims.tolist()),
    "RotaryEmbedding": rotary_embedding,
    "Shape": shape,
    "Sigmoid": sigmoid,
    "Slice": slice_,
    "Softmax": softmax,
    "Split": split,
    "Sqrt": lambda xp, x: xp.sqrt(x),
    "Squeeze": lambda xp, x: np.squeeze(x),
    "Sub": lambda xp, a, b: a - b,
    "Swish": swish,
    "Tanh": lambda xp, x: xp.tanh(x),
    "TensorScatter": tensor_scatter,
    "TopK": top_k,
    "Transpose": lambda xp, x, perm: x.transpose(perm),
    "Unsqueeze": lambda xp, x, axes: np.expand_dims(x, tuple(axes.tolist())),
    "Where": lambda xp, condition, a, b: xp.where(condition, a, b),
}
"""By ONNX name, each with exactly the attributes that the graphs use."""
