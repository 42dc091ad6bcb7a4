"""Rows that are made where they are read: normalised, gated or as they are; quantised for products, once for all."""

from __future__ import annotations

from motley.plugins.cuda.adapting import Adapting
from motley.plugins.cuda.device_graph import DeviceGraph
from motley.plugins.cuda.kernels import NORM_PART, THREADS, Coded, RowSource, View, integers, pointer
from motley.plugins.cuda.nodes.submission import StepRows, Submission
from motley.plugins.engine import Collectives


class Making(Submission):
    """How rows are made, and quantised."""

    def __init__(
        self, graph: DeviceGraph, summing: Collectives, step: StepRows, adapting: Adapting | None = None
    ) -> None:
        super().__init__(graph, summing, step, adapting)
        self._held: dict[tuple[Coded, int], tuple[str, str]] = {}
        """The value that is quantised in the place for such products, and by which kernel; by the place's rows."""

    def _make(self, name: str, source: RowSource, y: View) -> None:
        """Make the rows of a value, in its place `y`: as floats, or quantised as its products take it, or both."""
        quantised, count = self._graph.quantised.get(name), self._count
        if quantised is None or not source.in_fours:
            self._made_floats(source, y, count)
            return
        if quantised.read_as_floats or self._adapting is not None:
            source = source.kept(y)
        coded = quantised.coded
        self._quantise(name, source, coded, coded.quantise(count), count, self._graph.max_rows)

    def _made_floats(self, source: RowSource, y: View, rows: int) -> RowSource:
        """Make rows as floats; what reads them."""
        self._graph.launch("make_rows", rows * -(-source.width // NORM_PART) * THREADS, source.kept(y))
        return RowSource.of(y)

    def _quantised(self, name: str, source: RowSource, coded: Coded, kernel: str, count: int, room: int) -> int:
        """The address of a value's rows, quantised by a kernel for products by such codes, in a place for `room` of
        them; several products have the same value."""
        if self._held.get((coded, room)) == (name, kernel):
            return self._quantised_place(coded, room)
        return self._quantise(name, source, coded, kernel, count, room)

    def _quantise(self, name: str, source: RowSource, coded: Coded, kernel: str, count: int, room: int) -> int:
        """Quantise the rows of a value as they are made; see `_quantised`."""
        assert source.in_fours, "rows of codes are whole runs of four, and so are all rows of values"
        self._held[coded, room] = name, kernel
        there = self._quantised_place(coded, room)
        shape = integers(coded.columns, coded.shift, coded.stretches)
        self._graph.launch(kernel, count * coded.quantising_threads, source, pointer(there), *shape)
        return there

    def _quantised_place(self, coded: Coded, room: int) -> int:
        return self._graph.buffer(f"quantised for {coded}", coded.activation_bytes(room) // 4, 1).address
