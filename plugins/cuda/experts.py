"""The experts of a layer on the device: tables of their matrices, by which kernels find those that rows have chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx

from motley.plugins.cuda.kernels import Matrix
from motley.plugins.engine import EngineError
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
class LayerExperts:
    """The experts of a layer: each is ``down(swish(gate(x)) * up(x))``, gate and up as one product."""

    gate_up: ExpertTable
    down: ExpertTable


def products_of(body: onnx.GraphProto) -> tuple[onnx.NodeProto, onnx.NodeProto] | None:
    """The two products of an expert's graph; None: it is not made as `LayerExperts` says."""
    made_by = {name: node for node in body.node for name in node.output}
    down = made_by.get(body.output[0].name)
    if down is None or down.op_type != "Gemm":
        return None
    gated = made_by.get(down.input[0])
    if gated is None or gated.op_type != "Mul":
        return None
    swish, split = (made_by.get(name) for name in gated.input)
    if swish is None or split is None or (swish.op_type, split.op_type) != ("Swish", "Split"):
        return None
    gate_up = made_by.get(split.input[0])
    halves = [swish.input[0], gated.input[1]] == list(split.output) and attributes_of(swish).get("alpha", 1.0) == 1.0
    if gate_up is None or gate_up.op_type != "Gemm" or gate_up.input[0] != body.input[0].name or not halves:
        return None
    return gate_up, down


def bodies_of(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs of an ``Experts`` node, by the experts' numbers."""
    return next((list(each.graphs) for each in node.attribute if each.name == "experts"), [])


def unknown_in(node: onnx.NodeProto) -> Iterator[str]:
    """What the engine does not know of an ``Experts`` node."""
    bodies = bodies_of(node)
    if not bodies:
        yield f"{node.domain}.Experts that are on other machines"
    elif any(products_of(body) is None for body in bodies):
        operators = dict.fromkeys(each.op_type for body in bodies for each in body.node)
        yield f"{node.domain}.Experts of {' and '.join(operators)}"


def tables_of(
    node: onnx.NodeProto,
    matrix_of: Callable[[onnx.NodeProto, onnx.GraphProto], Matrix],
    address_of: Callable[[str], int],
    send: Callable[[np.ndarray[tuple[int], np.dtype[np.void]]], int],
) -> LayerExperts:
    """The tables of an ``Experts`` node.

    Args:
        matrix_of: what a product of a body multiplies by.
        address_of: where a weight lies on the device.
        send: takes a table of `ENTRY` to the device, and says where it is.

    Raises:
        EngineError: experts of the layer are held unlike each other.
    """
    tables = []
    bodies = bodies_of(node)
    for which in (0, 1):
        table = np.zeros(len(bodies), ENTRY)
        matrices = []
        for number, body in enumerate(bodies):
            found = products_of(body)
            assert found is not None  # `unknown_in` has refused it
            product = found[which]
            matrix = matrix_of(product, body)
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
    return LayerExperts(*tables)
