"""The small nodes of a step: norms, what is done to each element, and how rows choose experts."""

from __future__ import annotations

import ctypes
import math

import onnx

from motley.plugins.cuda.adapting import Adapting
from motley.plugins.cuda.device_graph import DeviceGraph
from motley.plugins.cuda.kernels import (
    GATES,
    LAYER_NORM,
    NORM,
    NORM_PART,
    WARP,
    RowSource,
    View,
    integers,
    pointer,
    rows_of,
)
from motley.plugins.cuda.nodes.making import Making
from motley.plugins.cuda.nodes.submission import StepRows
from motley.plugins.engine import Collectives
from motley.plugins.nodes import attributes_of


class SmallNodes(Making):
    """How small nodes become kernels."""

    def __init__(
        self, graph: DeviceGraph, summing: Collectives, step: StepRows, adapting: Adapting | None = None
    ) -> None:
        super().__init__(graph, summing, step, adapting)
        self._unsummed: dict[str, tuple[View, View]] = {}
        """What is added up by the norm that follows, by the name of the sum."""

    def norm(self, node: onnx.NodeProto) -> None:
        """Normalise rows, with what was still to be added up, or groups of their elements."""
        graph, x = self._graph, self._graph.values[node.input[0]]
        (width,) = graph.initializers[node.input[1]].dims
        y, epsilon = self._result(node, x.width), attributes_of(node)["epsilon"]
        centred = node.op_type == "LayerNormalization"
        gain, bias = [*map(graph.address, node.input[1:]), 0][:2]
        if width == x.width:
            a, b = self._unsummed.pop(node.input[0], (x, None))
            made = LAYER_NORM if centred else NORM
            source = RowSource.of(a, made, b, gain, epsilon, None if b is None else x, bias)
            self._make(node.output[0], source, y)
        elif self._count:
            assert node.input[0] not in self._unsummed, "sums are normalised as whole rows"
            assert not bias, "norms of heads have none"
            groups = x.width // width
            threads = self._count * groups * -(-width // NORM_PART) * WARP
            shape = integers(self._count, groups, width, x.is_in_fours and width % 4 == 0, centred)
            own = *rows_of(x), pointer(gain), *rows_of(y)
            graph.launch("norm_groups", threads, *own, *shape, ctypes.c_float(epsilon))

    def multiply(self, node: onnx.NodeProto) -> None:
        """Multiply by a number, by what is the same for every row, by another value, or by what opens a gate, which
        the kernel computes too."""
        graph = self._graph
        if graph.is_number(node.input[1]):
            self._scale(node, factor=self._number(node.input[1]))
            return
        opened = graph.made_by.get(node.input[0])
        if opened is not None and opened.op_type in GATES:
            gate, up = graph.values[opened.input[0]], graph.values[node.input[1]]
            y, alpha = self._result(node, up.width), attributes_of(opened).get("alpha", 1.0)
            if alpha == 1.0:
                self._make(node.output[0], RowSource.of(gate, GATES[opened.op_type], up), y)
                return
            numbers = map(ctypes.c_float, (alpha, math.inf, 0.0))  # bounds are nodes of their own
            given = *rows_of(gate), *rows_of(up), *numbers, *rows_of(y), *integers(self._count, up.width)
            graph.launch("clamped_swish_mul", self._count * up.width, *given)
            return
        self._with_another(node, "multiply")

    def open(self, node: onnx.NodeProto) -> None:
        """Make what would open a gate, where there is none."""
        x = self._graph.values[node.input[0]]
        self._make(node.output[0], RowSource.of(x, GATES[node.op_type]), self._result(node, x.width))

    def divide(self, node: onnx.NodeProto) -> None:
        """Divide rows, each by a number of its own, or element by element."""
        self._with_another(node, "divide")

    def _with_another(self, node: onnx.NodeProto, kernel: str) -> None:
        x, by = map(self._operand, node.input)
        y, size = self._result(node, x.width), integers(self._count, x.width, by.width)
        self._graph.launch(kernel, self._count * x.width, *rows_of(x), *rows_of(by), *rows_of(y), *size)

    def add(self, node: onnx.NodeProto) -> None:
        """Add two values, or to each row the same: a number, or a weight."""
        if self._graph.is_number(node.input[1]):
            self._scale(node, addend=self._number(node.input[1]))
            return
        a, b = map(self._operand, node.input)
        y, size = self._result(node, a.width), integers(self._count, a.width, b.width)
        # In the place of a term, other blocks of the row would still read what one has overwritten.
        alone = y.address not in (a.address, b.address)
        if node.output[0] in self._graph.normalised_sums and alone and b.width == a.width:
            self._unsummed[node.output[0]] = a, b
            return
        self._graph.launch("add", self._count * a.width, *rows_of(a), *rows_of(b), *rows_of(y), *size)

    def _scale(self, node: onnx.NodeProto, factor: float = 1.0, addend: float = 0.0) -> None:
        graph, x = self._graph, self._graph.values[node.input[0]]
        y, numbers = self._result(node, x.width), (ctypes.c_float(factor), ctypes.c_float(addend))
        size = integers(self._count, x.width)
        graph.launch("scale", self._count * x.width, *rows_of(x), *numbers, *rows_of(y), *size)

    def clip(self, node: onnx.NodeProto) -> None:
        low, high = map(self._number, node.input[1:])
        self._bound(node, low, high)

    def least(self, node: onnx.NodeProto) -> None:
        """What is less: an element, or a number."""
        self._bound(node, -math.inf, self._number(node.input[1]))

    def _bound(self, node: onnx.NodeProto, low: float, high: float) -> None:
        graph, x = self._graph, self._graph.values[node.input[0]]
        y, size = self._result(node, x.width), integers(self._count, x.width)
        bounds = ctypes.c_float(low), ctypes.c_float(high)
        graph.launch("clip", self._count * x.width, *rows_of(x), *bounds, *rows_of(y), *size)

    def sigmoid(self, node: onnx.NodeProto) -> None:
        self._map(node, "sigmoid")

    def softplus(self, node: onnx.NodeProto) -> None:
        self._map(node, "softplus")

    def xielu(self, node: onnx.NodeProto) -> None:
        """An activation, by two numbers that are weights."""
        graph, x = self._graph, self._graph.values[node.input[0]]
        y, numbers = self._result(node, x.width), [pointer(graph.address(name)) for name in node.input[1:]]
        graph.launch(
            "xielu", self._count * x.width, *rows_of(x), *numbers, *rows_of(y), *integers(self._count, x.width)
        )

    def gate_streams(self, node: onnx.NodeProto) -> None:
        """How residual streams are read, written to and mixed."""
        graph, rules = self._graph, attributes_of(node)
        x = graph.values[node.input[0]]
        y, weights = self._result(node, x.width), [pointer(graph.address(name)) for name in node.input[1:]]
        size = integers(self._count, x.width, rules["streams"], rules["rounds"])
        numbers = (ctypes.c_float(rules[name]) for name in ("epsilon", "written", "least"))
        graph.launch("stream_gates", self._count, *rows_of(x), *weights, *rows_of(y), *size, *numbers)

    def read_streams(self, node: onnx.NodeProto) -> None:
        """What is read of residual streams, by gates that may be the same for every row."""
        x, gates = map(self._operand, node.input)
        streams = attributes_of(node)["streams"]
        y = self._result(node, x.width // streams)
        size = integers(self._count, y.width, streams)
        self._graph.launch("read_streams", self._count * y.width, *rows_of(x), *rows_of(gates), *rows_of(y), *size)

    def write_streams(self, node: onnx.NodeProto) -> None:
        """Residual streams, each with what it gets of what a block has made, by gates that may be the same for every
        row."""
        graph, streams = self._graph, attributes_of(node)["streams"]
        x, gates, own = map(self._operand, node.input)
        y, size = self._result(node, x.width), integers(self._count, own.width, streams, gates.width > 2 * streams)
        views = (*rows_of(x), *rows_of(gates), *rows_of(own), *rows_of(y))
        graph.launch("write_streams", self._count * own.width, *views, *size)

    def match_streams(self, node: onnx.NodeProto) -> None:
        """Rows as residual streams, each with as much of them as its query fits its key. A warp per row and stream."""
        of = attributes_of(node)
        x, keys, own = map(self._operand, node.input)
        y, size = self._result(node, x.width), integers(self._count, own.width, of["streams"])
        views, scale = (*rows_of(x), *rows_of(keys), *rows_of(own), *rows_of(y)), ctypes.c_float(of["scale"])
        self._graph.launch("match_streams", self._count * of["streams"] * WARP, *views, *size, scale)

    def tanh(self, node: onnx.NodeProto) -> None:
        self._map(node, "bounded")

    def root(self, node: onnx.NodeProto) -> None:
        self._map(node, "root")

    def softmax(self, node: onnx.NodeProto) -> None:
        self._map(node, "softmax", WARP)

    def _map(self, node: onnx.NodeProto, kernel: str, threads: int = 0) -> None:
        """Make rows of rows by a kernel that has so many threads for each; 0: one for each element."""
        graph, x = self._graph, self._graph.values[node.input[0]]
        y, size = self._result(node, x.width), integers(self._count, x.width)
        graph.launch(kernel, self._count * (threads or x.width), *rows_of(x), *rows_of(y), *size)

    # -- routers ------------------------------------------------------------------------------------------------------

    def top_k(self, node: onnx.NodeProto) -> None:
        """The largest elements of each row, and where they are, as i32."""
        graph, x = self._graph, self._graph.values[node.input[0]]
        count = int(self._number(node.input[1]))
        values, where = (graph.buffer(name, count, graph.max_rows) for name in node.output)
        places = pointer(values.address), pointer(where.address)
        graph.launch("top_k", self._tokens * WARP, *rows_of(x), *places, *integers(self._tokens, x.width, count))

    def mix_sparsely(self, node: onnx.NodeProto) -> None:
        """The two experts of each row, as i32, and their weights."""
        graph, x = self._graph, self._graph.values[node.input[0]]
        values, where = (graph.buffer(name, 2, graph.max_rows) for name in node.output)
        places, size = (pointer(values.address), pointer(where.address)), integers(self._tokens, x.width)
        tolerance = ctypes.c_float(attributes_of(node)["tolerance"])
        graph.launch("sparse_mixer", self._tokens, *rows_of(x), *places, *size, tolerance)

    def keep_best_groups(self, node: onnx.NodeProto) -> None:
        """All that decides which groups of experts count, and the scores of the experts of these."""
        graph, found = self._graph, self._graph.groups[node.output[0]]
        x = graph.values[found.scores]
        y, size = self._result(node, x.width), integers(self._tokens, found.groups, x.width // found.groups, found.kept)
        graph.launch("keep_best_groups", self._tokens * found.groups, *rows_of(x), *rows_of(y), *size)

    def gather(self, node: onnx.NodeProto) -> None:
        """The elements of each row, or of what is the same for every row, at places of its own."""
        graph = self._graph
        x, where = self._operand(node.input[0]), graph.values[node.input[1]]
        places = pointer(where.address), pointer(self._result(node, where.width).address)
        count = self._tokens * where.width
        graph.launch("gather", count, *rows_of(x), *places, *integers(self._tokens, where.width))

    def sum_rows(self, node: onnx.NodeProto) -> None:
        graph, x = self._graph, self._graph.values[node.input[0]]
        y = self._result(node, 1)
        graph.launch("sum_row", self._tokens, *rows_of(x), pointer(y.address), *integers(self._tokens, x.width))
