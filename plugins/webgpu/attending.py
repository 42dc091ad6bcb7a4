"""The attention of all layers of a rank: their caches in the GPU's memory, and what a step's rows attend to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from motley.plugins.engine import RankGraph, Span
from motley.plugins.mapped_share import Array
from motley.plugins.nodes import attributes_of
from motley.plugins.segments import Kernel
from motley.plugins.webgpu.attention import AttentionSessions, Heads, mask_session
from motley.plugins.webgpu.device import Place, Run, WebGpuDevice
from motley.plugins.webgpu.groups import Group, grouped, slots_of

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
    sinks: Place | None


@dataclass(frozen=True)
class _GroupPlaces:
    """Where a `Group` is in the GPU's memory, and its mask for each window that layers have.

    Attributes:
        places: i64[S, R, 1], the numbers in `rows`.
        make_masks: makes these of `positions`.
    """

    rows: Place
    places: Place
    slots: Place
    positions: Place
    masks: Mapping[int, Place]
    make_masks: Sequence[Run]


class StepRows:
    """What attention needs of a step of T rows besides its groups, in the GPU's memory.

    Attributes:
        count: T.
        order: i64[1, T], the numbers of the rows.
        slots: i64[T, 1], where their keys and values go.
        tables: of each table that rows turn by, f32[T, r/2].
        queries: f32[T, heads * d], turned, by that width.
        writes: what turns the rows of a layer and caches them, by the name of its result.
        groups: the groups of the step under way.
        in_order: whether that is one group, of all rows in their order.
        kept: places for groups, by their number in a step and shape.
    """

    def __init__(self, device: WebGpuDevice, count: int, tables: Mapping[str, int]) -> None:
        """`tables`: the widths of those that rows turn by, by name."""
        self.count = count
        self.order = device.array(np.arange(count)[None])
        self.slots = device.empty((count, 1), np.int64)
        self.tables = {name: device.empty((count, width)) for name, width in tables.items()}
        self.queries: dict[int, Place] = {}
        self.writes: dict[str, Run] = {}
        self.groups: list[_GroupPlaces] = []
        self.in_order = False
        self.kept: OrderedDict[tuple[int, int, int, int], _GroupPlaces] = OrderedDict()


class Attending:
    """The attentions of a rank, their caches, and the groups of the step under way."""

    def __init__(self, device: WebGpuDevice, graph: RankGraph) -> None:
        """
        Raises:
            EngineMemoryError: the GPU's memory has no room for the caches.
        """
        self._device = device
        self._graph = graph
        self._nothing = graph.blocks.count * graph.blocks.tokens
        """The slot that stays zero."""
        self.caches = {
            f"{kind}_cache.{spec.layer}": device.empty((self._nothing + 1, spec.heads * spec.head_dim))
            for spec in graph.caches
            for kind in ("key", "value")
        }
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
        return StepRows(self._device, count, self._tables)

    def begin(self, rows: StepRows, spans: Sequence[tuple[int, Span]]) -> None:
        """Upload what all layers read of a step: the rotary tables of its rows, their slots, and its groups.

        Args:
            spans: each with its first row.
        """
        if not self._masks:
            return
        rows.groups.clear()
        device, graph = self._device, self._graph
        own = [slots_of(span, span.position, span.position + span.rows, graph.blocks.tokens) for _, span in spans]
        device.write(np.concatenate(own)[:, None], rows.slots)
        tables = [(span, graph.constants(span.prompt)) for _, span in spans]
        for name, place in rows.tables.items():
            turning = [table[name][span.position : span.position + span.rows] for span, table in tables]
            device.write(np.concatenate(turning), place)
        groups = grouped(spans, graph.blocks.tokens, self._most_heads, self._nothing)
        rows.groups += [self._placed(rows, number, group) for number, group in enumerate(groups)]
        numbers = groups[0].rows.ravel()
        rows.in_order = len(groups) == 1 and np.array_equal(numbers, np.arange(rows.count))

    def attend(self, rows: StepRows, attention: Attention, places: Mapping[str, Place]) -> None:
        """Cache the keys and values of a step's rows in one layer, and have its groups attend.

        Args:
            places: of what the attention reads and makes, by name.
        """
        device, sessions = self._device, attention.sessions
        heads = sessions.heads
        width = heads.heads * heads.width
        if width not in rows.queries:
            rows.queries[width] = device.empty((rows.count, width))
        cached = {"keys": self.caches[attention.keys], "values": self.caches[attention.values]}
        queries, y = rows.queries[width], places[attention.y]
        if attention.y not in rows.writes:
            inputs = {"qkv": places[attention.qkv], "slots": rows.slots, **cached}
            if heads.rotary:
                turning = {"cos": rows.tables[attention.cos], "sin": rows.tables[attention.sin], "order": rows.order}
                inputs |= turning
            outputs = {"queries": queries} | {f"{name}.out": cache for name, cache in cached.items()}
            rows.writes[attention.y] = device.bind(sessions.write, inputs, outputs)
        rows.writes[attention.y]()
        for group in rows.groups:
            mask = group.masks[attention.window]
            inputs = {"queries": queries, "rows": group.rows, "slots": group.slots, "mask": mask, **cached}
            if attention.sinks is not None:
                inputs["sinks"] = attention.sinks
            if rows.in_order:
                device.bind(sessions.attend, inputs, {"y": y})()
            else:
                device.bind(sessions.attend_some, inputs | {"y.before": y, "places": group.places}, {"y": y})()

    def close(self) -> None:
        """Let go of the caches and all else."""
        self.caches.clear()
        self._sessions.clear()
        self._masks.clear()

    def _placed(self, rows: StepRows, number: int, group: Group) -> _GroupPlaces:
        """Upload a group of a step, and have its masks made."""
        device, key = self._device, (number, *group.shape)
        if key not in rows.kept:
            pieces, count, seen = group.shape
            positions = device.array(group.positions)
            known = device.array(np.arange(seen, dtype=np.float32))
            masks = {window: device.empty((pieces, 1, 1, count, seen)) for window in self._masks}
            make = [
                device.bind(session, {"positions": positions, "seen": known}, {"mask": masks[window]})
                for window, session in self._masks.items()
            ]
            rows.kept[key] = _GroupPlaces(
                rows=device.array(group.rows),
                places=device.array(group.rows[:, :, None]),
                slots=device.array(group.slots),
                positions=positions,
                masks=masks,
                make_masks=make,
            )
            while len(rows.kept) > GROUPS_KEPT:
                rows.kept.popitem(last=False)
        rows.kept.move_to_end(key)
        places = rows.kept[key]
        device.write(group.rows, places.rows)
        device.write(group.rows[:, :, None], places.places)
        device.write(group.slots, places.slots)
        device.write(group.positions, places.positions)
        for make_mask in places.make_masks:
            make_mask()
        return places
