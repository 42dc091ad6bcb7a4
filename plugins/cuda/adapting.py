"""What adapters add to the products of a rank on the device: their matrices there, and a table of what is in slots.

Each row of a step finds its slot in its `PLACE`, and a slot's matrices in the table, both on the device: so a captured
step serves whichever adapters. Matrices are float32. A step in which no row has an adapter submits nothing of this.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx

from motley.plugins.adapted_engine import AdapterProduct, Factor, PreparedAdapter
from motley.plugins.adapters import AdapterSlots, is_adapted, parts_of
from motley.plugins.cuda.device_graph import STEP_S, DeviceGraph
from motley.plugins.cuda.kernels import WARP, View, integers, pointer, rows_of
from motley.plugins.engine import RankGraph, Span
from motley.transport.cuda.driver import Driver
from motley.transport.cuda.host_step import HostStep
from motley.transport.cuda.stream import CudaStream

FACTORS = np.dtype([("down", "u8"), ("up", "u8"), ("rank", "i8")])
"""`AdaptedFactors` in the source: the addresses of f32[R, K] and f32[R, N], and R; all 0: nothing is added."""
PART = np.dtype([("begin", "i8"), ("width", "i8")])
"""`AdaptedPart` in the source: the columns of a product that lie side by side with others."""


@dataclass(frozen=True)
class _Product:
    """What adapters may add to.

    Attributes:
        first: the number of its first part, of those of all products.
        widths: of its parts.
        columns: of what it is made of.
    """

    first: int
    widths: Sequence[int]
    columns: int


class _Memory:
    """Memory of the device that an adapter has, given back when nothing refers to it, or by `free`."""

    def __init__(self, driver: Driver, address: int) -> None:
        self.free = weakref.finalize(self, _free, driver, address)


class _Factors(NamedTuple):
    """What an adapter has for a part: the values of a `FACTORS`, and the memory in which its matrices are."""

    down: int
    up: int
    rank: int
    memory: _Memory


class Adapting:
    """The adapters of a rank, in their slots.

    Attributes:
        most: ranks that steps compute of each adapter; none has more.
    """

    def __init__(self, graph: RankGraph, device: DeviceGraph) -> None:
        """
        Raises:
            CudaError: too little memory.
        """
        self._device = device
        self._slots = AdapterSlots("cuda", graph)
        self._count = graph.adapters + 1
        self._parts: dict[str, int] = {}
        """The numbers of the parts of all products, by their names."""
        self._products: dict[str, _Product] = {}
        """By what they make."""
        shapes = []
        for node in filter(is_adapted, graph.proto.graph.node):
            names, widths, columns = zip(*parts_of(node), strict=True)
            self._products[node.output[0]] = _Product(len(self._parts), widths, columns[0])
            self._parts |= {name: len(self._parts) + number for number, name in enumerate(names)}
            shapes += [(end - width, width) for end, width in zip(np.cumsum(widths), widths, strict=True)]
        self._memory = weakref.WeakSet[_Memory]()
        self._loaded: dict[int, PreparedAdapter] = {}
        self.most = 0
        self._table = np.zeros((len(shapes), self._count), FACTORS)
        if not shapes:
            return
        parts = np.array(shapes, PART)
        self._pinned = device.pinned(len(parts) * self._count * FACTORS.itemsize)
        self._pinned[:] = 0
        self._table = self._pinned.view(FACTORS).reshape(len(parts), self._count)
        self._table_address = device.allocate(self._pinned.nbytes)
        self._parts_address = device.allocate(parts.nbytes)
        device.send(self._parts_address, parts.view(np.uint8))
        self._send_table()

    def prepare(self, products: Mapping[str, AdapterProduct], whole: Mapping[str, Factor] | None) -> PreparedAdapter:
        """See `motley.plugins.adapted_engine.AdaptedEngine.prepare_adapter`; `whole` is refused.

        Raises:
            CudaError: too little memory, or the device has failed.
        """
        self._slots.refuse_whole(whole)
        fitting = self._slots.fitting(products)
        size = sum(4 * factor.size for each in fitting.values() for factor in each)
        driver = self._device.stream.driver
        driver.attach()
        there = driver.allocate(max(1, size))
        memory = _Memory(driver, there)
        self._memory.add(memory)
        factors = {}
        try:
            staging = driver.allocate_pinned(max(4, size))
            try:
                floats, at = staging.host[:size].view(np.float32), 0
                for part, (down, up) in fitting.items():
                    factors[part] = _Factors(there + 4 * at, there + 4 * (at + down.size), len(down), memory)
                    for matrix in (down, up.T):
                        floats[at : at + matrix.size].reshape(matrix.shape)[...] = matrix
                        at += matrix.size
                stream = CudaStream(driver, HostStep.FUNCTION, name="adapter")  # steps go on in the engine's
                try:
                    driver.copy(there, staging.host.ctypes.data, size, stream.handle)
                    stream.synchronise(STEP_S)
                finally:
                    stream.close()
            finally:
                driver.free_pinned(staging)
        except BaseException:
            memory.free()
            raise
        return PreparedAdapter(factors, size)

    def load(self, slot: int, adapter: PreparedAdapter) -> bool:
        """See `motley.plugins.adapted_engine.AdaptedEngine.load_adapter`.

        Returns:
            Whether `most` has grown: what was captured before computes too little.
        """
        self._slots.check(slot)
        own: Mapping[str, _Factors] = adapter.parts
        self._table[:, slot] = 0
        for part, each in own.items():
            self._table[self._parts[part], slot] = each[:3]
        self._send_table()
        self._loaded[slot] = adapter
        self._slots.taken.add(slot)
        largest = max((each.rank for each in own.values()), default=0)
        if largest <= self.most:
            return False
        self.most = 1 << (largest - 1).bit_length()
        return True

    def unload(self, slot: int) -> None:
        """See `motley.plugins.adapted_engine.AdaptedEngine.unload_adapter`."""
        self._slots.check(slot)
        self._table[:, slot] = 0
        self._send_table()
        self._slots.taken.discard(slot)
        self._loaded.pop(slot, None)

    def computes(self, spans: Sequence[Span]) -> bool:
        """Whether adapters add anything to a step's rows.

        Raises:
            EngineError: a span's slot has no adapter.
        """
        return bool(self._slots.rows(spans)) and self.most > 0

    def submit(self, node: onnx.NodeProto, x: View, y: View, places: int, count: int) -> None:
        """Submit what adapters add to a product of some rows.

        Args:
            node: an Adapted node.
            x: what the product is made of.
            y: the product, which is added to in place.
            places: the address of the `PLACE` of the first of the rows.
        """
        product, device = self._products[node.output[0]], self._device
        parts = len(product.widths)
        between = device.buffer("between", parts * self.most, device.max_rows).address
        table = self._table_address + product.first * self._count * FACTORS.itemsize
        device.launch(
            "adapt_down",
            count * parts * self.most * WARP,
            *rows_of(x),
            *map(pointer, (places, table, between)),
            *integers(count, parts, self._count, product.columns, self.most),
        )
        width = sum(product.widths)
        device.launch(
            "adapt_up",
            count * width,
            *map(pointer, (between, places, table, self._parts_address + product.first * PART.itemsize)),
            *rows_of(y),
            *integers(count, parts, self._count, width, self.most),
        )

    def close(self) -> None:
        """Give back the memory of all adapters."""
        for each in list(self._memory):
            each.free()

    def _send_table(self) -> None:
        if not self._table.size:
            return
        stream = self._device.stream
        stream.driver.copy(self._table_address, self._pinned.ctypes.data, self._pinned.nbytes, stream.handle)
        self._device.finish()


def runs_of(rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Where ascending numbers follow each other: the index of the first of each run, that number, and how many."""
    runs: list[tuple[int, int, int]] = []
    for index, row in enumerate(rows):
        if runs and runs[-1][1] + runs[-1][2] == row:
            first, begin, count = runs.pop()
            runs.append((first, begin, count + 1))
        else:
            runs.append((index, row, 1))
    return runs


def _free(driver: Driver, address: int) -> None:
    driver.attach()
    driver.free(address)
