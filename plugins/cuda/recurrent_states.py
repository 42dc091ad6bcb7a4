"""Recurrent states on the device, in slots, and how a step's spans go on from them: see `motley.plugins.recurrent`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from motley.plugins.cuda.device_graph import DeviceGraph
from motley.plugins.engine import EngineError, RankGraph, Span
from motley.plugins.recurrent import MOST_GUESSES, StateSpec

RECURRING = np.dtype([(name, "i8") for name in ("slot", "row", "rows", "before", "extra", "sure", "fresh")])
"""`Recurring` in the source: a span, and what it takes before its own rows."""


class Lined(NamedTuple):
    """How recurrent layers take the rows of a step: its own, and behind them guesses of earlier steps that have turned
    out to be right.

    Attributes:
        spans: a `RECURRING` for each span; none if there are no states.
        owners: i32[rows], the number of the span that each row is of.
    """

    spans: npt.NDArray[np.void]
    owners: npt.NDArray[np.int32]

    @property
    def takes_guesses(self) -> bool:
        """Whether any of the rows is a guess of an earlier step."""
        return len(self.owners) > int(self.spans["rows"].sum())


@dataclass(frozen=True)
class LinedUp:
    """A `Lined` on the device.

    Attributes:
        rows: how many are lined up.
        spans: how many have such rows; 0: the rank has no recurrent layers.
        table: the address of a `RECURRING` for each span.
        owners: the address of i32[rows], the span of each.
    """

    rows: int
    spans: int
    table: int
    owners: int


@dataclass(frozen=True)
class LayerStates:
    """The states of one layer, by addresses.

    Attributes:
        states: f32[slots, heads, key_size, value_size].
        recent: f32[slots, reach - 1, columns], the rows that the convolution of the next one sees.
        guessed: f32[slots, MOST_GUESSES, columns + gates], rows that may turn out to be right.
    """

    spec: StateSpec
    states: int
    recent: int
    guessed: int

    @property
    def kept(self) -> list[tuple[int, int]]:
        """The address and the bytes of a slot of each array that is more than guesses."""
        spec = self.spec
        state, recent = spec.heads * spec.key_size * spec.value_size, (spec.reach - 1) * spec.columns
        return [(address, 4 * size) for address, size in ((self.states, state), (self.recent, recent)) if size]


class RecurrentStates:
    """The states of all layers, and where each stands.

    Attributes:
        layers: by their numbers.
        scratch: the address of states that rows change which may be wrong, as large as those of the largest layer.
        room: how many rows may be lined up.
    """

    def __init__(self, graph: RankGraph, device: DeviceGraph) -> None:
        """
        Raises:
            CudaError: too little memory.
        """
        self._device = device
        slots = graph.blocks.states
        self._certain = [0] * slots
        """The position that each state stands before."""
        self._guesses = [0] * slots
        """How many rows from there on have been computed and may turn out to be right."""
        self.layers: dict[int, LayerStates] = {}
        for spec in graph.states:
            sizes = [
                spec.heads * spec.key_size * spec.value_size,
                (spec.reach - 1) * spec.columns,
                MOST_GUESSES * (spec.columns + spec.gates),
            ]
            self.layers[spec.layer] = LayerStates(spec, *(device.zeros(4 * slots * size) for size in sizes))
        largest = max((spec.heads * spec.key_size * spec.value_size for spec in graph.states), default=0)
        self.scratch = device.zeros(4 * graph.blocks.slots * largest) if largest else 0
        self.room = device.max_rows + graph.blocks.slots * MOST_GUESSES

    def line_up(self, spans: Sequence[Span]) -> Lined:
        """Take the spans of the next step, and remember where their states stand after it.

        Raises:
            EngineError: a span neither begins its sequence nor goes on where the state stands, or among the guesses
                behind that; nothing is changed then.
        """
        if not self.layers:
            return Lined(np.zeros(0, RECURRING), np.zeros(0, np.int32))
        table = np.zeros(len(spans), RECURRING)
        rows = np.array([span.rows for span in spans])
        table["slot"], table["rows"] = [span.slot for span in spans], rows
        table["row"] = np.cumsum(rows) - rows
        table["fresh"] = [span.position == 0 for span in spans]
        table["before"] = [self._known(span) for span in spans]
        table["extra"] = rows.sum() + np.cumsum(table["before"]) - table["before"]
        guesses = np.array([span.guesses for span in spans])
        # A span of guesses alone leaves what has been guessed before it a guess.
        table["sure"] = np.where(guesses < rows, table["before"] + rows - guesses, 0)
        for span, (sure, before) in zip(spans, table[["sure", "before"]].tolist(), strict=True):
            self._certain[span.slot] = span.position - before + sure
            self._guesses[span.slot] = min(before + span.rows - sure, MOST_GUESSES)
        numbers = np.arange(len(spans), dtype=np.int32)
        return Lined(table, np.concatenate([numbers.repeat(rows), numbers.repeat(table["before"])]))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `motley.plugins.recurrent.RecurrentEngine.copy_states`."""
        stream = self._device.stream
        for source, target in pairs:
            for layer in self.layers.values():
                for address, size in layer.kept:
                    stream.driver.copy(address + target * size, address + source * size, size, stream.handle)
            self._certain[target], self._guesses[target] = self._certain[source], 0
        self._device.finish()

    def _known(self, span: Span) -> int:
        """How many guesses turn out to be right as the span follows them."""
        certain, guesses = self._certain[span.slot], self._guesses[span.slot]
        known = 0 if span.position == 0 else span.position - certain
        if not 0 <= known <= guesses:
            raise EngineError(
                f"engine 'cuda': rows from position {span.position} on cannot go on from the recurrent state in slot"
                f" {span.slot}, which stands before {certain}, with {guesses} guesses behind it"
            )
        return known
