"""What adapters add to the products of a rank on a GPU: their matrices in its memory, and whose rows are whose.

Each adapter that has rows in a step gathers these, multiplies them with its own matrices, and puts back what it has
added to, so no other row is touched. A step without adapters runs nothing of this.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from weakref import WeakSet

import numpy as np
import onnxruntime as ort
from onnx import helper, numpy_helper

from motley.plugins.adapted_engine import AdapterProduct, Factor, PreparedAdapter
from motley.plugins.adapters import AdapterSlots, parts_of
from motley.plugins.engine import RankGraph, Span
from motley.plugins.onnxruntime_gpu.device import Action, Gpu, Mirror, carry_out, declared, upload
from motley.plugins.segments import Kernel

GROUPS_KEPT = 64
"""Groups of rows, by adapter and number of rows, that stay bound to a chunk; more if one step has more."""


@dataclass(frozen=True)
class Adapt:
    """What adapters add to a product.

    Attributes:
        session: adds what one adapter makes of some rows.
        x: the name of what the product is made of.
        product, y: the names of the product before and after; both are in the same place.
        parts: the names of what lies side by side in it, by which adapters know them.
        absent: what stands for an adapter's matrices for a part that it leaves alone.
    """

    session: ort.InferenceSession
    x: str
    product: str
    y: str
    parts: Sequence[str]
    absent: Mapping[str, Factors]


Factors = tuple[ort.OrtValue, ort.OrtValue]
"""Of a part, in the GPU's memory: f32[K, R] and f32[R, N]."""


@dataclass(eq=False)
class _Group:
    """The rows of a step that one adapter computes.

    Attributes:
        rows: i64[n, 1], their numbers.
        adapter: whose matrices `runs` are bound to.
        runs: what adds to a product, bound once, by the name of its result; None: the adapter leaves it alone.
    """

    rows: Mirror
    adapter: PreparedAdapter
    runs: dict[str, Action | None] = field(default_factory=dict)


class AdaptedRows:
    """The rows of a chunk, or of its head, that adapters compute.

    Attributes:
        kept: places for groups, by slot and number of rows.
        groups: those of the step under way.
        slots: the rows of each slot's adapter in it.
        products: what is added to, and by which actions in the step under way.
    """

    def __init__(self) -> None:
        self.kept: OrderedDict[tuple[int, int], _Group] = OrderedDict()
        self.groups: list[_Group] = []
        self.slots: dict[int, list[int]] = {}
        self.products: list[tuple[Adapt, Mapping[str, ort.OrtValue], list[Action]]] = []

    def clear(self) -> None:
        """Let no adapter compute any."""
        self.groups = []
        for _, _, actions in self.products:
            actions.clear()


