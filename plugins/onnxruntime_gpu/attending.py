"""The attention of all layers of a rank: their caches in the GPU's memory, and what a step's rows attend to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from motley.plugins.engine import RankGraph, Span
from motley.plugins.mapped_share import Array
from motley.plugins.nodes import attributes_of
from motley.plugins.onnxruntime_gpu.attention import AttentionSessions, Heads, mask_session
from motley.plugins.onnxruntime_gpu.device import Gpu, Mirror, Run, upload
from motley.plugins.onnxruntime_gpu.groups import Group, Pieces, slots_of
from motley.plugins.segments import Kernel

GROUPS_KEPT = 4
"""Shapes of groups whose places are kept for a number of rows; the one not used for longest goes first."""


@dataclass(frozen=True)
class Attention:
    """A layer's attention: its sessions, and the names of what it reads and makes.

    Attributes:
        qkv: queries, keys and values side by side, f32[T, E].
        y: what it makes, f32[T, heads * d].
        keys: the layer's cache of keys.
        values: the same of values.
        cos: the tables that it turns by are `cos` and `sin`.
        window: positions that a row sees; 0: all.
        sinks: in the GPU's memory; None: there are none.
    """

    sessions: AttentionSessions
    qkv: str
    y: str
    keys: str
    values: str
    cos: str
    sin: str
    window: int
    sinks: ort.OrtValue | None


@dataclass(frozen=True)
class _GroupPlaces:
    """Where a `Group` is in the GPU's memory, and its mask.

    Attributes:
        places: i64[S, R, 1], the numbers in `rows`.
        make_mask: makes the mask of `positions`.
        runs: what attends, bound once, by the result and whether the group is the whole step in its order.
    """

    rows: Mirror
    places: Mirror
    slots: Mirror
    positions: Mirror
    mask: ort.OrtValue
    make_mask: Run
    runs: dict[tuple[str, bool], Run]


class _WindowGroups:
    """The groups of a step for layers of one window.

    Attributes:
        groups: those of the step under way.
        in_order: whether that is one group, of all rows in their order.
        kept: places for groups, by their number in a step and shape.
    """

    def __init__(self) -> None:
        self.groups: list[_GroupPlaces] = []
        self.in_order = False
        self.kept: OrderedDict[tuple[int, int, int, int], _GroupPlaces] = OrderedDict()


class StepRows:
    """What attention needs of a step of T rows besides its groups, in the GPU's memory.

    Attributes:
        count: T.
        order: i64[1, T], the numbers of the rows.
        slots: i64[T, 1], where their keys and values go, by whether the layer has blocks of layers with a window.
        tables: of each table that rows turn by, f32[T, r/2].
        queries: f32[T, heads * d], turned, by that width.
        writes: what turns the rows of a layer and caches them, by the name of its result.
        windows: the groups of the step under way, by the window of the layers that they are for.
    """

    def __init__(
        self, device: Gpu, count: int, tables: Mapping[str, int], kinds: Iterable[bool], windows: Iterable[int]
    ) -> None:
        """
        Args:
            tables: the widths of those that rows turn by, by name.
            kinds: of slots.
            windows: that layers have.
        """
        self.count = count
        self.order = device.array(np.arange(count)[None])
        self.slots = {kind: device.mirror(np.zeros((count, 1), np.int64)) for kind in kinds}
        self.tables = {name: device.mirror(np.zeros((count, width), np.float32)) for name, width in tables.items()}
        self.queries: dict[int, ort.OrtValue] = {}
        self.writes: dict[str, Run] = {}
        self.windows = {window: _WindowGroups() for window in windows}


class Attending:
    """The attentions of a rank, their caches, and the groups of the step under way."""

    def __init__(self, device: Gpu, graph: RankGraph) -> None:
        """
        Raises:
            EngineMemoryError: the GPU's memory has no room for the caches.
        """
        self._device = device
        self._graph = graph
        blocks = graph.blocks
        self.caches = {
            f"{kind}_cache.{spec.layer}": device.empty(
                (blocks.count_of(spec) * blocks.tokens + 1, spec.heads * spec.head_dim)
            )
            for spec in graph.caches
            for kind in ("key", "value")
        }
        """Of each layer, the slot after all those of its blocks stays zero."""
        self._sessions: dict[Heads, AttentionSessions] = {}
        self._tables: dict[str, int] = {}
        """The widths of the tables that layers turn by, by name."""
        self._most_heads = 1
        self._masks: dict[int, ort.InferenceSession] = {}
        """What makes masks, by the window."""

    def add(self, then: Kernel, sinks: Array | None) -> Attention:
        """Prepare the attention of a layer.

        Args:
            sinks: f32[heads]; None: it has none.

        Raises:
            EngineError: the provider lacks what it needs.
        """
        attributes = attributes_of(then.node)
        qkv, keys, values, _, cos, sin, *_ = then.node.input
        heads = Heads(
            heads=attributes["q_heads"],
            kv_heads=attributes["kv_heads"],
            width=attributes["head_dim"],
            rotary=attributes["rotary_dim"],
            scale=attributes["scale"],
            soft_cap=attributes["soft_cap"],
            sinks=sinks is not None,
        )
        if heads not in self._sessions:
            self._sessions[heads] = AttentionSessions(self._device, heads)
        self._most_heads = max(self._most_heads, heads.heads)
        if heads.rotary:
            self._tables |= dict.fromkeys((cos, sin), heads.rotary // 2)
        window = attributes["window"]
        if window not in self._masks:
            self._masks[window] = mask_session(self._device, window)
        placed = None if sinks is None else self._device.array(sinks)
        return Attention(self._sessions[heads], qkv, then.results[0], keys, values, cos, sin, window, placed)

    def rows(self, count: int) -> StepRows:
        """Make the places for steps of so many rows."""
        return StepRows(self._device, count, self._tables, {*map(self._has_own_blocks, self._masks)}, self._masks)

    def begin(self, rows: StepRows, spans: Sequence[tuple[int, Span]]) -> None:
        """Upload what all layers read of a step: the rotary tables of its rows, their slots, and its groups.

        Args:
            spans: each with its first row.
        """
        if not self._masks:
            return
        graph, tokens = self._graph, self._graph.blocks.tokens
        for own_blocks, slots in rows.slots.items():
            of_spans = [
                slots_of(span, own_blocks, span.position, span.position + span.rows, tokens) for _, span in spans
            ]
            np.concatenate(of_spans, out=slots.host[:, 0])
        tables = [(span, graph.constants(span.prompt)) for _, span in spans]
        for name, turning in rows.tables.items():
            turns = [table[name][span.position : span.position + span.rows] for span, table in tables]
            np.concatenate(turns, out=turning.host)
        fresh = [*rows.slots.values(), *rows.tables.values()]
        for window, kept in rows.windows.items():
            groups = self._pieces(window).grouped(spans)
            kept.groups = [self._placed(kept, window, number, group, fresh) for number, group in enumerate(groups)]
            kept.in_order = len(groups) == 1 and np.array_equal(groups[0].rows.ravel(), np.arange(rows.count))
        upload(fresh)()
        for kept in rows.windows.values():
            for places in kept.groups:
                places.make_mask()

    def attend(self, rows: StepRows, attention: Attention, places: Mapping[str, ort.OrtValue]) -> None:
        """Cache the keys and values of a step's rows in one layer, and have its groups attend.

        Args:
            places: of what the attention reads and makes, by name; the same ones whenever these rows are given.
        """
        write = rows.writes.get(attention.y)
        if write is None:
            write = rows.writes[attention.y] = self._bind_write(rows, attention, places)
        write()
        kept = rows.windows[attention.window]
        key = attention.y, kept.in_order
        for group in kept.groups:
            run = group.runs.get(key)
            if run is None:
                run = group.runs[key] = self._bind_attend(rows, group, attention, places[attention.y], kept.in_order)
            run()

    def close(self) -> None:
        """Let go of the caches and all else."""
        self.caches.clear()
        self._sessions.clear()
        self._masks.clear()

    def _has_own_blocks(self, window: int) -> bool:
        """Whether layers of a window have blocks of their own."""
        return bool(window and self._graph.blocks.windowed)

    def _pieces(self, window: int) -> Pieces:
        """How a step is cut for layers of a window."""
        blocks, own = self._graph.blocks, self._has_own_blocks(window)
        nothing = (blocks.windowed if own else blocks.count) * blocks.tokens
        return Pieces(blocks.tokens, self._most_heads, nothing, window, own)

    def _cached(self, attention: Attention) -> dict[str, ort.OrtValue]:
        return {"keys": self.caches[attention.keys], "values": self.caches[attention.values]}

    def _bind_write(self, rows: StepRows, attention: Attention, places: Mapping[str, ort.OrtValue]) -> Run:
        """Bind what turns rows in one layer, and caches their keys and values."""
        heads, cached = attention.sessions.heads, self._cached(attention)
        width = heads.heads * heads.width
        if width not in rows.queries:
            rows.queries[width] = self._device.empty((rows.count, width))
        slots = rows.slots[self._has_own_blocks(attention.window)]
        inputs = {"qkv": places[attention.qkv], "slots": slots.there, **cached}
        if heads.rotary:
            inputs |= {"cos": rows.tables[attention.cos].there, "sin": rows.tables[attention.sin].there}
            inputs["order"] = rows.order
        outputs = {"queries": rows.queries[width]} | {f"{name}.out": cache for name, cache in cached.items()}
        return self._device.bind(attention.sessions.write, inputs, outputs)

    def _bind_attend(
        self, rows: StepRows, group: _GroupPlaces, attention: Attention, y: ort.OrtValue, in_order: bool
    ) -> Run:
        """Bind what has a group attend in one layer; `y` is where its rows' results go."""
        sessions = attention.sessions
        inputs = {
            "queries": rows.queries[sessions.heads.heads * sessions.heads.width],
            "rows": group.rows.there,
            "slots": group.slots.there,
            "mask": group.mask,
            **self._cached(attention),
        }
        if attention.sinks is not None:
            inputs["sinks"] = attention.sinks
        if in_order:
            return self._device.bind(sessions.attend, inputs, {"y": y})
        return self._device.bind(sessions.attend_some, inputs | {"y.before": y, "places": group.places.there}, {"y": y})

    def _placed(self, kept: _WindowGroups, window: int, number: int, group: Group, fresh: list[Mirror]) -> _GroupPlaces:
        """Give a group of a step its places.

        Args:
            fresh: gets what is yet to be uploaded.
        """
        key = number, *group.shape
        if key not in kept.kept:
            kept.kept[key] = self._new_places(group, window)
            while len(kept.kept) > GROUPS_KEPT:
                kept.kept.popitem(last=False)
            return kept.kept[key]
        kept.kept.move_to_end(key)
        places = kept.kept[key]
        if not np.array_equal(places.rows.host, group.rows):
            np.copyto(places.rows.host, group.rows)  # which `places` shares
            fresh += [places.rows, places.places]
        np.copyto(places.slots.host, group.slots)
        np.copyto(places.positions.host, group.positions)
        fresh += [places.slots, places.positions]
        return places

    def _new_places(self, group: Group, window: int) -> _GroupPlaces:
        device = self._device
        pieces, count, seen = group.shape
        positions = device.mirror(group.positions)
        known = device.array(np.arange(seen, dtype=np.float32))
        mask = device.empty((pieces, 1, 1, count, seen))
        make = device.bind(self._masks[window], {"positions": positions.there, "seen": known}, {"mask": mask})
        return _GroupPlaces(
            rows=device.mirror(group.rows),
            places=device.mirror(group.rows[:, :, None]),
            slots=device.mirror(group.slots),
            positions=positions,
            mask=mask,
            make_mask=make,
            runs={},
        )
