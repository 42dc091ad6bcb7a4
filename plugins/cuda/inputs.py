"""What a step is given, on its way to the device: its rows, and where each of them finds its sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from motley.plugins.cuda.device_graph import DeviceGraph
from motley.plugins.cuda.kernels import PLACE, View
from motley.plugins.cuda.recurrent_states import RECURRING, Lined, LinedUp
from motley.plugins.cuda.rotary import RotaryTables
from motley.plugins.engine import F32, RankGraph, Span
from motley.plugins.recurrent import MOST_GUESSES


class StepInputs:
    """Room for the operands of a step, pinned and on the device, so that one copy takes them there.

    First come the rows f32[T, D], then the `PLACE` of each; where layers are recurrent, how they take the rows, see
    `RecurrentStates.line_up`; then the block tables i32[...] of the spans: of each table what the span needs. Where
    layers with a window have blocks of their own, those tables of all spans follow.

    Attributes:
        rows: where the device finds the rows of every step.
    """

    def __init__(self, graph: RankGraph, device: DeviceGraph, rotary: RotaryTables, max_rows: int) -> None:
        """Allocate for steps of up to `max_rows` rows, each of which may be a span.

        Raises:
            CudaError: too little memory.
        """
        self._block = graph.blocks.tokens
        self._rotary = rotary
        self._stream = device.stream
        self._tables = 2 if graph.blocks.windowed else 1
        table = self._tables * 4 * -(-graph.context // self._block)
        self._width = graph.entering
        size = self._before_places(max_rows) + max_rows * (PLACE.itemsize + table)
        if graph.states:
            size += max_rows * RECURRING.itemsize + 4 * (max_rows + graph.blocks.slots * MOST_GUESSES)
        self._pinned = device.pinned(size)
        self._address = device.allocate(size)
        self.rows = View(self._address, self._width, self._width)

    def places(self, count: int) -> int:
        """The address of the places of a step of so many rows."""
        return self._address + self._before_places(count)

    def lined_up(self, count: int, lined: Lined) -> LinedUp:
        """Where the device finds how recurrent layers take a step of so many rows."""
        table = self.places(count) + PLACE.itemsize * count
        return LinedUp(len(lined.owners), len(lined.spans), table, table + lined.spans.nbytes)

    def send(self, hidden: F32, spans: Sequence[Span], lined: Lined) -> None:
        """Submit the copy of a step's operands; the step before must have ended.

        Args:
            lined: how recurrent layers take the rows.

        Raises:
            CudaError: too little memory for a prompt's rotary tables, or the device has failed.
        """
        count = len(hidden)
        rows = [span.rows for span in spans]
        needs = [-(-(span.position + span.rows) // self._block) for span in spans]
        blocks = [span.blocks[:need] for span, need in zip(spans, needs, strict=True)]
        if self._tables > 1:
            blocks += [
                span.windowed[:need] for span, need in zip(spans, needs, strict=True) if span.windowed is not None
            ]
        start = self._before_places(count)
        owners = start + PLACE.itemsize * count + lined.spans.nbytes
        tables = owners + lined.owners.nbytes
        *starts, end = accumulate((each.nbytes for each in blocks), initial=tables)
        found = np.reshape(starts, (-1, len(spans))) + self._address
        rotary = self._rotary.of([span.prompt for span in spans])
        firsts = [
            ((own[0], own[-1]), turns, span.position, span.adapter, 0, span.rows)
            for own, turns, span in zip(found.T, rotary, spans, strict=True)
        ]
        places = np.array(firsts, PLACE).repeat(rows)
        places["before"] = np.arange(count) - np.repeat(np.cumsum(rows) - rows, rows)
        places["position"] += places["before"]
        places["after"] -= places["before"] + 1
        np.copyto(self._pinned[: hidden.nbytes].view(np.float32).reshape(hidden.shape), hidden)
        self._pinned[start : start + places.nbytes].view(PLACE)[:] = places
        self._pinned[start + places.nbytes : owners].view(RECURRING)[:] = lined.spans
        self._pinned[owners:tables].view(np.int32)[:] = lined.owners
        np.concatenate(blocks, out=self._pinned[tables:end].view(np.int32))
        self._stream.driver.copy(self._address, self._pinned.ctypes.data, end, self._stream.handle)

    def _before_places(self, count: int) -> int:
        """The bytes of so many rows, aligned."""
        return -(-4 * count * self._width // PLACE.itemsize) * PLACE.itemsize
