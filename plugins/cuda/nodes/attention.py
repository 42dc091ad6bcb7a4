"""Attention in a step: what is called with which heads, tables, blocks and parts of rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from motley.plugins.cuda.adapting import Adapting
from motley.plugins.cuda.device_graph import DeviceGraph
from motley.plugins.cuda.kernels import HEADS, MOST_PARTS, PLACE, WARP, integers, parts_of, pointer, rows_of
from motley.plugins.cuda.nodes.submission import StepRows, Submission
from motley.plugins.engine import SCALES, Collectives
from motley.plugins.nodes import attributes_of

PARTIALS_BYTES = 64 << 20
"""What the parts of rows of many or wide heads take together, unless a single row takes more."""
DECODED_TOGETHER = 32
"""Sequences of which each has room for a row in as many parts as there can be, where that is little memory."""


class Reach(ctypes.Structure):
    """`Reach` in the source: how many positions rows see, or those of which chunk; 0: all."""

    _fields_ = (("window", ctypes.c_int), ("chunk", ctypes.c_int))


class Turning(ctypes.Structure):
    """`Turning` in the source, with what is called `Warmth` there."""

    _fields_ = (
        ("cosines", ctypes.c_longlong),
        ("sines", ctypes.c_longlong),
        ("q_gain", ctypes.c_ulonglong),
        ("k_gain", ctypes.c_ulonglong),
        ("span", ctypes.c_int),
        ("offset", ctypes.c_int),
        ("growth", ctypes.c_float),
        ("size", ctypes.c_int),
    )


@dataclass(frozen=True)
class Operands:
    """The names of what an attention is given, as the functions of `motley.daemon.models.graph.cached_attention` have
    them.

    Attributes:
        rows: queries, keys and, unless the keys are the values, these.
        caches: of keys, and of values likewise.
        tables: cosines and sines.
        more: sinks, or gains.
    """

    rows: Sequence[str]
    caches: Sequence[str]
    tables: tuple[str, str]
    more: Sequence[str]

    @staticmethod
    def of(node: onnx.NodeProto) -> Operands:
        names, kinds = list(node.input), 1 if node.op_type == "CachedAttentionToKeys" else 2
        rows, caches, rest = names[: 1 + kinds], names[1 + kinds : 1 + 2 * kinds], names[2 + 2 * kinds :]
        return Operands(rows, caches, (rest[0], rest[1]), rest[2:])


def rows_that_attend_together(sees: Sequence[int], most: int, room: int) -> list[tuple[slice, int]]:
    """Cut the rows of a step into those whose attention is submitted together.

    Args:
        sees: how many positions each row sees, without the window.
        most: how many it sees at most, of a window or a chunk; 0: all.
        room: how many parts of rows there is memory for, at least `MOST_PARTS`.

    Returns:
        Slices of rows, each with the most parts that one of its rows has; by all of the slice they fit into the room.
    """
    together = []
    start = largest = 0
    for row, positions in enumerate(sees):
        parts = parts_of(min(positions, most) if most else positions)
        if max(largest, parts) * (row + 1 - start) > room:
            together.append((slice(start, row), largest))
            start, largest = row, 0
        largest = max(largest, parts)
    return [*together, (slice(start, len(sees)), largest)]


class AttentionNodes(Submission):
    """How attention becomes kernels."""

    def __init__(
        self, graph: DeviceGraph, summing: Collectives, step: StepRows, adapting: Adapting | None = None
    ) -> None:
        super().__init__(graph, summing, step, adapting)
        self._attending: dict[tuple[int, int], list[tuple[slice, int]]] = {}
        """See `rows_that_attend_together`, by how much rows see at most and the room that there is."""

    def attention(self, node: onnx.NodeProto) -> None:
        graph, attributes, operands = self._graph, attributes_of(node), Operands.of(node)
        heads, kv_heads, width = (attributes[name] for name in ("q_heads", "kv_heads", "head_dim"))
        shape, reach = integers(heads, kv_heads, width), Reach(attributes.get("window", 0), attributes.get("chunk", 0))
        own = int(bool(graph.blocks.windowed and (reach.window or reach.chunk)))
        arrays = [[pointer(graph.caches.get(f"{name}{end}", 0)) for end in ("", SCALES)] for name in operands.caches]
        blocks, places = integers(own, graph.blocks.tokens), pointer(self._places)
        q, *told = (graph.values[name] for name in operands.rows)
        # A layer that has the blocks of one before it finds there what that has written.
        kept = [rows_of(view) for view in told] if node.name in graph.writing else []
        given = [*kept, *[(pointer(0), *integers(0))] * (2 - len(kept))]
        graph.launch(
            f"rotate_{graph.blocks.format}",
            self._tokens * (heads + len(kept) * kv_heads) * WARP,
            *(*rows_of(q), *given[0], *given[1], places, *arrays[0], *arrays[-1], *blocks),
            *(*integers(self._tokens), *shape, self._turning(node, operands)),
        )
        # Room for all rows in one part, or for those of several sequences in many, if that is not too much.
        fitting = max(MOST_PARTS, PARTIALS_BYTES // (4 * heads * (2 + width)))
        room = min(fitting, max(graph.max_rows, min(DECODED_TOGETHER, graph.max_rows) * MOST_PARTS))
        partials = pointer(graph.buffer(f"partials of {heads} heads", heads * (2 + width), room).address)
        y = self._result(node, heads * width)
        sinks = pointer(graph.address(operands.more[0]) if node.op_type == "CachedAttentionWithSinks" else 0)
        numbers = ctypes.c_float(attributes["scale"]), ctypes.c_float(attributes["soft_cap"])
        for rows, parts in self._attending_within(reach.window or reach.chunk, room):
            count = integers(rows.stop - rows.start)
            places = pointer(self._places + PLACE.itemsize * rows.start)
            graph.launch(
                f"attend_{next(each for each in HEADS if width <= each)}_{graph.blocks.format}",
                (rows.stop - rows.start) * heads * parts * WARP,
                *(*rows_of(q.after(rows.start)), places, *arrays[0], *arrays[-1], *blocks),
                *(partials, *count, *shape, *numbers, reach, *integers(parts)),
            )
            graph.launch(
                "combine",
                (rows.stop - rows.start) * heads * width,
                *(partials, sinks, *rows_of(y.after(rows.start)), places),
                *(*count, *integers(heads, width), reach, *integers(parts)),
            )

    def _turning(self, node: onnx.NodeProto, operands: Operands) -> Turning:
        graph, attributes = self._graph, attributes_of(node)
        cosines, sines = (self._step.turns[name] for name in operands.tables)
        gained = node.op_type == "CachedAttentionWithGains"
        gains = [graph.address(name) for name in operands.more] if gained else [0, 0]
        warmth = (attributes.get(name, 0) for name in ("warm_span", "warm_offset", "warmth"))
        return Turning(cosines, sines, *gains, *warmth, attributes["rotary_dim"])

    def _attending_within(self, most: int, room: int) -> list[tuple[slice, int]]:
        if (most, room) not in self._attending:
            self._attending[most, room] = rows_that_attend_together(self._sees, most, room)
        return self._attending[most, room]
