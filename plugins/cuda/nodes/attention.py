"""Attention in a step: what is called with which heads, tables, blocks and parts of rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from motley.plugins.cuda.adapting import Adapting
from motley.plugins.cuda.device_graph import DeviceGraph
from motley.plugins.cuda.kernels import (
    HEADS,
    PLACE,
    ROW_HEADS,
    ROW_RUN,
    ROW_THREADS,
    THREADS,
    WARP,
    View,
    integers,
    parts_of,
    pointer,
    rows_of,
)
from motley.plugins.cuda.nodes.submission import StepRows, Submission
from motley.plugins.engine import SCALES, Collectives
from motley.plugins.nodes import attributes_of

PARTIALS_BYTES = 64 << 20
"""What the parts of rows of many or wide heads take together, unless a single row takes more."""
DECODED_TOGETHER = 32
"""Rows that each have room for as many parts as there can be, where that is little memory."""
MOST_APART = 4
"""Heads that have the same keys of which blocks have two each."""
ENOUGH_BLOCKS = 512
"""Blocks of threads that keep a GPU busy, so that each of them may have all parts of its rows."""


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
        chosen: which positions rows see, as `ChoiceNodes` has it; None: all.
    """

    rows: Sequence[str]
    caches: Sequence[str]
    tables: tuple[str, str]
    more: Sequence[str]
    chosen: str | None = None

    @staticmethod
    def of(node: onnx.NodeProto) -> Operands:
        names, kinds = list(node.input), len(node.output) - 1
        chosen = names.pop(1 + kinds) if attributes_of(node).get("choices") else None
        rows, caches, rest = names[: 1 + kinds], names[1 + kinds : 1 + 2 * kinds], names[2 + 2 * kinds :]
        return Operands(rows, caches, (rest[0], rest[1]), rest[2:], chosen)


