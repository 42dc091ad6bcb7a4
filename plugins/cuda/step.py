"""Submits the nodes of a rank's graph to the stream: each as a kernel or a few, or as a sum over all ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
from onnx import numpy_helper

from motley.plugins.adapters import ADAPTED
from motley.plugins.cuda.adapting import Adapting, runs_of
from motley.plugins.cuda.cublas import Gemm
from motley.plugins.cuda.device_graph import DeviceGraph
from motley.plugins.cuda.experts import ExpertTable, Glu, unknown_in
from motley.plugins.cuda.kernels import (
    HEADS,
    MOST_PARTS,
    NORM_PART,
    PLACE,
    ROWS,
    TOKENS,
    WARP,
    Coded,
    Matrix,
    View,
    integers,
    parts_of,
    pointer,
    rows_of,
)
from motley.plugins.engine import DOMAIN, SCALES, Collectives
from motley.plugins.known_nodes import ANY, KNOWN, check_known
from motley.plugins.nodes import attributes_of

FEW_ROWS = 32
"""Rows that are never multiplied by cuBLAS, which may round a row otherwise in other company (1e-7)."""


ROUTED: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("", "Div"): {},
    ("", "GatherElements"): {"axis": 1},
    ("", "ReduceSum"): {"keepdims": 1},
    ("", "Sigmoid"): {},
    ("", "Softmax"): {"axis": -1},
    ("", "TopK"): {"axis": -1, "largest": 1, "sorted": 1},
    (DOMAIN, "CachedAttentionWithSinks"): KNOWN[DOMAIN, "CachedAttention"],
    (DOMAIN, "Experts"): {"experts": ANY},
}
"""Nodes of routers, experts and sinks, which other engines on GPUs do not know: see `known_nodes.KNOWN`."""


def submitted_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes of a graph that are submitted in a step: all but those whose work another one does.

    These lead to a weight, to a shape, or from a swish to the product that is part of its kernel.

    Raises:
        EngineError: there is no kernel for one.
    """
    check_known("cuda", graph, ROUTED, unknown_in)
    constants = {tensor.name for tensor in graph.initializer}
    folded = ("Cast", "Concat", "DequantizeLinear", "Shape", "Swish")
    return [
        node
        for node in graph.node
        if node.op_type not in folded and not (node.op_type == "ConstantOfShape" and node.input[0] in constants)
    ]


def rows_that_attend_together(sees: Sequence[int], window: int, room: int) -> list[tuple[slice, int]]:
    """Cut the rows of a step into those whose attention is submitted together.

    Args:
        sees: how many positions each row sees, without the window.
        window: how many it sees at most; 0: all.
        room: how many parts of rows there is memory for, at least `MOST_PARTS`.

    Returns:
        Slices of rows, each with the most parts that one of its rows has; by all of the slice they fit into the room.
    """
    together = []
    start = most = 0
    for row, positions in enumerate(sees):
        parts = parts_of(min(positions, window) if window else positions)
        if max(most, parts) * (row + 1 - start) > room:
            together.append((slice(start, row), most))
            start, most = row, 0
        most = max(most, parts)
    return [*together, (slice(start, len(sees)), most)]


def submit_nodes(
    graph: DeviceGraph,
    summing: Collectives,
    places: int,
    sees: Sequence[int],
    rows: list[int],
    chunks: Sequence[slice],
    adapting: Adapting | None,
) -> None:
    """Submit all nodes of a step, from ``hidden`` to ``logits``.

    Args:
        summing: what sums go through.
        places: the address of the `PLACE` of every row.
        sees: how many positions each of the T rows of ``hidden`` sees, or more.
        rows: those that get logits.
        chunks: the micro-chunks that sums are cut in.
        adapting: what adapters add to products; None: no row has one.
    """
    step = _Step(graph, summing, places, sees, rows, chunks, adapting)
    for node in graph.nodes:
        _SUBMITTERS[node.domain, node.op_type](step, node)


