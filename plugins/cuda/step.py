"""Submits the nodes of a rank's graph to the stream: each as a kernel or a few, or as a sum over all ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import onnx
from onnx import numpy_helper

from motley.plugins.adapters import ADAPTED
from motley.plugins.cuda.adapting import Adapting, runs_of
from motley.plugins.cuda.cublas import Gemm
from motley.plugins.cuda.device_graph import DeviceGraph
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
from motley.plugins.known_nodes import check_known
from motley.plugins.nodes import attributes_of

FEW_ROWS = 16
"""Rows that are never multiplied by cuBLAS, which may round a row otherwise in other company."""


def submitted_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes of a graph that are submitted in a step: all but those whose work another one does.

    These lead to a weight, to a shape, or from a swish to the product that is part of its kernel.

    Raises:
        EngineError: there is no kernel for one.
    """
    check_known("cuda", graph)
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
        self._held: dict[Coded, str] = {}
        """The value that is quantised in the place for such products."""
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
            self._multiply_many(graph.gemm, x, matrix, y)
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
                pointer(self._quantised(node.input[0], x, coded)),
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
            *rows_of(x),
            *map(pointer, (matrix.weights, matrix.scales, matrix.zeros, bias)),
            *rows_of(y),
            *integers(count, matrix.outputs, matrix.columns, matrix.shift),
        )

    def adapt(self, node: onnx.NodeProto) -> None:
        """Add what adapters make of the rows to a product, in its place."""
        x, y = (self._graph.values[name] for name in node.input)
        self._graph.values[node.output[0]] = y
        if self._adapting is not None:
            for index, row, count in runs_of(self._rows) if self._in_head else [(0, 0, self._tokens)]:
                places = self._places + PLACE.itemsize * row
                self._adapting.submit(node, x.after(index), y.after(index), places, count)

    def _quantised(self, name: str, x: View, coded: Coded) -> int:
        """The address of a value's rows, quantised for products by such codes; several of these have the same value."""
        graph = self._graph
        rows = graph.max_rows if graph.gemm is None else min(FEW_ROWS, graph.max_rows)
        there = graph.buffer(f"quantised for {coded}", -(-coded.token_bytes // 4), rows)
        if self._held.get(coded) != name:
            self._held[coded] = name
            threads = self._count * coded.quantising_threads
            shape = integers(self._count, coded.columns, coded.shift, coded.stretches)
            graph.launch(coded.quantise, threads, *rows_of(x), pointer(there.address), *shape)
        return there.address

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
                *rows_of(y.after(rows.start)),
                places,
                *count,
                *integers(heads, width, window, parts),
            )

    def multiply(self, node: onnx.NodeProto) -> None:
        """Multiply by a swish, which the kernel computes too."""
        graph = self._graph
        swish = graph.made_by[node.input[0]]
        gate, up = graph.values[swish.input[0]], graph.values[node.input[1]]
        y = self._result(node, up.width)
        size = integers(self._tokens, up.width)
        graph.launch("swish_mul", self._tokens * up.width, *rows_of(gate), *rows_of(up), *rows_of(y), *size)

    def add(self, node: onnx.NodeProto) -> None:
        graph = self._graph
        a, b = (graph.values[name] for name in node.input)
        y = self._result(node, a.width)
        size = integers(self._tokens, a.width)
        graph.launch("add", self._tokens * a.width, *rows_of(a), *rows_of(b), *rows_of(y), *size)

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
    ("", "ConstantOfShape"): _Step.zeros,
    ("", "Gather"): _Step.choose_rows,
    ("", "Gemm"): _Step.gemm,
    ("", "Mul"): _Step.multiply,
    ("", "RMSNormalization"): _Step.norm,
    ("", "Reshape"): _Step.reshape,
    ("", "Split"): _Step.split,
    (DOMAIN, ADAPTED): _Step.adapt,
    (DOMAIN, "CachedAttention"): _Step.attention,
    (DOMAIN, "DistCollective"): _Step.all_reduce,
}
