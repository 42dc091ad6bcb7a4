"""The nodes of a step that take rows apart and join them: columns, and parts of heads."""

from __future__ import annotations

import onnx

from motley.plugins.cuda.kernels import HeadPart, View, integers, rows_of
from motley.plugins.cuda.nodes.submission import Submission
from motley.plugins.nodes import attributes_of


class HeadNodes(Submission):
    """How nodes that take rows apart, or join them, become kernels; most become none."""

    def reshape(self, node: onnx.NodeProto) -> None:
        """Tell heads apart, for which the rows stay as they are, or join them."""
        graph, shape = self._graph, self._integers_of(node.input[1])
        part = graph.parts.get(node.input[0])
        if part is None:
            rows = graph.values[node.input[0]]
        elif part.view is not None:
            rows = part.view
        else:
            rows = self._result(node, part.heads * part.width)
            self.copy_heads(part, HeadPart(rows, part.width, 0, part.width))
        graph.values[node.output[0]] = rows
        if len(shape) == 3:
            graph.parts[node.output[0]] = HeadPart(rows, shape[2], 0, shape[2])

    def split(self, node: onnx.NodeProto) -> None:
        graph, widths = self._graph, self._integers_of(node.input[1])
        firsts = [sum(widths[:number]) for number in range(len(widths))]
        if attributes_of(node)["axis"] == 2:
            of = graph.parts[node.input[0]]
            for name, first, width in zip(node.output, firsts, widths, strict=True):
                graph.parts[name] = HeadPart(of.rows, of.size, of.first + first, width)
            return
        x = graph.values[node.input[0]]
        for name, first, width in zip(node.output, firsts, widths, strict=True):
            graph.values[name] = View(x.address + 4 * first, width, x.stride)

    def slice(self, node: onnx.NodeProto) -> None:
        """Some elements of each head."""
        of = self._graph.parts[node.input[0]]
        (first,), (last,) = map(self._integers_of, node.input[1:3])
        self._graph.parts[node.output[0]] = HeadPart(of.rows, of.size, of.first + first, last - first)

    def concat(self, node: onnx.NodeProto) -> None:
        """Join rows, or parts of heads, side by side."""
        graph = self._graph
        if attributes_of(node)["axis"] == 2:
            parts = [graph.parts[name] for name in node.input]
        else:
            views = [graph.values[name] for name in node.input]
            parts = [HeadPart(view, view.width, 0, view.width) for view in views]
        size = sum(part.width for part in parts)
        rows = self._result(node, parts[0].heads * size)
        first = 0
        for part in parts:
            self.copy_heads(part, HeadPart(rows, size, first, part.width))
            first += part.width
        if attributes_of(node)["axis"] == 2:
            graph.parts[node.output[0]] = HeadPart(rows, size, 0, size)

    def copy_heads(self, source: HeadPart, target: HeadPart) -> None:
        """Copy a part of heads to one of other heads, as many and as wide."""
        self._graph.launch(
            "copy_heads",
            self._count * source.heads * source.width,
            *(*rows_of(source.rows), *integers(source.size, source.first)),
            *(*rows_of(target.rows), *integers(target.size, target.first)),
            *integers(self._count, source.heads, source.width),
        )
