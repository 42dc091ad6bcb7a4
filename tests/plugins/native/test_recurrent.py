"""Our own recurrent layers: against the reference's, to the bit at every level, in any steps, and with guesses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.plugins.engine import F32, EngineError, Span
from motley.plugins.native.matmul import Pool
from motley.plugins.native.recurrent import (
    RecurrentRows,
    RecurrentSpans,
    Slots,
    bind_dilated_convolution,
    bind_gated_delta,
    bind_short_convolution,
    bind_state_space,
)
from motley.plugins.recurrent import DILATED_CONVOLUTION, GATED_DELTA, SHORT_CONVOLUTION, STATE_SPACE, StateSpec
from motley.plugins.reference.states import RECURRENCES, LayerStates
from tests.plugins.native.native_levels import assert_same, at_all_levels, normal

GUESSES = 6


@dataclass(frozen=True)
class Sizes:
    """Of a layer: key heads, value heads of each, elements of both, and positions that the convolution sees.

    Attributes:
        by_rows: a DeltaNet as Kimi's: each row of a state decays by itself, and gates are opened by sigmoids; more is
            written, too.
        floor: the logarithm of what is left of a DeltaNet's state at least; 0: there is none.
        dilation: of a dilated convolution; `reach` is how many positions it sees.
    """

    operator: str
    keys: int
    group: int
    key_size: int
    value_size: int
    reach: int
    biased: bool = False
    by_rows: bool = False
    floor: float = 0.0
    dilation: int = 1

    @property
    def spec(self) -> StateSpec:
        values = self.keys * self.group
        wide, sizes = values * self.value_size, (values, self.key_size, self.value_size)
        if self.operator in (SHORT_CONVOLUTION, DILATED_CONVOLUTION):
            return StateSpec(0, wide, (self.reach - 1) * self.dilation + 1)
        gates = {GATED_DELTA: 1 + self.decays, STATE_SPACE: 1}[self.operator] * values
        return StateSpec(0, wide + 2 * self.keys * self.key_size, self.reach, *sizes, gates)

    @property
    def decays(self) -> int:
        return self.key_size if self.by_rows else 1

    @property
    def parts(self) -> list[int]:
        """How wide the operands are that have rows, in the operator's order."""
        values, keys = self.keys * self.group, self.keys * self.key_size
        wide = values * self.value_size
        return {
            GATED_DELTA: [keys, keys, wide, wide, values, values * self.decays],
            STATE_SPACE: [wide, wide, keys, keys, values],
            SHORT_CONVOLUTION: [wide] * 3,
            DILATED_CONVOLUTION: [wide],
        }[self.operator]


SIZES = (
    Sizes(GATED_DELTA, 2, 3, 24, 40, 4),
    Sizes(GATED_DELTA, 1, 1, 128, 128, 4),
    Sizes(GATED_DELTA, 3, 2, 5, 7, 2),
    Sizes(GATED_DELTA, 2, 3, 24, 40, 4, by_rows=True),
    Sizes(GATED_DELTA, 3, 1, 5, 7, 2, by_rows=True),
    Sizes(STATE_SPACE, 2, 3, 24, 40, 4, biased=True),
    Sizes(STATE_SPACE, 1, 2, 128, 64, 4),
    Sizes(STATE_SPACE, 3, 2, 5, 7, 2, biased=True),
    Sizes(SHORT_CONVOLUTION, 1, 1, 0, 700, 3),
    Sizes(SHORT_CONVOLUTION, 1, 1, 0, 37, 2, biased=True),
    Sizes(GATED_DELTA, 2, 3, 24, 40, 4, by_rows=True, floor=-5.0),
    Sizes(GATED_DELTA, 3, 2, 5, 7, 2, floor=-0.5),
    Sizes(DILATED_CONVOLUTION, 1, 1, 0, 700, 4, dilation=3),
    Sizes(DILATED_CONVOLUTION, 1, 1, 0, 37, 2, dilation=2),
)
DELTA, ODD, BY_ROWS, SPACE, ODD_SPACE, CONVOLUTION, ODD_CONVOLUTION = (SIZES[at] for at in (0, 2, 3, 5, 7, 8, 9))
DILATED, ODD_DILATED = SIZES[-2:]


