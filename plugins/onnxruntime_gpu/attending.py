"""The attention of all layers of a rank: their caches in the GPU's memory, and what a step's rows attend to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import onnxruntime as ort

from motley.plugins.engine import RankGraph, Span
from motley.plugins.latest import Latest
from motley.plugins.mapped_share import Array
from motley.plugins.nodes import attributes_of
from motley.plugins.onnxruntime_gpu.attention import ORDER, SLOTS, WINDOW_SLOTS, AttentionSessions, Heads, mask_session
from motley.plugins.onnxruntime_gpu.device import Action, Gpu, Mirror, carry_out, upload
from motley.plugins.onnxruntime_gpu.groups import Group, Piece, Pieces, slots_of
from motley.plugins.segments import Kernel

CAPTURED_BYTES = 1 << 27
"""So much of the GPU's memory captures of groups may keep together, over all layers, for the keys and values that they
read."""
GROUPS_KEPT = 4
"""Shapes of groups whose places are kept for a number of rows; the one not used for longest goes first."""


@dataclass(frozen=True)
class Attention:
    """A layer's attention: its sessions, and the names of what it reads and makes.

    Attributes:
        queries: turned, f32[T, 1, heads * d].
        y: what it makes, f32[T, kv_heads, 1, heads / kv_heads, d].
        keys: the layer's cache of keys.
        values: the same of values.
        window: positions that a row sees; 0: all.
        sinks: in the GPU's memory; None: there are none.
    """

    sessions: AttentionSessions
    queries: str
    y: str
    keys: str
    values: str
    window: int
    sinks: ort.OrtValue | None


@dataclass(eq=False)
class _GroupPlaces:
    """Where a `Group` is in the GPU's memory, and its mask.

    Attributes:
        pieces: which rows are in `rows`.
        in_order: whether these are consecutive.
        rows: i64[S, R], which rows of the step they are.
        places: i64[S, R, 1], the numbers in `rows`.
        make_mask: makes the mask of `positions`.
        runs: what attends, bound once, by the result and whether the group is the whole step in its order.
    """

    pieces: Sequence[Piece]
    in_order: bool
    rows: Mirror
    places: Mirror
    slots: Mirror
    positions: Mirror
    mask: ort.OrtValue
    make_mask: Action
    runs: dict[tuple[str, bool], Action]


@dataclass(frozen=True)
class _Layer:
    """A layer's attention bound to rows of a step.

    Attributes:
        queries: where these are.
        y: where its result goes.
        actions: what has the groups of the step under way attend.
    """

    attention: Attention
    queries: ort.OrtValue
    y: ort.OrtValue
    actions: list[Action]


class _WindowGroups:
    """The groups of a step for layers of one window.

    Attributes:
        groups: those of the step under way.
        in_order: whether that is one group, of all rows in their order.
        kept: places for groups, by their number in a step and shape.
        layers: that have this window.
        pieces: how a step is cut for them.
    """

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self.groups: list[_GroupPlaces] = []
        self.in_order = False
        self.kept = Latest[tuple[int, int, int, int], _GroupPlaces](GROUPS_KEPT)
        self.layers: list[_Layer] = []


class StepRows:
    """What goes up of a step of T rows once, for all layers.

    Attributes:
        count: T.
        hidden: their embeddings.
        slots: i64[T, 1], where their keys and values go, by whether the layer has blocks of layers with a window.
        tables: of each table that rows turn by, f32[T, r/2].
        windows: the groups of the step under way, by the window of the layers that they are for.
        actions: what has all this go up, and makes the masks of the groups.
    """

    def __init__(
        self,
        device: Gpu,
        hidden: Mirror,
        tables: Mapping[str, int],
        kinds: Iterable[bool],
        windows: Mapping[int, Pieces],
    ) -> None:
        """
        Args:
            tables: the widths of those that rows turn by, by name.
            kinds: of slots.
            windows: how a step is cut for layers, by their windows.
        """
        self.count = count = len(hidden.host)
        self.hidden = hidden
        self.slots = {kind: device.mirror(np.zeros((count, 1), np.int64)) for kind in kinds}
        self.tables = {name: device.mirror(np.zeros((count, width), np.float32)) for name, width in tables.items()}
        self.windows = {window: _WindowGroups(pieces) for window, pieces in windows.items()}
        self.actions = [upload([hidden])]


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
        self._captured = WeakKeyDictionary[_GroupPlaces, int]()
        """Bytes that the captures of groups keep."""

    def add(self, then: Kernel, sinks: Array | None) -> Attention:
        """Prepare the attention of a layer.

        Args:
            sinks: f32[heads]; None: it has none.

        Raises:
            EngineError: the provider lacks what it needs.
        """
        queries, keys, values, _, cos, sin, *_ = then.node.input
        heads = Heads.of(then.node)
        if heads not in self._sessions:
            self._sessions[heads] = AttentionSessions(self._device, heads)
        self._most_heads = max(self._most_heads, heads.heads)
        if heads.rotary:
            self._tables |= dict.fromkeys((cos, sin), heads.rotary // 2)
        window = attributes_of(then.node)["window"]
        if window not in self._masks:
            self._masks[window] = mask_session(self._device, window)
        placed = None if sinks is None else self._device.array(sinks)
        return Attention(self._sessions[heads], queries, then.results[0], keys, values, window, placed)

    def rows(self, hidden: Mirror) -> StepRows:
        """Make the places for steps of as many rows as `hidden` has."""
        pieces = {window: self._pieces(window) for window in self._masks}
        return StepRows(self._device, hidden, self._tables, {each.own_blocks for each in pieces.values()}, pieces)

    def places(self, rows: StepRows) -> dict[str, ort.OrtValue]:
        """Where the values are that nodes read and make of all rows, or of the caches, by name."""
        slots = {
            WINDOW_SLOTS if window else SLOTS: rows.slots[kept.pieces.own_blocks].there
            for window, kept in rows.windows.items()
        }
        tables = {name: table.there for name, table in rows.tables.items()}
        written = {f"{name}.out": cache for name, cache in self.caches.items()}
        return {ORDER: self._device.array(np.arange(rows.count)[:, None]), **slots, **tables, **self.caches, **written}

    def begin(self, rows: StepRows, spans: Sequence[tuple[int, Span]]) -> None:
        """Prepare what goes up for a step: the rotary tables of its rows, their slots, and its groups.

        Args:
            spans: each with its first row.
        """
        if not self._masks:
            return
        graph, tokens = self._graph, self._graph.blocks.tokens
        for own_blocks, slots in rows.slots.items():
            for row, span in spans:
                own = slots_of(span, own_blocks, span.position, span.position + span.rows, tokens)
                slots.host[row : row + span.rows, 0] = own
        for row, span in spans:
            tables = graph.constants(span.prompt)
            for name, turning in rows.tables.items():
                turning.host[row : row + span.rows] = tables[name][span.position : span.position + span.rows]
        changed = False
        for kept in rows.windows.values():
            placed = [self._placed(kept, *each) for each in enumerate(kept.pieces.grouped(spans))]
            in_order = len(placed) == 1 and placed[0].in_order
            if placed != kept.groups or in_order != kept.in_order:
                kept.groups = []  # none of them, should what follows fail
                for layer in kept.layers:
                    layer.actions[:] = [self._attend(group, layer, in_order, len(kept.layers)) for group in placed]
                kept.groups, kept.in_order, changed = placed, in_order, True
        if changed:
            groups_now = [group for kept in rows.windows.values() for group in kept.groups]
            numbers = [mirror for group in groups_now for mirror in (group.slots, group.positions)]
            put = upload([rows.hidden, *rows.slots.values(), *rows.tables.values(), *numbers])
            rows.actions[:] = [put, *(group.make_mask for group in groups_now)]

    def actions(self, rows: StepRows, attention: Attention, places: Mapping[str, ort.OrtValue]) -> Sequence[Action]:
        """What has the groups of a step attend in one layer: `begin` changes it.

        Args:
            places: of what the attention reads and makes, by name.
        """
        layer = _Layer(attention, places[attention.queries], places[attention.y], [])
        rows.windows[attention.window].layers.append(layer)
        return layer.actions

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

    def _attend(self, group: _GroupPlaces, layer: _Layer, in_order: bool, layers: int) -> Action:
        """What has a group attend in one layer of so many."""
        key = layer.attention.y, in_order
        if key not in group.runs:
            group.runs[key] = self._bind_attend(group, layer, in_order, layers)
        return group.runs[key]

    def _bind_attend(self, group: _GroupPlaces, layer: _Layer, in_order: bool, layers: int) -> Action:
        attention, y, sessions = layer.attention, layer.y, layer.attention.sessions
        inputs = {
            "queries": layer.queries,
            "slots": group.slots.there,
            "mask": group.mask,
            "keys": self.caches[attention.keys],
            "values": self.caches[attention.values],
        }
        if attention.sinks is not None:
            inputs["sinks"] = attention.sinks
        if in_order and group.rows.host.shape[1] == 1:
            kept = 4 * group.slots.host.size * self.caches[attention.keys].shape()[1] * np.float32().nbytes
            captured = self._device.captures(len(group.rows.host)) and self._has_room(group, layers * kept)
            return self._device.bind(sessions.attend_tokens, inputs, {"y": y}, captured)
        inputs["rows"] = group.rows.there
        if in_order:
            return self._device.bind(sessions.attend, inputs, {"y": y})
        return self._device.bind(sessions.attend_some, inputs | {"y.before": y, "places": group.places.there}, {"y": y})

    def _has_room(self, group: _GroupPlaces, size: int) -> bool:
        """Whether a group's captures, which keep so many bytes, have room beside those of all groups that are kept. If
        so, they have it from then on."""
        if group not in self._captured and sum(self._captured.values()) + size <= CAPTURED_BYTES:
            self._captured[group] = size
        return group in self._captured

    def _placed(self, kept: _WindowGroups, number: int, group: Group) -> _GroupPlaces:
        """Give a group of a step its places, whose slots and positions are yet to go up."""
        window = kept.pieces.window
        places = kept.kept.get((number, *group.shape), lambda: self._new_places(group.shape, window))
        if places.pieces != group.pieces:
            numbers = group.rows()
            np.copyto(places.rows.host, numbers)  # which `places` shares
            carry_out([[upload([places.rows, places.places])]])
            places.pieces, places.in_order = group.pieces, numbers.ravel().tolist() == [*range(numbers.size)]
        kept.pieces.fill(group, places.slots.host, places.positions.host)
        return places

    def _new_places(self, shape: tuple[int, int, int], window: int) -> _GroupPlaces:
        device = self._device
        pieces, count, seen = shape
        rows = np.zeros((pieces, count), np.int64)
        positions = device.mirror(np.zeros((pieces, count), np.float32))
        known = device.array(np.arange(seen, dtype=np.float32))
        mask = device.empty((pieces, 1, 1, count, seen))
        make = device.bind(self._masks[window], {"positions": positions.there, "seen": known}, {"mask": mask}, True)
        return _GroupPlaces(
            pieces=(),
            in_order=False,
            rows=device.mirror(rows),
            places=device.mirror(rows[:, :, None]),
            slots=device.mirror(np.zeros((pieces, seen), np.int64)),
            positions=positions,
            mask=mask,
            make_mask=make,
            runs={},
        )