class Adapting:
    """The adapters of a rank, in their slots."""

    def __init__(self, device: Gpu, engine: str, graph: RankGraph) -> None:
        self._device = device
        self._slots = AdapterSlots(engine, graph)
        self._loaded: dict[int, PreparedAdapter] = {}
        self._rows = WeakSet[AdaptedRows]()
        self._sessions: dict[tuple[int, ...], ort.InferenceSession] = {}
        """By the widths of what lies side by side in a product."""
        self._absent: dict[tuple[int, int], Factors] = {}
        """By the columns of x, and of the part."""

    def add(self, then: Kernel) -> tuple[Adapt, dict[str, int]]:
        """Prepare an Adapted node.

        Returns:
            What computes it, and the width of its operands and result by their names.

        Raises:
            EngineError: the provider lacks what it needs.
        """
        parts, widths, columns = zip(*parts_of(then.node), strict=True)
        if widths not in self._sessions:
            self._sessions[widths] = _session(self._device, widths)
        for width in widths:
            if (columns[0], width) not in self._absent:
                zeros = (np.zeros(shape, np.float32) for shape in ((columns[0], 1), (1, width)))
                down, up = map(self._device.array, zeros)
                self._absent[columns[0], width] = down, up
        (x, product), (y,) = then.operands, then.results
        absent = {part: self._absent[columns[0], width] for part, width in zip(parts, widths, strict=True)}
        adapt = Adapt(self._sessions[widths], x, product, y, parts, absent)
        return adapt, {x: columns[0], product: sum(widths), y: sum(widths)}

    def prepare(self, products: Mapping[str, AdapterProduct], whole: Mapping[str, Factor] | None) -> PreparedAdapter:
        """See `motley.plugins.adapted_engine.AdaptedEngine.prepare_adapter`; `whole` is refused."""
        self._slots.refuse_whole(whole)
        parts = {}
        size = 0
        for part, product in self._slots.fitting(products).items():
            down, up = (np.ascontiguousarray(each.T, np.float32) for each in product)
            parts[part] = self._device.array(down), self._device.array(up)
            size += down.nbytes + up.nbytes
        return PreparedAdapter(parts, size)

    def load(self, slot: int, adapter: PreparedAdapter) -> None:
        """See `motley.plugins.adapted_engine.AdaptedEngine.load_adapter`."""
        self.unload(slot)
        self._loaded[slot] = adapter
        self._slots.taken.add(slot)

    def unload(self, slot: int) -> None:
        """See `motley.plugins.adapted_engine.AdaptedEngine.unload_adapter`."""
        self._slots.check(slot)
        self._loaded.pop(slot, None)
        self._slots.taken.discard(slot)
        for rows in self._rows:  # what is bound would keep its matrices in the GPU's memory
            rows.clear()
            for key in [key for key in rows.kept if key[0] == slot]:
                del rows.kept[key]

    def rows(self) -> AdaptedRows:
        """Make places for which rows of a chunk, or of its head, adapters compute."""
        rows = AdaptedRows()
        self._rows.add(rows)
        return rows

    def begin(self, rows: AdaptedRows, spans: Sequence[Span], head: bool = False) -> None:
        """Say which rows adapters compute, and upload it.

        Args:
            head: of the rows that get logits, and have numbers of their own.

        Raises:
            EngineError: a span's slot has no adapter.
        """
        found = rows.slots = self._slots.rows(spans, head)
        groups = [self._group(rows, slot, own) for slot, own in found.items()]
        while len(rows.kept) > max(GROUPS_KEPT, len(found)):
            rows.kept.popitem(last=False)
        if groups != rows.groups:
            rows.clear()
            for adapt, places, actions in rows.products:
                added = [self._run(group, adapt, places) for group in groups]
                actions += [run for run in added if run is not None]
            rows.groups = groups

    def actions(self, rows: AdaptedRows, adapt: Adapt, places: Mapping[str, ort.OrtValue]) -> Sequence[Action]:
        """What adds to a product what the adapters of a step's rows make of them: `begin` changes it.

        Args:
            places: of x and y, by name.
        """
        actions: list[Action] = []
        rows.products.append((adapt, places, actions))
        return actions

    def close(self) -> None:
        """Let go of all adapters."""
        for kept in (self._loaded, self._sessions, self._absent):
            kept.clear()

    def _group(self, rows: AdaptedRows, slot: int, own: Sequence[int]) -> _Group:
        key = slot, len(own)
        numbers = np.array(own, np.int64)[:, None]
        group = rows.kept.get(key)
        if group is None:
            group = rows.kept[key] = _Group(self._device.mirror(numbers), self._loaded[slot])
        elif not np.array_equal(group.rows.host, numbers):
            np.copyto(group.rows.host, numbers)
            carry_out([[upload([group.rows])]])
        rows.kept.move_to_end(key)
        return group

    def _run(self, group: _Group, adapt: Adapt, places: Mapping[str, ort.OrtValue]) -> Action | None:
        """What a group's adapter adds to a product; None: nothing."""
        if adapt.y not in group.runs:
            group.runs[adapt.y] = self._bind(group, adapt, places)
        return group.runs[adapt.y]

    def _bind(self, group: _Group, adapt: Adapt, places: Mapping[str, ort.OrtValue]) -> Action | None:
        own: Mapping[str, Factors] = group.adapter.parts
        if not any(part in own for part in adapt.parts):
            return None
        y = places[adapt.y]
        inputs = {"x": places[adapt.x], "y.before": y, "rows": group.rows.there}
        for number, part in enumerate(adapt.parts):
            inputs[f"down.{number}"], inputs[f"up.{number}"] = own.get(part, adapt.absent[part])
        return self._device.bind(adapt.session, inputs, {"y": y})


def _session(device: Gpu, widths: Sequence[int]) -> ort.InferenceSession:
    """What adds to some rows of y, in place, what one adapter makes of those of x.

    What it adds nothing to keeps its bits, a zero its sign.

    Args:
        widths: of the parts that lie side by side in y.
    """
    node = helper.make_node
    numbers = range(len(widths))
    nodes = [node("GatherND", ["x", "rows"], ["own.x"]), node("GatherND", ["y.before", "rows"], ["own.y"])]
    for number in numbers:
        nodes += [
            node("MatMul", ["own.x", f"down.{number}"], [f"between.{number}"]),
            node("MatMul", [f"between.{number}", f"up.{number}"], [f"made.{number}"]),
        ]
    nodes += [
        node("Concat", [f"made.{number}" for number in numbers], ["made"], axis=1),
        node("Equal", ["made", "zero"], ["nothing"]),
        node("Add", ["own.y", "made"], ["more"]),
        node("Where", ["nothing", "own.y", "more"], ["adapted"]),
        node("ScatterND", ["y.before", "rows", "adapted"], ["y"]),
    ]
    shapes: list[tuple[str, type, list[int | str]]] = [
        ("x", np.float32, ["T", "K"]),
        ("y.before", np.float32, ["T", sum(widths)]),
        ("rows", np.int64, ["n", 1]),
    ]
    factors: list[list[tuple[str, type, list[int | str]]]] = [
        [(f"down.{number}", np.float32, ["K", f"R{number}"]), (f"up.{number}", np.float32, [f"R{number}", width])]
        for number, width in enumerate(widths)
    ]
    inputs = [declared(*each) for each in chain(shapes, *factors)]
    zero = numpy_helper.from_array(np.zeros((), np.float32), "zero")
    return device.session(nodes, inputs, [declared("y", np.float32, ["T", sum(widths)])], [zero])
