"""A graph in the making: ONNX nodes, with the small constants and the weights that they read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx
from onnx import TensorProto, helper

from motley.daemon.models.cutting.holding import FLOATS, Formats
from motley.daemon.models.graph.protos import STORED_AS, stored
from motley.daemon.weights.quantise import ZERO_POINT
from motley.daemon.weights.spec import Encoding, Piece, Placed, Weight

LARGEST = 3.4e38
"""What no float32 that counts is above."""


class Emitter:
    """Appends nodes to a graph, and declares what they read.

    Attributes:
        held: how matrices are held, by tensor; what is absent is float32.
        nodes: in the order in which they are computed.
        constants: by name.
        weights: that the share file must have.
        functions: that nodes are calls of, by name.
    """

    def __init__(self, held: Formats) -> None:
        """Begin with nothing."""
        self.held = held
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.weights: list[Weight] = []
        self.functions: dict[str, onnx.FunctionProto] = {}

    def node(self, op: str, inputs: Sequence[str], *outputs: str, domain: str = "", **attributes: Any) -> str:
        """Append a node, named after its first output; returns that."""
        self.nodes.append(helper.make_node(op, inputs, list(outputs), name=outputs[0], domain=domain, **attributes))
        return outputs[0]

    def split(self, x: str, widths: Mapping[str, int]) -> list[str]:
        """Columns of f32[T, N] apart; results are named by the keys of `widths`."""
        self.node("Split", [x, self.integers(widths.values())], *widths, axis=1)
        return list(widths)

    def weight(self, weight: Weight) -> str:
        """Declare an initializer; returns its name."""
        self.weights.append(weight)
        return weight.name

    def matrix(self, name: str, pieces: list[Piece], floats: bool = False) -> str:
        """f32[N, K] of a weight that is held as its pieces' tensors are."""
        held = FLOATS if floats else self.held.get(pieces[0].tensor, FLOATS)
        weight = Weight(name, tuple(pieces), held.encoding, held.block, held.zeros)
        matrix = self.weight(weight)
        if weight.scale_shape is not None:
            return self._dequantised(weight)
        if weight.encoding is not Encoding.FP32:
            return self.node("Cast", [matrix], f"{matrix}.fp32", to=TensorProto.FLOAT)
        return matrix

    def _dequantised(self, weight: Weight) -> str:
        """f32[N, K] of a quantised weight: ``(code - zero_point) * scale``, a scale for each block along K."""
        assert weight.scale_shape is not None
        if weight.zeros:
            zero_point = f"{weight.name}.zero"
        else:
            centre = helper.make_tensor("value", STORED_AS[weight.encoding], [1], [ZERO_POINT[weight.encoding]])
            shape = self.integers(weight.scale_shape)
            zero_point = self.node("ConstantOfShape", [shape], f"{weight.name}.zero_point", value=centre)
        return self.node(
            "DequantizeLinear",
            [weight.name, f"{weight.name}.scale", zero_point],
            f"{weight.name}.dequantised",
            axis=1,
            block_size=weight.block,
        )

    def integers(self, values: Iterable[int]) -> str:
        """A small constant i64 vector, shared by everyone who needs the same."""
        vector = list(values)
        name = "i64." + ".".join(map(str, vector))
        if name not in self.constants:
            self.constants[name] = helper.make_tensor(name, TensorProto.INT64, [len(vector)], vector)
        return name

    def floats(self, *values: float) -> str:
        """A small constant: f32[] if it is one value, else a vector; shared likewise."""
        name = "f32." + ".".join(map(str, values))
        if name not in self.constants:
            shape = [len(values)] if len(values) > 1 else []
            self.constants[name] = helper.make_tensor(name, TensorProto.FLOAT, shape, values)
        return name

    def ones(self, width: int) -> str:
        """A constant f32[width] of ones."""
        name = f"f32.ones.{width}"
        if name not in self.constants:
            self.constants[name] = helper.make_tensor(name, TensorProto.FLOAT, [width], [1.0] * width)
        return name

    def row_of(self, value: float, width: int) -> str:
        """A constant f32[1, width] of equal numbers."""
        name = f"f32.row.{value}.{width}"
        if name not in self.constants:
            self.constants[name] = helper.make_tensor(name, TensorProto.FLOAT, [1, width], [value] * width)
        return name

    def initializers(self, placed: Iterable[Placed]) -> list[onnx.TensorProto]:
        """The constants, and references to the weights where they are in the share file."""
        return [*self.constants.values(), *(tensor for place in placed for tensor in stored(place))]
