"""Executes the nodes of a graph one after another, with weights that stay in their share file or on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from motley.plugins.engine import EngineError
from motley.plugins.mapped_share import nibbles, place_of
from motley.plugins.nodes import OWN_FUNCTIONS, attributes_of
from motley.plugins.reference.device import Array, ArrayModule, Device
from motley.plugins.reference.operators import OPERATORS, Operator, dequantize_linear, head_products

ROWS_AT_ONCE = 4096
"""Rows of a narrow matrix that are widened at a time: a large head would not fit beside an engine."""
_WIDENING = ("Cast", "DequantizeLinear")
_MULTIPLYING = ("Gemm", "HeadProducts")


@dataclass
class Node:
    """A node that is ready to be executed.

    Attributes:
        inputs: the names of the values that it reads.
        outputs: of those that it makes.
        last_uses: of those that no later node reads.
    """

    operator: Operator
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]
    last_uses: Sequence[str] = ()


class Interpreter:
    """A graph whose weights are in a share file, ready to be executed.

    Raises:
        EngineError: the graph has an operator that is not known, or the device has too little memory for the weights.
    """

    def __init__(self, graph: onnx.GraphProto, share_file: Path, dtype: np.dtype[Any], device: Device) -> None:
        """`dtype`: what floats are computed in, float32 or float64."""
        self.device = device
        self._dtype = dtype
        # Mapped once: the file may be unlinked while it is in use.
        empty = share_file.stat().st_size == 0
        mapped = np.empty(0, np.uint8) if empty else np.memmap(share_file, np.uint8, "r")
        self._stored = {tensor.name: tensor for tensor in graph.initializer}
        self._read_before: dict[str, Array] = {}  # no copies of weights: views, and the graph's own constants
        self.nodes = self.prepared_nodes(graph.node, keep={output.name for output in graph.output})
        with device.errors_told():
            self._weights = device.upload(mapped)

    def run(self, nodes: Sequence[Node], values: dict[str, Any]) -> None:
        """Execute nodes on values by name: those that are read later are added, others are forgotten."""
        for node in nodes:
            inputs = (self._value(values, name) for name in node.inputs)
            results = node.operator(self.device.xp, *inputs, **node.attributes)
            values.update(zip(node.outputs, results if len(node.outputs) > 1 else [results], strict=True))
            for name in node.last_uses:
                values.pop(name, None)

    def floats(self, array: Array) -> Array:
        """An array's values on the device, in the floats that are computed in; the array itself if it is like that."""
        return self.device.xp.asarray(array, self._dtype)

    def prepared_nodes(self, nodes: Sequence[onnx.NodeProto], keep: set[str]) -> list[Node]:
        """All nodes of a graph, made ready; narrow matrices are widened where they are multiplied with, by rows.

        Args:
            keep: the names of the graph's results.
        """
        made = {node.output[0]: node for node in nodes if node.op_type in _WIDENING and node.input[0] in self._stored}
        prepared = [
            self._narrow(node, made[node.input[1]])
            if node.op_type in _MULTIPLYING and node.input[1] in made
            else self.prepared(node)
            for node in nodes
            if node.output[0] not in made
        ]
        _mark_last_uses(prepared, keep)
        return prepared

    def prepared(self, node: onnx.NodeProto) -> Node:
        """A node, made ready."""
        if node.op_type == "Cast":
            return Node(lambda xp, x: self.floats(x), list(node.input), list(node.output), {})
        if (node.domain and node.op_type not in OWN_FUNCTIONS) or node.op_type not in OPERATORS:
            raise EngineError(f"the reference engine has no operator {node.domain}.{node.op_type} ({node.name})")
        return Node(OPERATORS[node.op_type], list(node.input), list(node.output), attributes_of(node))

    def close(self) -> None:
        """Let go of the weights; nothing can be executed any more."""
        self.nodes.clear()
        self._read_before.clear()
        self._weights = np.empty(0, np.uint8)

    def _narrow(self, node: onnx.NodeProto, made: onnx.NodeProto) -> Node:
        """``a @ weight.T + c``, or products of heads, where `made` widens the weight."""
        matrix = self._stored[made.input[0]]
        weight = self._cast(matrix) if made.op_type == "Cast" else self._dequantised(made)
        computed = [name for name in made.input if name not in self._stored]

        def multiply_heads(xp: ArrayModule, a: Array, *others: Array) -> Array:
            whole = weight(xp, slice(0, matrix.dims[0]), *others)
            return head_products(xp, a, whole, **attributes_of(node))

        def multiply(xp: ArrayModule, a: Array, *others: Array) -> Array:
            bias = others[len(computed) :]
            product = xp.empty((len(a), matrix.dims[0]), a.dtype)
            for start in range(0, matrix.dims[0], ROWS_AT_ONCE):
                rows = slice(start, min(matrix.dims[0], start + ROWS_AT_ONCE))
                product[:, rows] = a @ weight(xp, rows, *others[: len(computed)]).T
            return product + bias[0] if bias else product

        chosen = multiply if node.op_type == "Gemm" else multiply_heads
        return Node(chosen, [node.input[0], *computed, *node.input[2:]], list(node.output), {})

    def _cast(self, matrix: onnx.TensorProto) -> Callable[..., Array]:
        """Makes rows of an FP16 matrix."""
        return lambda xp, rows: self.floats(self._read(matrix, rows))

    def _dequantised(self, made: onnx.NodeProto) -> Callable[..., Array]:
        """Makes rows of a matrix in blocks of codes, given the zero points if they are computed."""
        codes, scales = (self._stored[name] for name in made.input[:2])
        zeros = self._stored.get(made.input[2])
        block = attributes_of(made)["block_size"]

        def weight(xp: ArrayModule, rows: slice, *computed: Array) -> Array:
            centres = self._read(zeros, rows) if zeros is not None else computed[0][rows]
            scale = self.floats(self._read(scales, rows))
            return dequantize_linear(xp, self._read(codes, rows), scale, centres, axis=1, block_size=block)

        return weight

    def _value(self, values: dict[str, Any], name: str) -> Any:
        if name in values:
            return values[name]
        value = self._read_before.get(name)
        if value is None:
            tensor = self._stored[name]
            value = self._read(tensor)
            if tensor.data_type != TensorProto.UINT4:
                self._read_before[name] = value
        return self.floats(value) if value.dtype == np.float32 else value

    def _read(self, tensor: onnx.TensorProto, rows: slice | None = None) -> Array:
        """An initializer or some of its rows. What is in the share file is a view of it on the device, or unpacked from
        it if it is uint4, as uint8; what is in the graph itself is on the host."""
        if tensor.data_location != TensorProto.EXTERNAL:
            return numpy_helper.to_array(tensor)
        offset, _ = place_of(tensor)
        packed = tensor.data_type == TensorProto.UINT4
        dtype = np.dtype(np.uint8) if packed else helper.tensor_dtype_to_np_dtype(tensor.data_type)
        shape = tuple(tensor.dims)
        first, stop = (0, shape[0]) if rows is None else (rows.start, rows.stop)
        row = prod(shape[1:]) * dtype.itemsize // (2 if packed else 1)
        values = self._weights[offset + first * row : offset + stop * row]
        if packed:
            values = nibbles(values, self.device.xp)
        return values.view(dtype).reshape(stop - first, *shape[1:])


def _mark_last_uses(nodes: list[Node], keep: set[str]) -> None:
    seen = set(keep)
    for node in reversed(nodes):
        names = {*node.inputs, *node.outputs} - seen
        node.last_uses = sorted(names)
        seen |= names
