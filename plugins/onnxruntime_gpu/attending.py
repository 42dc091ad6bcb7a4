"""The attention of all layers of a rank: their caches in the GPU's memory, and what a step's rows attend to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import onnxruntime as ort

from motley.plugins.engine import F32, EngineError, RankGraph, Span
from motley.plugins.latest import Latest
from motley.plugins.mapped_share import Array
from motley.plugins.nodes import attributes_of
from motley.plugins.onnxruntime_gpu.attention import (
    ORDER,
    SLOTS,
    WINDOW_SLOTS,
    AttentionSessions,
    Heads,
    group_session,
    unpacking_session,
)
from motley.plugins.onnxruntime_gpu.device import Action, Gpu, Mirror, carry_out, upload
from motley.plugins.onnxruntime_gpu.groups import Group, Piece, Pieces, slots_of
from motley.plugins.segments import Kernel

CAPTURED_BYTES = 1 << 27
"""So much of the GPU's memory captures of groups may keep together, over all layers, for the keys and values that they
read."""
MOST_SLOTS = 1 << 24
"""Slots go up among floats, which tell integers apart up to here."""
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
    """Where a `Group` is in the GPU's memory.

    Attributes:
        pieces: which rows are in `rows`.
        in_order: whether these are consecutive.
        rows: i64[S, R], which rows of the step they are.
        places: i64[S, R, 1], the numbers in `rows`.
        found: f32[S, C], the slots of the positions that its pieces may see.
        slots: i64[S, C], of those that they see.
        mask: what is added to their scores.
        make_mask: makes `slots` and `mask`.
        runs: what attends, bound once, by the result and whether the group is the whole step in its order.
    """

    pieces: Sequence[Piece]
    in_order: bool
    rows: Mirror
    places: Mirror
    found: Mirror
    slots: ort.OrtValue
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
    """What goes up of a step of T rows for all layers, as one array: to copy one takes as long as to copy another.

    Attributes:
        count: T.
        hidden: f32[T, D], their embeddings.
        tables: of each table that rows turn by, f32[T, r/2].
        stands: f32[T], where they stand in their groups, by the window of the layers that these are for.
        slots: f32[T], where their keys and values go, by what nodes call that.
        there: all of these in the GPU's memory, by name.
        windows: the groups of the step under way, by the window of the layers that they are for.
        upload: what has all this go up.
        actions: that, and what makes the masks of the groups.
    """

    def __init__(
        self,
        device: Gpu,
        unpacking: ort.InferenceSession,
        hidden: ort.OrtValue,
        floats: Mapping[str, int],
        slots: Sequence[str],
        windows: Mapping[int, Pieces],
    ) -> None:
        """
        Args:
            unpacking: what takes the array apart (`unpacking_session`): into `floats` and `slots`.
            hidden: where the embeddings go.
            windows: how a step is cut for layers, by their windows.
        """
        self.count = count = hidden.shape()[0]
        widths = {**floats, **dict.fromkeys(slots, 1)}
        packed = device.mirror(np.zeros((count, sum(widths.values())), np.float32))
        ends = np.cumsum([*widths.values()])[:-1]
        parts = dict(zip(widths, np.split(packed.host, ends, axis=1), strict=True))
        self.hidden: F32 = parts.pop("hidden")
        self.stands: dict[int, F32] = {window: parts.pop(_stands(window))[:, 0] for window in windows}
        self.slots: dict[str, F32] = {name: parts.pop(name)[:, 0] for name in slots}
        self.tables: dict[str, F32] = parts
        self.windows = {window: _WindowGroups(pieces) for window, pieces in windows.items()}
        kinds = dict.fromkeys(slots, np.int64)
        self.there = {
            name: hidden if name == "hidden" else device.empty((count, width), kinds.get(name, np.float32))
            for name, width in widths.items()
        }
        self.upload = [
            upload([packed]),
            device.bind(unpacking, {"packed": packed.there}, self.there, device.captures(count)),
        ]
        self.actions = [*self.upload]


def _stands(window: int) -> str:
    """What is called where rows stand in their groups for layers of a window."""
    return f"stands.{window}"


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
        self._kept: type[np.floating[Any]] = np.float16 if blocks.format == "fp16" else np.float32
        """What keys and values are in the caches."""
        self.caches = {
            f"{kind}_cache.{spec.layer}": device.empty(
                (blocks.count_of(spec) * blocks.tokens + 1, spec.heads * spec.head_dim), self._kept
            )
            for spec in graph.caches
            for kind in ("key", "value")
        }
        """Of each layer, the slot after all those of its blocks stays zero."""
        self._sessions: dict[Heads, AttentionSessions] = {}
        self._tables: dict[str, int] = {}
        """The widths of the tables that layers turn by, by name."""
        self._most_heads = 1
        self._group_sessions: dict[int, ort.InferenceSession] = {}
        """What makes masks and slots of groups, by the window of the layers that they are for."""
        self._unpacking: ort.InferenceSession | None = None
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
            self._sessions[heads] = AttentionSessions(self._device, heads, self._kept)
        self._most_heads = max(self._most_heads, heads.heads)
        if heads.rotary:
            self._tables |= dict.fromkeys((cos, sin), heads.rotary // 2)
        window = attributes_of(then.node)["window"]
        if window not in self._group_sessions:
            self._group_sessions[window] = group_session(self._device, window, self._nothing(window))
        placed = None if sinks is None else self._device.array(sinks)
        return Attention(self._sessions[heads], queries, then.results[0], keys, values, window, placed)

    def rows(self, hidden: ort.OrtValue) -> StepRows:
        """Make the places for steps of as many rows as there is room for embeddings."""
        windows = {window: self._pieces(window) for window in self._group_sessions}
        floats = {"hidden": self._graph.hidden, **self._tables, **dict.fromkeys(map(_stands, windows), 1)}
        slots = sorted({_slots_name(each.own_blocks) for each in windows.values()})
        if self._unpacking is None:
            self._unpacking = unpacking_session(self._device, floats, slots)
        return StepRows(self._device, self._unpacking, hidden, floats, slots, windows)

    def places(self, rows: StepRows) -> dict[str, ort.OrtValue]:
        """Where the values are that nodes read and make of all rows, or of the caches, by name."""
        slots = {
            WINDOW_SLOTS if window else SLOTS: rows.there[_slots_name(kept.pieces.own_blocks)]
            for window, kept in rows.windows.items()
        }
        written = {written_name(name): cache for name, cache in self.caches.items()}
        order = self._device.array(np.arange(rows.count)[:, None])
        return {ORDER: order, **rows.there, **slots, **self.caches, **written}

    def begin(self, rows: StepRows, spans: Sequence[tuple[int, Span]]) -> None:
        """Prepare what goes up for a step: the rotary tables of its rows, their slots, and its groups.

        Args:
            spans: each with its first row.
        """
        graph, tokens = self._graph, self._graph.blocks.tokens
        for name, slots in rows.slots.items():
            for row, span in spans:
                own = slots_of(span, name == WINDOW_SLOTS, span.position, span.position + span.rows, tokens)
                slots[row : row + span.rows] = own
        for row, span in spans:
            tables = graph.constants(span.prompt)
            for name, turning in rows.tables.items():
                turning[row : row + span.rows] = tables[name][span.position : span.position + span.rows]
        changed = False
        for window, kept in rows.windows.items():
            placed = [self._placed(rows, window, *each) for each in enumerate(kept.pieces.grouped(spans))]
            in_order = len(placed) == 1 and placed[0].in_order
            if placed != kept.groups or in_order != kept.in_order:
                kept.groups = []  # none of them, should what follows fail
                for layer in kept.layers:
                    layer.actions[:] = [self._attend(group, layer, in_order, len(kept.layers)) for group in placed]
                kept.groups, kept.in_order, changed = placed, in_order, True
        if changed:
            masks = (group.make_mask for kept in rows.windows.values() for group in kept.groups)
            rows.actions[:] = [*rows.upload, *masks]

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
        self._group_sessions.clear()
        self._unpacking = None

    def _has_own_blocks(self, window: int) -> bool:
        """Whether layers of a window have blocks of their own."""
        return bool(window and self._graph.blocks.windowed)

    def _pieces(self, window: int) -> Pieces:
        """How a step is cut for layers of a window."""
        return Pieces(self._graph.blocks.tokens, self._most_heads, window, self._has_own_blocks(window))

    def _nothing(self, window: int) -> int:
        """The slot that stays zero, of layers of a window.

        Raises:
            EngineError: there are more slots than the numbers that go up can tell.
        """
        blocks = self._graph.blocks
        nothing = (blocks.windowed if self._has_own_blocks(window) else blocks.count) * blocks.tokens
        if nothing > MOST_SLOTS:
            raise EngineError(
                f"engine {self._device.provider.engine!r} keeps at most {MOST_SLOTS} positions in its caches,"
                f" not {nothing}: ask for fewer (--cache-tokens)"
            )
        return nothing

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
            "slots": group.slots,
            "mask": group.mask,
            "keys": self.caches[attention.keys],
            "values": self.caches[attention.values],
        }
        if attention.sinks is not None:
            inputs["sinks"] = attention.sinks
        if in_order and group.rows.host.shape[1] == 1:
            arrays = 4 if self._kept is np.float32 else 5  # gathered, turned and, where they are half as long, cast
            kept = arrays * group.found.host.size * self.caches[attention.keys].shape()[1] * np.float32().nbytes
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

    def _placed(self, rows: StepRows, window: int, number: int, group: Group) -> _GroupPlaces:
        """Give a group of a step its places, and say where its rows stand, which is yet to go up."""
        kept = rows.windows[window]
        places = kept.kept.get((number, *group.shape), lambda: self._new_places(rows, group.shape, window))
        if places.pieces != group.pieces:
            numbers = group.rows()
            np.copyto(places.rows.host, numbers)  # which `places` shares
            carry_out([[upload([places.rows, places.places])]])
            places.pieces, places.in_order = group.pieces, numbers.ravel().tolist() == [*range(numbers.size)]
        if kept.pieces.write_slots(group, places.found.host):
            try:
                carry_out([[upload([places.found])]])
            except BaseException:
                places.found.host.fill(-1)  # they have not gone up
                raise
        kept.pieces.write_positions(group, rows.stands[window])
        return places

    def _new_places(self, step: StepRows, shape: tuple[int, int, int], window: int) -> _GroupPlaces:
        device = self._device
        pieces, count, seen = shape
        numbers = np.zeros((pieces, count), np.int64)
        rows, found = device.mirror(numbers), device.mirror(np.zeros((pieces, seen), np.float32))
        inputs = {
            "stands": step.there[_stands(window)],
            "rows": rows.there,
            "seen": device.array(np.arange(seen, dtype=np.float32)),
            "found": found.there,
        }
        slots, mask = device.empty((pieces, seen), np.int64), device.empty((pieces, 1, 1, count, seen))
        return _GroupPlaces(
            pieces=(),
            in_order=False,
            rows=rows,
            places=device.mirror(numbers[:, :, None]),
            found=found,
            slots=slots,
            mask=mask,
            make_mask=device.bind(self._group_sessions[window], inputs, {"slots": slots, "mask": mask}, captured=True),
            runs={},
        )


def written_name(cache: str) -> str:
    """What nodes call a cache, by its name, after they have written to it."""
    return f"{cache}.out"


def _slots_name(own_blocks: bool) -> str:
    """What the slots are called of layers that have blocks of their own, or of the others."""
    return WINDOW_SLOTS if own_blocks else SLOTS