@dataclass(frozen=True)
class Tiles:
    """How query heads are cut for the blocks of threads that attend, as in the source.

    Attributes:
        kernel: what the kernels for such heads are called, without the format of caches.
        rows: neighbours of one sequence that a block has together.
        units: blocks that have the same rows.
        threads: of a block.
    """

    kernel: str
    rows: int
    units: int
    threads: int = THREADS

    @staticmethod
    def of(heads: int, kv_heads: int, width: int) -> Tiles:
        widest, queries = next((each, HEADS[each]) for each in HEADS if width <= each)
        group = heads // kv_heads
        return Tiles(f"attend_{widest}", max(1, queries // group), kv_heads * -(-group // queries))

    @staticmethod
    def of_rows_apart(heads: int, kv_heads: int, width: int) -> Tiles:
        """Of rows that each are of another sequence. Blocks that have a row and two of its heads are for few heads that
        have the same keys: each block reads these anew."""
        if width % ROW_RUN or heads // kv_heads > MOST_APART:
            return Tiles.of(heads, kv_heads, width)
        return Tiles("attend_row", 1, kv_heads * -(-(heads // kv_heads) // ROW_HEADS), ROW_THREADS)

    def blocks(self, spans: Sequence[int]) -> int:
        """Of so many rows of one sequence each, if a block has all parts of its rows."""
        return self.units * sum(-(-rows // self.rows) for rows in spans)

    def most_parts(self, positions: int, most: int) -> int:
        """In how many parts the rows of a block attend together, the last of which sees so many positions; `most`: how
        many a row sees at most, of a window or a chunk; 0: all."""
        return parts_of(positions, most + self.rows - 1 if most else 0)


def rows_that_attend_together(parts: Sequence[int], room: int) -> list[tuple[slice, int]]:
    """Cut the rows of a step into those whose attention is submitted together.

    Args:
        parts: in how many each row attends.
        room: how many parts of rows there is memory for, at least as many as one row has.

    Returns:
        Slices of rows, each with the most parts that one of its rows has; by all of the slice they fit into the room.
    """
    together = []
    start = largest = 0
    for row, own in enumerate(parts):
        if max(largest, own) * (row + 1 - start) > room:
            together.append((slice(start, row), largest))
            start, largest = row, 0
        largest = max(largest, own)
    return [*together, (slice(start, len(parts)), largest)]


def places_of(chosen: str, kv_head: int) -> str:
    """The value with the places of rows in what is chosen for a KV head of theirs, by the name of that."""
    return f"{chosen}.places.{kv_head}"


class AttentionNodes(Submission):
    """How attention becomes kernels."""

    def __init__(
        self, graph: DeviceGraph, summing: Collectives, step: StepRows, adapting: Adapting | None = None
    ) -> None:
        super().__init__(graph, summing, step, adapting)
        self._attending: dict[tuple[Tiles, int, int, int], list[tuple[slice, int]]] = {}
        """See `_attending_within`."""

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
        y = self._result(node, heads * width)
        sinks = graph.address(operands.more[0]) if node.op_type.endswith("WithSinks") else 0
        if not operands.chosen:
            self._attend(node, q, y, arrays, sinks, (heads, kv_heads), self._places, blocks)
            return
        group = heads // kv_heads
        for head in range(kv_heads):  # each row of it is of a sequence of its own, whose blocks have one position
            first, own_sinks = 4 * head * group, sinks + 4 * head * group if sinks else 0
            q_own, y_own = (View(each.address + first * width, group * width, each.stride) for each in (q, y))
            at = graph.values[places_of(operands.chosen, head)].address
            self._attend(node, q_own, y_own, arrays, own_sinks, (group, 1), at, integers(0, 1))

    def _attend(
        self,
        node: onnx.NodeProto,
        q: View,
        y: View,
        arrays: Sequence[Sequence[ctypes.c_void_p]],
        sinks: int,
        of: tuple[int, int],
        own_places: int,
        blocks: tuple[ctypes.c_int, ...],
    ) -> None:
        """The attention of some query heads to as many KV heads as are said with them.

        Args:
            arrays: keys and values, each with their scales.
            own_places: the address of the place of each row.
            blocks: whether they have the blocks of layers with a window, and the positions of a block.
        """
        graph, attributes = self._graph, attributes_of(node)
        (heads, kv_heads), width, choices = of, attributes["head_dim"], attributes.get("choices", 0)
        shape, reach = integers(heads, kv_heads, width), Reach(attributes.get("window", 0), attributes.get("chunk", 0))
        numbers = ctypes.c_float(attributes["scale"]), ctypes.c_float(attributes["soft_cap"])
        cut = Tiles.of_rows_apart if self._step.apart or choices else Tiles.of
        tiles, room = cut(heads, kv_heads, width), self._room(heads, width)
        shared = graph.buffer(f"partials of {heads} heads", heads * (width + 4), room).address if room > 1 else 0
        for rows, parts in self._attending_within(tiles, reach.window or reach.chunk, room, choices):
            count, of_rows = rows.stop - rows.start, rows_of(y.after(rows.start))
            places = pointer(own_places + PLACE.itemsize * rows.start)
            partials = shared if parts > 1 else 0
            # Of a single span all tiles but the last are full, so that only as many blocks are needed.
            alone = parts == 1 == len(self._step.spans) and not rows.start and not choices
            stride = tiles.rows if alone else 1
            number = -(-count // stride)
            graph.launch(
                f"{tiles.kernel}_{graph.blocks.format}",
                number * tiles.units * parts * tiles.threads,
                *(*rows_of(q.after(rows.start)), places, *arrays[0], *arrays[-1], *blocks, pointer(partials)),
                *(pointer(sinks), *of_rows, *integers(count), *shape, *numbers, reach),
                *integers(parts, tiles.units, number, stride),
                of_a_block=tiles.threads,
            )
            if parts > 1:
                graph.launch(
                    f"combine_{graph.blocks.format}",
                    count * heads * width,
                    *(pointer(partials), pointer(sinks), *of_rows, places),
                    *(*integers(count, heads, width), reach, *integers(parts)),
                )

    def _turning(self, node: onnx.NodeProto, operands: Operands) -> Turning:
        graph, attributes = self._graph, attributes_of(node)
        cosines, sines = (self._step.turns[name] for name in operands.tables)
        gained = node.op_type == "CachedAttentionWithGains"
        gains = [graph.address(name) for name in operands.more] if gained else [0, 0]
        warmth = (attributes.get(name, 0) for name in ("warm_span", "warm_offset", "warmth"))
        return Turning(cosines, sines, *gains, *warmth, attributes["rotary_dim"])

    def _attending_within(self, tiles: Tiles, most: int, room: int, choices: int) -> list[tuple[slice, int]]:
        """The rows that attend together, each with the parts of their attention that blocks have apart: in one part all
        of it, without partial sums. Where positions are chosen, rows see no more than so many."""
        key = tiles, most, room, choices
        if key not in self._attending:
            sees = [min(positions, choices or positions) for positions in self._step.sees]
            parts, spans = (
                [tiles.most_parts(each, most) for each in sees],
                [1] * len(sees) if choices else self._step.spans,
            )
            most_parts = max(parts)
            enough = most_parts == 1 or most_parts > room or tiles.blocks(spans) >= ENOUGH_BLOCKS
            whole = [(slice(0, len(parts)), 1)]
            self._attending[key] = whole if enough else rows_that_attend_together(parts, room)
        return self._attending[key]

    def _room(self, heads: int, width: int) -> int:
        """How many parts of rows there is memory for: for those of several rows in as many as there can be, if that is
        not too much. A row that has more parts is computed by blocks that have all of it."""
        graph = self._graph
        most = parts_of(graph.context)
        fitting = PARTIALS_BYTES // (4 * heads * (width + 4))
        return max(1, min(fitting, min(DECODED_TOGETHER, graph.max_rows) * most)) if most > 1 else 1