class Layer:
    """A layer of random weights, with a sequence of random rows."""

    def __init__(self, sizes: Sizes, rows: int) -> None:
        random = np.random.default_rng([sizes.keys, rows])
        self.sizes, self.spec = sizes, sizes.spec
        self.wide = sizes.keys * sizes.group * sizes.value_size
        self.parts = [normal(random, rows, width) for width in sizes.parts]
        self.attributes: dict[str, Any] = {"group": sizes.group, "key_size": sizes.key_size}
        heads = sizes.keys * sizes.group
        self.weights = {"filters": normal(random, self.spec.columns, sizes.reach)}
        if sizes.operator not in (SHORT_CONVOLUTION, DILATED_CONVOLUTION):
            self.weights |= {"decay": normal(random, heads), "bias": normal(random, heads * sizes.decays)}
        match sizes.operator:
            case "GatedDelta":
                self.weights["gain"] = normal(random, sizes.value_size)
                self.attributes |= {"key_heads": sizes.keys, "epsilon": 1e-6, "decays": sizes.decays}
                self.attributes |= (
                    {"written": 2.0, "gate": b"sigmoid"} if sizes.by_rows else {"written": 1.0, "gate": b"silu"}
                )
                self.attributes["floor"] = sizes.floor
            case "StateSpace":
                self.weights["skip"] = normal(random, heads)
                self.attributes |= {"heads": heads, "least": 0.2, "most": 1.5}
            case "DilatedConvolution":
                self.attributes = {"dilation": sizes.dilation}
        if sizes.biased:
            self.weights["filter_bias"] = normal(random, self.spec.columns)

    def slots(self, count: int = 2) -> Slots:
        spec = self.spec
        sizes = spec.heads, spec.key_size, spec.value_size, spec.columns, spec.gates, spec.reach
        return Slots(count, *sizes, GUESSES)

    def bind(self, own: slice, y: F32, spans: RecurrentSpans, slots: Slots, pool: Pool) -> Any:
        """The kernel, bound to some rows."""
        rows = [part[own] for part in self.parts]
        side_by_side = partial(np.concatenate, axis=1)
        more: dict[str, Any] = {"pool": pool, **self.weights}
        if self.sizes.operator == GATED_DELTA:
            qkvz, ba = side_by_side(rows[:4]), side_by_side(rows[4:])
            more |= {name: self.attributes[name] for name in ("epsilon", "written", "floor")}
            squashed = self.sizes.by_rows
            return bind_gated_delta(qkvz, ba, y, spans, slots, group=self.sizes.group, squashed=squashed, **more)
        if self.sizes.operator == DILATED_CONVOLUTION:
            return bind_dilated_convolution(*rows, y, spans, slots, dilation=self.sizes.dilation, **more)
        more.setdefault("filter_bias", None)
        if self.sizes.operator == SHORT_CONVOLUTION:
            return bind_short_convolution(side_by_side(rows), y, spans, slots, **more)
        limits, packed = (self.attributes["least"], self.attributes["most"]), (rows[:2], rows[2:4], rows[4:])
        operands = map(side_by_side, packed)
        return bind_state_space(*operands, y, spans, slots, group=self.sizes.group, limits=limits, **more)

    def native(self, slots: Slots, steps: Iterable[tuple[int, int, int]], threads: int = 1, slot: int = 1) -> F32:
        """What rows come to, in steps of (position, rows, guesses)."""
        made = []
        pool = Pool(threads)
        for position, rows, guesses in steps:
            own, spans = slice(position, position + rows), RecurrentSpans(1)
            spans.set([RecurrentRows(0, rows, position, slot, guesses)])
            y = np.full((rows, self.wide), np.nan, np.float32)
            self.bind(own, y, spans, slots, pool)()
            made.append(y)
        pool.close()
        return np.concatenate(made)

    def reference(self, steps: Iterable[tuple[int, int, int]]) -> npt.NDArray[np.float64]:
        made = []
        states = LayerStates(np, np.dtype(np.float64), self.spec, 2)
        weights = [each.astype(np.float64) for each in self.weights.values()]
        for position, rows, guesses in steps:
            own = [part[position : position + rows].astype(np.float64) for part in self.parts]
            span = Span(np.zeros(1, np.int32), position, rows, slot=1, guesses=guesses)
            made.append(RECURRENCES[self.sizes.operator](np, span, states, own, weights, self.attributes))
        return np.concatenate(made)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_the_references(sizes: Sizes) -> None:
    layer = Layer(sizes, 30)
    y = at_all_levels(lambda: layer.native(layer.slots(), [(0, 30, 0)]))
    expected = layer.reference([(0, 30, 0)])
    assert np.abs(y - expected).max() < 1e-5 * np.abs(expected).max()
    assert_same(layer.native(layer.slots(), [(0, 30, 0)], threads=3), y)


@given(sizes=st.sampled_from(SIZES), data=st.data())
def test_steps_and_wrong_guesses_change_no_bit(sizes: Sizes, data: Any) -> None:
    """Guesses of which some turn out to be right, as the sequence goes on among them, or after them."""
    layer = Layer(sizes, 24)
    whole = layer.native(layer.slots(), [(0, 24, 0)])
    slots, position, got = layer.slots(), 0, np.zeros_like(whole)
    steps = []
    while position < 24:
        rows = data.draw(st.integers(1, 24 - position))
        guesses = data.draw(st.integers(0, min(rows - 1, GUESSES)))
        got[position : position + rows] = layer.native(slots, [(position, rows, guesses)])
        steps.append((position, rows, guesses))
        position += rows - data.draw(st.integers(0, guesses))
    assert_same(got, whole)
    expected = layer.reference(steps)
    again = np.concatenate([whole[position : position + rows] for position, rows, _ in steps])
    assert np.abs(again - expected).max() < 1e-5 * np.abs(expected).max()


