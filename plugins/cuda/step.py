"""Submits the nodes of a rank's graph to the stream: each as a kernel or a few, or as a sum over all ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import onnx

from motley.plugins.adapters import ADAPTED
from motley.plugins.cuda.adapting import Adapting, runs_of
from motley.plugins.cuda.cublas import Gemm
from motley.plugins.cuda.device_graph import DeviceGraph
from motley.plugins.cuda.experts import ExpertTable
from motley.plugins.cuda.kernels import (
    GATES,
    PLACE,
    ROWS,
    TOKENS,
    WARP,
    HeadPart,
    Matrix,
    RowSource,
    View,
    integers,
    pointer,
    rows_of,
)
from motley.plugins.cuda.nodes.attention import AttentionNodes
from motley.plugins.cuda.nodes.choosing import ChoiceNodes
from motley.plugins.cuda.nodes.heads import HeadNodes
from motley.plugins.cuda.nodes.recurrent import RecurrentNodes
from motley.plugins.cuda.nodes.small import SmallNodes
from motley.plugins.cuda.nodes.submission import StepRows
from motley.plugins.engine import DOMAIN, Collectives
from motley.plugins.nodes import CHOSEN, SPARSE_MIXER, XIELU, attributes_of
from motley.plugins.recurrent import DILATED_CONVOLUTION, GATED_DELTA, SHORT_CONVOLUTION, STATE_SPACE
from motley.plugins.streams import MATCH_STREAMS, READ_STREAMS, STREAM_GATES, WRITE_STREAMS

FEW_ROWS = 32
"""Rows that cuBLAS never multiplies by floats, which may round a row otherwise in other company (1e-7)."""


def submit_nodes(graph: DeviceGraph, summing: Collectives, step: StepRows, adapting: Adapting | None) -> None:
    """Submit all nodes of a step, from ``hidden`` to ``logits``.

    Args:
        summing: what sums go through.
        adapting: what adapters add to products; None: no row has one.
    """
    submission = _Step(graph, summing, step, adapting)
    spared = graph.for_choices if max(step.sees) <= graph.all_seen else set()
    for node in graph.nodes:
        if spared.isdisjoint(node.output):
            _SUBMITTERS[node.domain, node.op_type](submission, node)


class _Step(SmallNodes, HeadNodes, AttentionNodes, ChoiceNodes, RecurrentNodes):
    """One step being submitted: how each node of the graph becomes kernels; those that multiply, and sums, are here."""

    def gemm(self, node: onnx.NodeProto) -> None:
        graph, x = self._graph, self._graph.values[node.input[0]]
        matrix, count = graph.matrices[node.input[1]], self._count
        together = min(matrix.run, 4)  # floats of a row are read so
        assert x.stride % together == 0 == x.address % (4 * together)
        if not count:
            return
        y = self._result(node, matrix.outputs)
        bias = graph.address(node.input[2]) if len(node.input) > 2 else 0
        if (coded := matrix.coded) is not None:
            quantise, source = coded.quantise(count), RowSource.of(x)
            graph.launch(
                *coded.product(matrix.outputs, count, bool(matrix.zeros)),
                pointer(self._quantised(node.input[0], source, coded, quantise, count, graph.max_rows)),
                *integers(coded.stretches),
                *map(pointer, (matrix.weights, matrix.scales, matrix.zeros, bias)),
                *rows_of(y),
                *integers(count, matrix.outputs, coded.row_bytes, coded.block_shift, matrix.columns >> matrix.shift),
            )
            return
        if graph.gemm is not None and count > FEW_ROWS:
            self._multiply_many(graph.gemm, x, matrix, y)
            if bias:
                size = integers(count, matrix.outputs, matrix.outputs)
                graph.launch("add", count * matrix.outputs, *rows_of(y), *rows_of(View(bias, 0, 0)), *rows_of(y), *size)
            return
        tokens = next((each for each in TOKENS if each >= count), TOKENS[-1])
        warps = -(-matrix.outputs // ROWS[tokens]) * -(-count // tokens)
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

    def _multiply_many(self, gemm: Gemm, x: View, matrix: Matrix, y: View) -> None:
        """Multiply by cuBLAS: by the whole matrix if it is float32, else by as many of its rows of float16 at a time as
        fit the scratch memory when they are widened."""
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
                    *map(pointer, (matrix.weights, weights)),
                    *integers(start, outputs, columns),
                )
            gemm.multiply(x.address, x.stride, weights, y.address + 4 * start, y.stride, self._count, outputs, columns)

    # -- experts and heads ---------------------------------------------------------------------------------------------

    def experts(self, node: onnx.NodeProto) -> None:
        """What a row's experts make of it, weighted and added up. A row is as many tokens as it has experts."""
        graph, layer = self._graph, self._graph.experts[node.output[0]]
        x, weights, chosen = (graph.values[name] for name in node.input[:3])
        count = weights.width
        tokens, room = self._tokens * count, graph.max_rows * count
        glu, wide = layer.glu, layer.gate_up.matrix.outputs
        inner = wide if glu.alone else wide // 2
        both = graph.buffer(f"{node.output[0]}.gate_up", wide, room)
        self._multiply_chosen(node.input[0], RowSource.of(x), count, layer.gate_up, chosen, both)
        gate, up = View(both.address, inner, wide), View(both.address + 4 * (wide - inner), inner, wide)
        name = f"{node.output[0]}.gated"
        if glu.is_clamped:
            gated = graph.buffer(name, inner, room)
            numbers, size = map(ctypes.c_float, (glu.alpha, glu.limit, glu.addend)), integers(tokens, inner)
            given = *rows_of(gate), *rows_of(up), *numbers, *rows_of(gated), *size
            graph.launch("clamped_swish_mul", tokens * inner, *given)
            read = RowSource.of(gated)
        else:
            read = RowSource.of(gate, GATES[glu.opens], up)
            if layer.down.matrix.coded is None:
                read = self._made_floats(read, graph.buffer(name, inner, room), tokens)
        width = layer.down.matrix.outputs
        results = graph.buffer(f"{node.output[0]}.results", width, room)
        self._multiply_chosen(name, read, 1, layer.down, chosen, results)
        base = graph.values[node.input[3]] if len(node.input) > 3 else View(0, 0, 0)
        y = self._result(node, width)
        graph.launch(
            "mix",
            self._tokens * width,
            *map(pointer, (results.address, weights.address, chosen.address)),
            *(*rows_of(base), *rows_of(y)),
            *integers(self._tokens, count, width),
        )

    def multiply_heads(self, node: onnx.NodeProto) -> None:
        """Multiply a part of each head with a matrix of its own."""
        of, found = attributes_of(node), self._graph.head_matrices[node.output[0]]
        x, heads, matrix = self._graph.values[node.input[0]], of["heads"], found.table.matrix
        name = f"{node.output[0]}.x"
        parts = self._buffer(name, heads * matrix.columns)
        source = HeadPart(x, x.width // heads, of["first"], matrix.columns)
        self.copy_heads(source, HeadPart(parts, matrix.columns, 0, matrix.columns))
        y = self._result(node, heads * matrix.outputs)
        apart = [View(each.address, each.width // heads, each.width // heads) for each in (parts, y)]
        self._multiply_chosen(name, RowSource.of(apart[0]), 1, found.table, found.chosen, apart[1])

    def _multiply_chosen(
        self, name: str, source: RowSource, sharing: int, table: ExpertTable, chosen: View, y: View
    ) -> None:
        """Multiply each token by the matrix that it has chosen; `sharing` of them have a row of the source, which a
        matrix of floats takes as it is."""
        graph, matrix, tokens = self._graph, table.matrix, self._tokens * chosen.width
        found = pointer(table.address), pointer(chosen.address)
        if (coded := matrix.coded) is not None:
            room, rows = graph.max_rows * chosen.width // sharing, tokens // sharing
            graph.launch(
                *coded.expert_product(matrix.outputs, tokens, bool(matrix.zeros)),
                pointer(self._quantised(name, source, coded, coded.quantise(1), rows, room)),
                *(*integers(coded.stretches, sharing), *found, *rows_of(y)),
                *integers(tokens, matrix.outputs, coded.row_bytes, coded.block_shift, matrix.columns >> matrix.shift),
            )
            return
        graph.launch(
            f"expert_matmul_{matrix.kind}_1",
            -(-matrix.outputs // ROWS[1]) * tokens * WARP,
            *(pointer(source.x), *integers(source.x_stride, sharing), *found, *rows_of(y)),
            *integers(tokens, matrix.outputs, matrix.columns),
        )

    def zeros(self, node: onnx.NodeProto) -> None:
        """Make zeros: the partial sum of a rank without units."""
        graph = self._graph
        *_, width = self._integers_of(graph.made_by[node.input[0]].input[1])
        graph.fill(self._result(node, width).address, self._tokens * width)

    def choose(self, node: onnx.NodeProto) -> None:
        """The rows that get logits, or for each row some of what is the same for all."""
        if node.input[1] != "rows":
            self.gather(node)
            return
        graph, x = self._graph, self._graph.values[node.input[0]]
        self._in_head = True
        if [*self._rows] == [*range(self._tokens)]:
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
        for chunk in self._step.chunks:
            graph.all_reduce(partial, chunk, self._summing)


_SUBMITTERS: dict[tuple[str, str], Callable[[_Step, onnx.NodeProto], None]] = {
    ("", "Add"): _Step.add,
    ("", "Clip"): _Step.clip,
    ("", "Concat"): _Step.concat,
    ("", "ConstantOfShape"): _Step.zeros,
    ("", "Div"): _Step.divide,
    ("", "Gather"): _Step.choose,
    ("", "GatherElements"): _Step.gather,
    ("", "Gelu"): _Step.open,
    ("", "Gemm"): _Step.gemm,
    ("", "LayerNormalization"): _Step.norm,
    ("", "Min"): _Step.least,
    ("", "Mul"): _Step.multiply,
    ("", "RMSNormalization"): _Step.norm,
    ("", "ReduceSum"): _Step.sum_rows,
    ("", "Reshape"): _Step.reshape,
    ("", "Sigmoid"): _Step.sigmoid,
    ("", "Slice"): _Step.slice,
    ("", "Softmax"): _Step.softmax,
    ("", "Softplus"): _Step.softplus,
    ("", "Split"): _Step.split,
    ("", "Sqrt"): _Step.root,
    ("", "Swish"): _Step.open,
    ("", "Tanh"): _Step.tanh,
    ("", "TopK"): _Step.top_k,
    ("", "Where"): _Step.keep_best_groups,
    (DOMAIN, ADAPTED): _Step.adapt,
    (DOMAIN, "CachedAttention"): _Step.attention,
    (DOMAIN, "CachedAttentionInChunks"): _Step.attention,
    (DOMAIN, "CachedAttentionToChosen"): _Step.attention,
    (DOMAIN, "CachedAttentionToChosenKeys"): _Step.attention,
    (DOMAIN, "CachedAttentionToChosenKeysWithSinks"): _Step.attention,
    (DOMAIN, "CachedAttentionToKeys"): _Step.attention,
    (DOMAIN, "CachedAttentionToKeysWithSinks"): _Step.attention,
    (DOMAIN, "CachedAttentionWarmed"): _Step.attention,
    (DOMAIN, "CachedAttentionWithGains"): _Step.attention,
    (DOMAIN, "CachedAttentionWithSinks"): _Step.attention,
    **dict.fromkeys(((DOMAIN, name) for name in CHOSEN), _Step.choose_positions),
    (DOMAIN, "DistCollective"): _Step.all_reduce,
    (DOMAIN, "Experts"): _Step.experts,
    (DOMAIN, "HeadProducts"): _Step.multiply_heads,
    (DOMAIN, GATED_DELTA): _Step.gated_delta,
    (DOMAIN, DILATED_CONVOLUTION): _Step.dilated_convolution,
    (DOMAIN, MATCH_STREAMS): _Step.match_streams,
    (DOMAIN, SHORT_CONVOLUTION): _Step.short_convolution,
    (DOMAIN, SPARSE_MIXER): _Step.mix_sparsely,
    (DOMAIN, XIELU): _Step.xielu,
    (DOMAIN, STATE_SPACE): _Step.state_space,
    **dict.fromkeys(((DOMAIN, name) for name in STREAM_GATES), _Step.gate_streams),
    (DOMAIN, READ_STREAMS): _Step.read_streams,
    (DOMAIN, WRITE_STREAMS): _Step.write_streams,
}
