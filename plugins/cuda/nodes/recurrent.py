"""Layers with a recurrent state in a step: gated DeltaNets, state spaces and short convolutions as kernels.

`motley.plugins.recurrent` states what they compute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import onnx

from motley.plugins.cuda.kernels import WARP, View, integers, pointer, rows_of
from motley.plugins.cuda.nodes.submission import Submission
from motley.plugins.cuda.recurrent_states import LayerStates
from motley.plugins.nodes import attributes_of

MOST_SOURCES = 5


class Source(ctypes.Structure):
    """Rows of a value as `Sources` in the source has them."""

    _fields_ = (("address", ctypes.c_ulonglong), ("stride", ctypes.c_int), ("width", ctypes.c_int))


class RecurrentNodes(Submission):
    """How layers with a recurrent state become kernels."""

    def gated_delta(self, node: onnx.NodeProto) -> None:
        graph, of = self._graph, attributes_of(node)
        q, k, v, z, b, a = (graph.values[name] for name in node.input[:6])
        filters, decay, bias, gain = (pointer(graph.address(name)) for name in node.input[6:])
        layer, heads = self._step.states.layers[of["layer"]], of["key_heads"] * of["group"]
        keys, values = of["key_size"], of["value_size"]
        lined = self._line_up(layer, [q, k, v, b, a])
        mixed = self._convolved(layer, lined, filters, pointer(0), opens=True)
        rows, both = self._step.lined_up.rows, 2 * of["key_heads"]
        graph.launch("unit_heads", rows * both * WARP, *rows_of(mixed), *integers(rows, both, keys))
        found, gates = self._buffer(f"{node.output[0]}.found", heads * values), self._gates(layer, lined)
        speeds, floor = [decay, bias], [ctypes.c_float(of["floor"])]
        if of["decays"] > 1:
            decays = graph.buffer("decays", heads * keys, self._step.states.room)
            speeds = [pointer(decays.address)]
            sizes = *integers(rows, heads, keys), *floor
            graph.launch("decay", rows * heads * keys, *rows_of(gates), decay, bias, *speeds, *sizes)
            floor = []
        graph.launch(
            "scan_delta" if of["decays"] == 1 else "scan_delta_by_rows",
            self._step.lined_up.spans * heads * values,
            *(*rows_of(mixed), *rows_of(gates), *speeds),
            *(*self._states(layer), pointer(found.address)),
            *(
                *integers(self._step.lined_up.spans, heads, of["group"], keys, values),
                ctypes.c_float(of["written"]),
                *floor,
            ),
        )
        y = self._result(node, heads * values)
        graph.launch(
            "norm_and_gate",
            self._tokens * heads * WARP,
            *(pointer(found.address), gain, *rows_of(z), pointer(y.address)),
            *(*integers(self._tokens, heads, values), ctypes.c_float(of["epsilon"])),
            *integers(int(of["gate"] == b"sigmoid")),
        )
        self._keep(layer, lined)

    def state_space(self, node: onnx.NodeProto) -> None:
        graph, of = self._graph, attributes_of(node)
        x, z, b, c, dt = (graph.values[name] for name in node.input[:5])
        filters, decay, bias, skip, *more = (pointer(graph.address(name)) for name in node.input[5:])
        layer, heads, values = self._step.states.layers[of["layer"]], of["heads"], of["value_size"]
        lined = self._line_up(layer, [x, b, c, dt])
        mixed = self._convolved(layer, lined, filters, more[0] if more else pointer(0), opens=True)
        y = self._result(node, heads * values)
        graph.launch(
            "scan_space",
            self._step.lined_up.spans * heads * values,
            *(*rows_of(mixed), *rows_of(self._gates(layer, lined)), decay, bias, skip),
            *(ctypes.c_float(of["least"]), ctypes.c_float(of["most"]), *self._states(layer)),
            *(*rows_of(z), pointer(y.address)),
            *integers(self._step.lined_up.spans, heads, of["group"], of["key_size"], values),
        )
        self._keep(layer, lined)

    def short_convolution(self, node: onnx.NodeProto) -> None:
        graph = self._graph
        b, c, x = (graph.values[name] for name in node.input[:3])
        filters, *more = (pointer(graph.address(name)) for name in node.input[3:])
        layer = self._step.states.layers[attributes_of(node)["layer"]]
        count, size = self._tokens * x.width, integers(self._tokens, x.width, x.width)
        seen = self._buffer(f"{node.output[0]}.seen", x.width)
        graph.launch("multiply", count, *rows_of(b), *rows_of(x), *rows_of(seen), *size)
        lined = self._line_up(layer, [seen])
        mixed = self._convolved(layer, lined, filters, more[0] if more else pointer(0), opens=False)
        y = self._result(node, x.width)
        graph.launch("multiply", count, *rows_of(c), *rows_of(mixed), *rows_of(y), *size)
        self._keep(layer, lined)

    def dilated_convolution(self, node: onnx.NodeProto) -> None:
        graph, of = self._graph, attributes_of(node)
        x, filters = graph.values[node.input[0]], pointer(graph.address(node.input[1]))
        layer = self._step.states.layers[of["layer"]]
        lined = self._line_up(layer, [x])
        # It is read where it is: before another layer, or this one's other state, convolves anything.
        graph.values[node.output[0]] = self._convolved(layer, lined, filters, pointer(0), True, of["dilation"])
        self._keep(layer, lined)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _line_up(self, layer: LayerStates, values: Sequence[View]) -> View:
        """Values side by side, of the rows of the step and of the guesses before them: f32[rows, columns + gates]."""
        step, width = self._step.lined_up, layer.spec.columns + layer.spec.gates
        none = Source(0, 0, 1 << 30)
        given = [Source(each.address, each.stride, each.width) for each in values]
        sources = (Source * MOST_SOURCES)(*given, *[none] * (MOST_SOURCES - len(given)))
        lined = self._graph.buffer("lined up", width, self._step.states.room)
        self._graph.launch(
            "line_up",
            step.rows * width,
            *(sources, *map(pointer, (layer.guessed, step.table, step.owners, lined.address))),
            *integers(self._tokens, step.rows, width),
        )
        return lined

    def _convolved(
        self,
        layer: LayerStates,
        lined: View,
        filters: ctypes.c_void_p,
        bias: ctypes.c_void_p,
        opens: bool,
        apart: int = 1,
    ) -> View:
        step, spec = self._step.lined_up, layer.spec
        mixed = self._graph.buffer("convolved", spec.columns, self._step.states.room)
        self._graph.launch(
            "convolve",
            step.rows * spec.columns,
            *(*rows_of(lined), pointer(layer.recent), filters, bias),
            *map(pointer, (step.table, step.owners, mixed.address)),
            *integers(self._tokens, step.rows, spec.columns, (spec.reach - 1) // apart + 1, apart, int(opens)),
        )
        return mixed

    def _gates(self, layer: LayerStates, lined: View) -> View:
        return View(lined.address + 4 * layer.spec.columns, layer.spec.gates, lined.stride)

    def _states(self, layer: LayerStates) -> tuple[ctypes.c_void_p, ...]:
        return tuple(map(pointer, (layer.states, self._step.states.scratch, self._step.lined_up.table)))

    def _keep(self, layer: LayerStates, lined: View) -> None:
        """Keep of the rows what those that follow need of them."""
        step, spec = self._step.lined_up, layer.spec
        self._graph.launch(
            "keep_rows",
            step.spans * lined.width,
            *map(pointer, (lined.address, layer.recent, layer.guessed, step.table)),
            *integers(step.spans, spec.columns, lined.width, spec.reach),
        )