@given(sizes=st.sampled_from(SIZES), at=st.integers(1, 11))
def test_a_copied_slot_goes_on_as_the_one_it_was(sizes: Sizes, at: int) -> None:
    """Whatever becomes of that one meanwhile; guesses are not copied."""
    layer = Layer(sizes, 12)
    whole, slots = layer.native(layer.slots(), [(0, 12, 0)]), layer.slots(3)
    layer.native(slots, [(0, at, 0)])
    slots.copy(1, 2)
    layer.native(slots, [(0, 5, 0), (5, 7, GUESSES)])
    assert_same(layer.native(slots, [(at, 12 - at, 0)], slot=2), whole[at:])


def test_halves_of_a_span_that_is_guessed() -> None:
    """What a second half finds behind guesses of the first stays a guess, and can be taken back."""
    layer = Layer(DELTA, 12)
    whole = layer.native(layer.slots(), [(0, 12, 0)])
    slots = layer.slots()
    halves = layer.native(slots, [(0, 5, 0), (5, 3, 2), (8, 2, 2)])
    assert_same(halves, whole[:10])
    assert_same(layer.native(slots, [(7, 5, 0)]), whole[7:])


@pytest.mark.parametrize("sizes", [DELTA, SPACE, CONVOLUTION, DILATED], ids=str)
def test_sequences_are_apart_and_begin_anew(sizes: Sizes) -> None:
    layer = Layer(sizes, 12)
    whole, slots = layer.native(layer.slots(), [(0, 12, 0)]), layer.slots()
    layer.native(slots, [(0, 7, 0)], slot=0)
    assert_same(layer.native(slots, [(0, 12, 0)]), whole)
    assert_same(layer.native(slots, [(7, 5, 0)], slot=0), whole[7:])
    assert_same(layer.native(slots, [(0, 12, 0)]), whole)


@pytest.mark.parametrize("sizes", [ODD, BY_ROWS, ODD_SPACE, ODD_CONVOLUTION, ODD_DILATED], ids=str)
def test_rows_behind_the_last_span_get_its_last_result(sizes: Sizes) -> None:
    layer = Layer(sizes, 6)
    spans, y, pool = RecurrentSpans(4), np.zeros((6, layer.wide), np.float32), Pool(2)
    spans.set([RecurrentRows(0, 2, 0, 1), RecurrentRows(2, 3, 0, 0)])
    layer.bind(slice(0, 6), y, spans, layer.slots(), pool)()
    pool.close()
    assert_same(y[:2], layer.native(layer.slots(), [(0, 2, 0)]))
    assert_same(y[5], y[4])


@pytest.mark.parametrize("sizes", [DELTA, SPACE, CONVOLUTION, DILATED], ids=str)
@pytest.mark.parametrize("position", [3, 8])
def test_a_state_is_used_at_its_own_position_alone(sizes: Sizes, position: int) -> None:
    """A state that stands before 4, with 3 guesses behind it, knows nothing of a row at 3, nor of one at 8."""
    layer, before = Layer(sizes, 12), [(0, 7, 3)]
    slots = layer.slots()
    layer.native(slots, before)
    kept = [each.copy() for each in (slots.states, slots.recent, slots.guessed, slots.marks)]
    with pytest.raises(IndexError, match=rf"begins at position {position}, and the state stands before 4, with 3 gu"):
        layer.native(slots, [(position, 1, 0)])
    for was, each in zip(kept, (slots.states, slots.recent, slots.guessed, slots.marks), strict=True):
        assert np.array_equal(was, each), "a step that is refused changes nothing"
    with pytest.raises(EngineError, match=rf"from position {position} on .* stands before 4, with 3 guesses"):
        layer.reference([*before, (position, 1, 0)])


@pytest.mark.parametrize(
    "span", [(0, 7, 0, 0, 0), (0, 1, 0, 2, 0), (0, 2, 0, 0, 3), (-1, 1, 0, 0, 0), (0, 1, -1, 0, 0)]
)
def test_spans_that_do_not_fit_are_named(span: tuple[int, int, int, int, int]) -> None:
    layer = Layer(ODD, 6)
    spans, slots, pool = RecurrentSpans(1), layer.slots(), Pool(1)
    spans.set([RecurrentRows(*span)])
    y = np.zeros((6, layer.wide), np.float32)
    with pytest.raises(IndexError, match=r"span 0 is of rows .* of 6, in slot \d of 2"):
        layer.bind(slice(0, 6), y, spans, slots, pool)()
    with pytest.raises(ValueError, match="qkvz must be"):
        layer.bind(slice(0, 5), y, spans, slots, pool)
    pool.close()


def test_filters_of_a_dilated_convolution_see_what_is_kept() -> None:
    layer, pool = Layer(DILATED, 6), Pool(1)
    y, spans = np.zeros((6, layer.wide), np.float32), RecurrentSpans(1)
    more: dict[str, Any] = {"dilation": 2, "pool": pool, **layer.weights}
    with pytest.raises(ValueError, match="filters of 4 taps, 2 rows apart, do not see 10 rows"):
        bind_dilated_convolution(layer.parts[0], y, spans, layer.slots(), **more)
    pool.close()
