"""The experts of a layer on the device: tables of their matrices, by which kernels find those that rows have chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import onnx

from motley.plugins.cuda.kernels import GATES, Matrix, View
from motley.plugins.engine import EngineError
from motley.plugins.known_nodes import Numbers
from motley.plugins.nodes import attributes_of

ENTRY = np.dtype([("weights", "u8"), ("scales", "u8"), ("zeros", "u8"), ("bias", "u8")])
"""`ExpertMatrix` in the source."""


@dataclass(frozen=True)
class ExpertTable:
    """One matrix of every expert of a layer.

    Attributes:
        matrix: that of the first expert; those of the others are as large, and held alike.
        address: of an `ENTRY` for each expert, on the device.
    """

    matrix: Matrix
    address: int


@dataclass(frozen=True)
class Glu:
    """How an expert's gate and up are multiplied: ``swish(min(gate, limit)) * (clamp(up, limit) + addend)``, where a
    swish is ``g * sigmoid(alpha * g)``; or without limits by what another operator makes of the gate.

    Attributes:
        opens: the operator that opens the gate.
        alone: the gate is the up, too.
    """

    opens: str = "Swish"
    alone: bool = False
    alpha: float = 1.0
    limit: float = math.inf
    addend: float = 0.0

    @property
    def is_clamped(self) -> bool:
        return self != Glu(self.opens, self.alone)


@dataclass(frozen=True)
class LayerExperts:
    """The experts of a layer: each is ``down(glu(gate(x), up(x)))``, gate and up as one product, or the same."""

    gate_up: ExpertTable
    down: ExpertTable
    glu: Glu


@dataclass(frozen=True)
class HeadMatrices:
    """A matrix for each head of a value. Kernels take heads for tokens that have chosen an expert each.

    Attributes:
        chosen: i32[max_rows, heads] on the device: the number of each head.
    """

    table: ExpertTable
    chosen: View


class Body(NamedTuple):
    """What an expert's graph is made of."""

    gate_up: onnx.NodeProto
    down: onnx.NodeProto
    glu: Glu


def body_of(graph: onnx.GraphProto, numbers: Numbers) -> Body | None:
    """Read an expert's graph; None: it is not made as `LayerExperts` says."""
    made_by = {name: node for node in graph.node for name in node.output}

    def made(name: str, operator: str) -> onnx.NodeProto | None:
        node = made_by.get(name)
        return node if node is not None and node.op_type == operator else None

    down = made(graph.output[0].name, "Gemm")
    gated = made(down.input[0], "Mul") if down is not None else None
    opened = made_by.get(gated.input[0]) if gated is not None else None
    if down is None or gated is None or opened is None or opened.op_type not in GATES:
        return None
    gate, up, limits, addend = opened.input[0], gated.input[1], list[float | None](), 0.0
    if (least := made(gate, "Min")) is not None:
        gate, limits = least.input[0], [numbers(least.input[1])]
    if (added := made(up, "Add")) is not None:
        up, addend = added.input[0], numbers(added.input[1]) or math.nan
    if (clip := made(up, "Clip")) is not None:
        up, low = clip.input[0], numbers(clip.input[1])
        limits += [numbers(clip.input[2]), None if low is None else -low]
    split = None if gate == up else made(gate, "Split")
    gate_up = made(gate if split is None else split.input[0], "Gemm")
    alike = len(limits) in (0, 3) and len(set(limits)) < 2 and None not in limits
    if gate_up is None or not alike or math.isnan(addend) or gate_up.input[0] != graph.input[0].name:
        return None
    if [gate, up] != [*split.output] if split is not None else gate != up:
        return None
    limit = math.inf if not limits else limits[0]
    assert limit is not None
    attributes = attributes_of(opened)
    glu = Glu(opened.op_type, gate == up, attributes.pop("alpha", 1.0), limit, addend)
    known = attributes == ({"approximate": b"tanh"} if glu.opens == "Gelu" else {})
    return Body(gate_up, down, glu) if known and (glu.opens == "Swish" or not glu.is_clamped) else None