class _Step:
    """One step being submitted: how each node of the graph becomes kernels."""

    def __init__(
        self,
        graph: DeviceGraph,
        summing: Collectives,
        places: int,
        sees: Sequence[int],
        rows: list[int],
        chunks: Sequence[slice],
        adapting: Adapting | None,
    ) -> None:
        self._graph = graph
        self._summing = summing
        self._chunks = chunks
        self._adapting = adapting
        self._places = places
        self._sees = sees
        self._tokens = len(sees)
        self._rows = rows
        self._in_head = False
        self._held: dict[tuple[Coded, int], str] = {}
        """The value that is quantised in the place for such products, by the rows that the place has."""
        self._attending: dict[int, list[tuple[slice, int]]] = {}
        """See `rows_that_attend_together`, by windows."""

    @property
    def _count(self) -> int:
        """How many rows the node at hand computes: those of the step, or in the head those that get logits."""
        return len(self._rows) if self._in_head else self._tokens

    def _result(self, node: onnx.NodeProto, width: int) -> View:
        graph = self._graph
        return graph.buffer(node.output[0], width, graph.head_rows if self._in_head else graph.max_rows)

    def gemm(self, node: onnx.NodeProto) -> None:
        graph, x = self._graph, self._graph.values[node.input[0]]
        matrix, count = graph.matrices[node.input[1]], self._count
        together = min(matrix.run, 4)  # floats of a row are read so
        assert x.stride % together == 0 == x.address % (4 * together)
        if not count:
            return
        y = self._result(node, matrix.outputs)
        bias = graph.address(node.input[2]) if len(node.input) > 2 else 0
        if graph.gemm is not None and count > FEW_ROWS:
            self._multiply_many(graph.gemm, self._rounded(node.input[0], x, matrix), matrix, y)
            if bias:
                size = integers(count, matrix.outputs)
                graph.launch("add", count * matrix.outputs, *rows_of(y), *rows_of(View(bias, 0, 0)), *rows_of(y), *size)
            return
        tokens = next((each for each in TOKENS if each >= count), TOKENS[-1])
        groups = -(-count // tokens)
        if (coded := matrix.coded) is not None:
            graph.launch(
                coded.products(tokens, bool(matrix.zeros)),
                -(-matrix.outputs // coded.rows(tokens)) * groups * WARP,
                pointer(self._quantised(node.input[0], x, coded, count, self._few_rows)),
                *integers(coded.stretches),
                *map(pointer, (matrix.weights, matrix.scales, matrix.zeros, bias)),
                *rows_of(y),
                *integers(count, matrix.outputs, coded.row_bytes, coded.block_shift, matrix.columns >> matrix.shift),
            )
            return
        warps = -(-matrix.outputs // ROWS[tokens]) * groups
        graph.launch(
            f"matmul_{matrix.kind}_{tokens}",
            warps * WARP,
            *(*rows_of(x), pointer(matrix.weights), pointer(bias), *rows_of(y)),
            *integers(count, matrix.outputs, matrix.columns),
        )

    def adapt(self, node: onnx.NodeProto) -> None:
        """Add what adapters make of the rows to a product, in its place."""
        x, y = (self._graph.values[name] for name in node.input)
        self._graph.values[node.output[0]] = y
        if self._adapting is not None:
            for index, row, count in runs_of(self._rows) if self._in_head else [(0, 0, self._tokens)]:
                places = self._places + PLACE.itemsize * row
                self._adapting.submit(node, x.after(index), y.after(index), places, count)

    @property
    def _few_rows(self) -> int:
        """The most rows that our own kernels multiply by matrices that are not of experts."""
        graph = self._graph
        return graph.max_rows if graph.gemm is None else min(FEW_ROWS, graph.max_rows)

    def _quantised(self, name: str, x: View, coded: Coded, count: int, room: int) -> int:
        """The address of a value's rows, quantised for products by such codes, in a place for `room` of them; several
        products have the same value."""
        graph = self._graph
        there = graph.buffer(f"quantised for {coded}", -(-coded.token_bytes // 4), room)
        if self._held.get((coded, room)) != name:
            self._held[coded, room] = name
            shape = integers(count, coded.columns, coded.shift, coded.stretches)
            threads = count * coded.quantising_threads
            graph.launch(coded.quantise, threads, *rows_of(x), pointer(there.address), *shape)
        return there.address

    def _rounded(self, name: str, x: View, matrix: Matrix) -> View:
        """The rows that a matrix is multiplied by, as floats: by codes they are multiplied in 8 bits in any company."""
        graph, coded = self._graph, matrix.coded
        if coded is None:
            return x
        codes = self._quantised(name, x, coded, self._count, graph.max_rows)
        rounded = graph.buffer(f"rounded for {coded}", matrix.columns, graph.max_rows)
        places = pointer(codes), *integers(coded.stretches), pointer(rounded.address)
        size = integers(self._count, matrix.columns)
        graph.launch(f"dequantise_int{coded.bits}", self._count * matrix.columns, *places, *size)
        return rounded

    def _multiply_many(self, gemm: Gemm, x: View, matrix: Matrix, y: View) -> None:
        """Multiply by cuBLAS: by the whole matrix if it is float32, else by as many of its rows at a time as fit the
        scratch memory when they are widened."""
        graph, columns, widened = self._graph, matrix.columns, not matrix.is_fp32
        most = max(1, graph.scratch_bytes // (4 * columns)) if widened else matrix.outputs
        for start in range(0, matrix.outputs, most):
            outputs = min(most, matrix.outputs - start)
            weights = matrix.weights + 4 * start * columns
            if widened:
                weights = graph.scratch
                graph.launch(
                    f"widen_{matrix.kind}",
                    outputs * (columns // matrix.run),
                    *map(pointer, (matrix.weights, matrix.scales, matrix.zeros, weights)),
                    *integers(start, outputs, columns, matrix.shift),
                )
            gemm.multiply(x.address, x.stride, weights, y.address + 4 * start, y.stride, self._count, outputs, columns)

    def norm(self, node: onnx.NodeProto) -> None:
        graph, x = self._graph, self._graph.values[node.input[0]]
        (width,) = graph.initializers[node.input[1]].dims
        y, groups = self._result(node, x.width), x.width // width
        if self._count:
            graph.launch(
                "rms_norm",
                self._count * groups * -(-width // NORM_PART) * WARP,
                *rows_of(x),
                pointer(graph.address(node.input[1])),
                *rows_of(y),
                *integers(self._count, groups, width),
                ctypes.c_float(attributes_of(node)["epsilon"]),
            )

    def reshape(self, node: onnx.NodeProto) -> None:
        """Nothing to compute: heads are told apart or joined, and the rows stay as they are."""
        self._graph.values[node.output[0]] = self._graph.values[node.input[0]]

    def split(self, node: onnx.NodeProto) -> None:
        graph, x = self._graph, self._graph.values[node.input[0]]
        start = 0
        for name, width in zip(
            node.output, numpy_helper.to_array(graph.initializers[node.input[1]]).tolist(), strict=True
        ):
            graph.values[name] = View(x.address + 4 * start, width, x.stride)
            start += width

    def attention(self, node: onnx.NodeProto) -> None:
        graph, attributes = self._graph, attributes_of(node)
        q, k, v = (graph.values[name] for name in node.input[:3])
        heads, kv_heads, width = (attributes[name] for name in ("q_heads", "kv_heads", "head_dim"))
        shape, window = integers(heads, kv_heads, width), attributes["window"]
        kept, own = graph.blocks.format, int(bool(graph.blocks.windowed and window))
        arrays = [array for name in node.input[3:5] for array in (name, f"{name}{SCALES}")]
        caches = [*(pointer(graph.caches.get(name, 0)) for name in arrays), *integers(own, graph.blocks.tokens)]
        threads = self._tokens * (heads + 2 * kv_heads) * WARP
        places, count = pointer(self._places), integers(self._tokens)
        graph.launch(f"rotate_{kept}", threads, *rows_of(q), *rows_of(k), *rows_of(v), places, *caches, *count, *shape)
        # Room for all rows in one part, or for those of several sequences in many.
        room = max(graph.max_rows, min(FEW_ROWS, graph.max_rows) * MOST_PARTS)
        partials = pointer(graph.buffer(f"partials of {heads} heads", heads * (2 + width), room).address)
        y = self._result(node, heads * width)
        sinks = pointer(graph.address(node.input[8]) if node.op_type == "CachedAttentionWithSinks" else 0)
        if window not in self._attending:
            self._attending[window] = rows_that_attend_together(self._sees, window, room)
        for rows, parts in self._attending[window]:
            count = integers(rows.stop - rows.start)
            places = pointer(self._places + PLACE.itemsize * rows.start)
            graph.launch(
                f"attend_{next(each for each in HEADS if width <= each)}_{kept}",
                (rows.stop - rows.start) * heads * parts * WARP,
                *rows_of(q.after(rows.start)),
                places,
                *caches,
                partials,
                *count,
                *shape,
                ctypes.c_float(attributes["scale"]),
                *integers(window, parts),
            )
            graph.launch(
                "combine",
                (rows.stop - rows.start) * heads * width,
                partials,
                sinks,
                *rows_of(y.after(rows.start)),
                places,
                *count,
                *integers(heads, width, window, parts),
            )

    def multiply(self, node: onnx.NodeProto) -> None:
        """Multiply by a number, or by a swish, which the kernel computes too."""
        graph = self._graph
        if node.input[1] in graph.initializers:
            self._scale(node, factor=self._number(node.input[1]))
            return
        if graph.made_by[node.input[1]].op_type == "Sigmoid":
            x, by = (graph.values[name] for name in node.input)
            y, size = self._result(node, x.width), integers(self._tokens, x.width, by.width)
            graph.launch("multiply", self._tokens * x.width, *rows_of(x), *rows_of(by), *rows_of(y), *size)
            return
        swish = graph.made_by[node.input[0]]
        gate, up = graph.values[swish.input[0]], graph.values[node.input[1]]
        y = self._result(node, up.width)
        size = integers(self._tokens, up.width)
        graph.launch("swish_mul", self._tokens * up.width, *rows_of(gate), *rows_of(up), *rows_of(y), *size)

    def add(self, node: onnx.NodeProto) -> None:
        """Add two values, or to each row the same: a number, or a weight."""
        graph = self._graph
        other = graph.initializers.get(node.input[1])
        if other is not None and other.data_location != onnx.TensorProto.EXTERNAL:
            self._scale(node, addend=self._number(node.input[1]))
            return
        a = graph.values[node.input[0]]
        b = graph.values[node.input[1]] if other is None else View(graph.address(other.name), a.width, 0)
        y = self._result(node, a.width)
        size = integers(self._tokens, a.width)
        graph.launch("add", self._tokens * a.width, *rows_of(a), *rows_of(b), *rows_of(y), *size)

    # -- routers and experts ------------------------------------------------------------------------------------------

    def _number(self, name: str) -> float:
        return float(numpy_helper.to_array(self._graph.initializers[name]).item())

    def _scale(self, node: onnx.NodeProto, factor: float = 1.0, addend: float = 0.0) -> None:
        graph, x = self._graph, self._graph.values[node.input[0]]
        y, numbers = self._result(node, x.width), (ctypes.c_float(factor), ctypes.c_float(addend))
        size = integers(self._count, x.width)
        graph.launch("scale", self._count * x.width, *rows_of(x), *numbers, *rows_of(y), *size)

    def sigmoid(self, node: onnx.NodeProto) -> None:
        self._map(node, "sigmoid", self._graph.values[node.input[0]].width)

    def softmax(self, node: onnx.NodeProto) -> None:
        self._map(node, "softmax", WARP)

    def _map(self, node: onnx.NodeProto, kernel: str, threads: int) -> None:
        """Make rows of rows by a kernel that has so many threads for each."""
        graph, x = self._graph, self._graph.values[node.input[0]]
        y, size = self._result(node, x.width), integers(self._tokens, x.width)
        graph.launch(kernel, self._tokens * threads, *rows_of(x), *rows_of(y), *size)

    def top_k(self, node: onnx.NodeProto) -> None:
        """The largest elements of each row, and where they are, as i32."""
        graph, x = self._graph, self._graph.values[node.input[0]]
        count = int(self._number(node.input[1]))
        values, where = (graph.buffer(name, count, graph.max_rows) for name in node.output)
        places = pointer(values.address), pointer(where.address)
        graph.launch("top_k", self._tokens * WARP, *rows_of(x), *places, *integers(self._tokens, x.width, count))

    def gather(self, node: onnx.NodeProto) -> None:
        graph = self._graph
        x, where = (graph.values[name] for name in node.input)
        places = pointer(where.address), pointer(self._result(node, where.width).address)
        count = self._tokens * where.width
        graph.launch("gather", count, *rows_of(x), *places, *integers(self._tokens, where.width))

    def sum_rows(self, node: onnx.NodeProto) -> None:
        graph, x = self._graph, self._graph.values[node.input[0]]
        y = self._result(node, 1)
        graph.launch("sum_row", self._tokens, *rows_of(x), pointer(y.address), *integers(self._tokens, x.width))

    def divide(self, node: onnx.NodeProto) -> None:
        """Divide rows, each by a number of its own."""
        graph = self._graph
        x, by = (graph.values[name] for name in node.input)
        assert by.width == by.stride == 1
        y, size = self._result(node, x.width), integers(self._tokens, x.width)
        graph.launch("divide", self._tokens * x.width, *rows_of(x), pointer(by.address), *rows_of(y), *size)

    def experts(self, node: onnx.NodeProto) -> None:
        """What a row's experts make of it, weighted and added up. A row is as many tokens as it has experts."""
        graph, layer = self._graph, self._graph.experts[node.output[0]]
        x, weights, chosen = (graph.values[name] for name in node.input[:3])
        count = weights.width
        tokens, room = self._tokens * count, graph.max_rows * count
        wide = layer.gate_up.matrix.outputs
        both = graph.buffer(f"{node.output[0]}.gate_up", wide, room)
        self._multiply_chosen(node.input[0], x, count, layer.gate_up, chosen, both)
        gate, up = View(both.address, wide // 2, wide), View(both.address + 2 * wide, wide // 2, wide)
        gated = graph.buffer(f"{node.output[0]}.gated", wide // 2, room)
        glu = layer.glu
        numbers = [] if glu == Glu() else [*map(ctypes.c_float, (glu.alpha, glu.limit, glu.addend))]
        graph.launch(
            "clamped_swish_mul" if numbers else "swish_mul",
            tokens * gated.width,
            *(*rows_of(gate), *rows_of(up), *numbers, *rows_of(gated)),
            *integers(tokens, gated.width),
        )
        results = graph.buffer(f"{node.output[0]}.results", graph.hidden, room)
        self._multiply_chosen(f"{node.output[0]}.gated", gated, 1, layer.down, chosen, results)
        base = graph.values[node.input[3]] if len(node.input) > 3 else View(0, 0, 0)
        y = self._result(node, graph.hidden)
        graph.launch(
            "mix",
            self._tokens * graph.hidden,
            *map(pointer, (results.address, weights.address, chosen.address)),
            *(*rows_of(base), *rows_of(y)),
            *integers(self._tokens, count, graph.hidden),
        )

    def _multiply_chosen(self, name: str, x: View, sharing: int, table: ExpertTable, chosen: View, y: View) -> None:
        """Multiply each token by the matrix that it has chosen; `sharing` of them have a row of x."""
        graph, matrix, tokens = self._graph, table.matrix, self._tokens * chosen.width
        found = pointer(table.address), pointer(chosen.address)
        if (coded := matrix.coded) is not None:
            room = graph.max_rows * chosen.width // sharing
            graph.launch(
                f"expert_{coded.products(1, bool(matrix.zeros))}",
                -(-matrix.outputs // coded.rows(1)) * tokens * WARP,
                pointer(self._quantised(name, x, coded, tokens // sharing, room)),
                *(*integers(coded.stretches, sharing), *found, *rows_of(y)),
                *integers(tokens, matrix.outputs, coded.row_bytes, coded.block_shift, matrix.columns >> matrix.shift),
            )
            return
        graph.launch(
            f"expert_matmul_{matrix.kind}_1",
            -(-matrix.outputs // ROWS[1]) * tokens * WARP,
            *(*rows_of(x), *integers(sharing), *found, *rows_of(y)),
            *integers(tokens, matrix.outputs, matrix.columns),
        )

    def zeros(self, node: onnx.NodeProto) -> None:
        """Make zeros: the partial sum of a rank without units."""
        graph = self._graph
        graph.fill(self._result(node, graph.hidden).address, self._tokens * graph.hidden)

    def choose_rows(self, node: onnx.NodeProto) -> None:
        graph, x = self._graph, self._graph.values[node.input[0]]
        self._in_head = True
        if self._rows == list(range(self._tokens)):
            graph.values[node.output[0]] = x
        else:
            y = self._result(node, x.width)
            for index, row in enumerate(self._rows):
                source, target = x.address + 4 * row * x.stride, y.address + 4 * index * y.stride
                graph.stream.driver.copy(target, source, 4 * x.width, graph.stream.handle)

    def all_reduce(self, node: onnx.NodeProto) -> None:
        """Sum in place: no other node reads the partial sum."""
        graph = self._graph
        partial = graph.values[node.output[0]] = graph.values[node.input[0]]
        for chunk in self._chunks:
            graph.all_reduce(partial, chunk, self._summing)


_SUBMITTERS: dict[tuple[str, str], Callable[[_Step, onnx.NodeProto], None]] = {
    ("", "Add"): _Step.add,
    ("", "Div"): _Step.divide,
    ("", "GatherElements"): _Step.gather,
    ("", "ReduceSum"): _Step.sum_rows,
    ("", "Sigmoid"): _Step.sigmoid,
    ("", "Softmax"): _Step.softmax,
    ("", "TopK"): _Step.top_k,
    (DOMAIN, "Experts"): _Step.experts,
    ("", "ConstantOfShape"): _Step.zeros,
    ("", "Gather"): _Step.choose_rows,
    ("", "Gemm"): _Step.gemm,
    ("", "Mul"): _Step.multiply,
    ("", "RMSNormalization"): _Step.norm,
    ("", "Reshape"): _Step.reshape,
    ("", "Split"): _Step.split,
    (DOMAIN, ADAPTED): _Step.adapt,
    (DOMAIN, "CachedAttention"): _Step.attention,
    (DOMAIN, "CachedAttentionWithSinks"): _Step.attention,
    (DOMAIN, "DistCollective"): _Step.all_reduce,
}