def bodies_of(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs of an ``Experts`` node, by the experts' numbers."""
    return next((list(each.graphs) for each in node.attribute if each.name == "experts"), [])


def unknown_in(node: onnx.NodeProto, numbers: Numbers) -> Iterator[str]:
    """What the engine does not know of an ``Experts`` node."""
    graphs = bodies_of(node)
    if not graphs:
        yield f"{node.domain}.Experts that are on other machines"
        return
    bodies = [body_of(graph, numbers) for graph in graphs]
    if None in bodies or len({body.glu for body in bodies if body is not None}) > 1:
        operators = dict.fromkeys(each.op_type for graph in graphs for each in graph.node)
        yield f"{node.domain}.Experts of {' and '.join(operators)}"


def tables_of(
    node: onnx.NodeProto,
    matrix_of: Callable[[onnx.NodeProto, onnx.GraphProto], Matrix],
    address_of: Callable[[str], int],
    send: Callable[[np.ndarray[tuple[int], np.dtype[np.void]]], int],
    numbers: Numbers,
) -> LayerExperts:
    """The tables of an ``Experts`` node that `unknown_in` has no objection to.

    Args:
        matrix_of: what a product of a body multiplies by.
        address_of: where a weight lies on the device.
        send: takes a table of `ENTRY` to the device, and says where it is.

    Raises:
        EngineError: experts of the layer are held unlike each other.
    """
    tables, bodies = [], []
    for graph in bodies_of(node):
        body = body_of(graph, numbers)
        assert body is not None
        bodies.append((graph, body))
    for which in ("gate_up", "down"):
        table = np.zeros(len(bodies), ENTRY)
        matrices = []
        for number, (graph, body) in enumerate(bodies):
            product: onnx.NodeProto = getattr(body, which)
            matrix = matrix_of(product, graph)
            bias = address_of(product.input[2]) if len(product.input) > 2 else 0
            table[number] = matrix.weights, matrix.scales, matrix.zeros, bias
            matrices.append(matrix)
        first = matrices[0]
        shape = first.kind, first.outputs, first.columns, first.shift, bool(first.zeros)
        if any((each.kind, each.outputs, each.columns, each.shift, bool(each.zeros)) != shape for each in matrices):
            raise EngineError(
                f"engine 'cuda' wants all experts of a layer held alike ({node.name}); use engine 'onnxruntime'"
            )
        tables.append(ExpertTable(first, send(table)))
    gate_up, down = tables
    return LayerExperts(gate_up, down, bodies[0][1].glu)


def heads_of(
    matrix: Matrix, heads: int, max_rows: int, send: Callable[[np.ndarray[Any, Any]], int], name: str
) -> HeadMatrices:
    """The matrices of heads, which lie one below the other in one.

    Args:
        send: takes an array to the device, and says where it is.
        name: of the node that multiplies by them.

    Raises:
        EngineError: zero points of two heads share a byte.
    """
    own = replace(matrix, outputs=matrix.outputs // heads)
    blocks = own.outputs * (own.columns >> own.shift)
    bits = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}[own.kind.removeprefix("odd_")]
    sizes = {"weights": own.outputs * own.columns * bits // 8, "scales": 4 * blocks, "zeros": blocks * bits // 8}
    if own.zeros and blocks * bits % 8:
        raise EngineError(f"engine 'cuda' wants whole bytes of zero points for each head ({name})")
    table = np.zeros(heads, ENTRY)
    for which, size in sizes.items():
        if address := getattr(own, which):
            table[which] = address + size * np.arange(heads)
    numbers = np.tile(np.arange(heads, dtype=np.int32), max_rows)
    return HeadMatrices(ExpertTable(own, send(table)), View(send(numbers), heads, heads))
