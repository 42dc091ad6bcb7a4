"""Our own gated DeltaNet: against the reference's, to the bit at every level, in any steps, and with guesses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.plugins.engine import F32, Span, StateSpec
from motley.plugins.native.delta import DeltaRows, DeltaSpans, Slots, bind_delta
from motley.plugins.native.matmul import Pool
from motley.plugins.reference.states import LayerStates
from tests.plugins.native.native_levels import assert_same, at_all_levels, normal

SPECS = (StateSpec(0, 2, 3, 24, 40, 4), StateSpec(0, 1, 1, 128, 128, 4), StateSpec(0, 3, 2, 5, 7, 2))
GUESSES = 6
EPSILON = 1e-6


class Layer:
    """A layer of random weights, with a sequence of random rows."""

    def __init__(self, spec: StateSpec, rows: int) -> None:
        random = np.random.default_rng([spec.keys, rows])
        self.spec = spec
        self.wide = spec.values * spec.value_size
        self.qkvz, self.ba = normal(random, rows, spec.columns + self.wide), normal(random, rows, 2 * spec.values)
        self.weights = {
            "filters": normal(random, spec.columns, spec.reach),
            "decay": normal(random, spec.values),
            "bias": normal(random, spec.values),
            "gain": normal(random, spec.value_size),
        }

    def slots(self, count: int = 2) -> Slots:
        spec = self.spec
        return Slots(count, spec.keys, spec.group, spec.key_size, spec.value_size, spec.reach, GUESSES)

    def native(self, slots: Slots, steps: Iterable[tuple[int, int, int]], threads: int = 1, slot: int = 1) -> F32:
        """What rows come to, in steps of (position, rows, guesses)."""
        made = []
        pool = Pool(threads)
        for position, rows, guesses in steps:
            own, spans = slice(position, position + rows), DeltaSpans(1)
            spans.set([DeltaRows(0, rows, position, slot, guesses)])
            y = np.full((rows, self.wide), np.nan, np.float32)
            qkvz, ba = self.qkvz[own].copy(), self.ba[own].copy()
            bind_delta(qkvz, ba, y, spans, slots, **self.weights, epsilon=EPSILON, pool=pool)()
            made.append(y)
        pool.close()
        return np.concatenate(made)

    def reference(self, steps: Iterable[tuple[int, int, int]]) -> F32:
        spec, made = self.spec, []
        states = LayerStates(np, np.dtype(np.float64), spec, 2, EPSILON)
        width = spec.keys * spec.key_size
        for position, rows, guesses in steps:
            own = slice(position, position + rows)
            parts = np.split(self.qkvz[own].astype(np.float64), [width, 2 * width, spec.columns], axis=1)
            gates = np.split(self.ba[own].astype(np.float64), 2, axis=1)
            span = Span(np.zeros(1, np.int32), position, rows, slot=1, guesses=guesses)
            made.append(states.advance(np, span, [*parts, *gates], *self.weights.values()))
        return np.concatenate(made)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_it_is_the_references(spec: StateSpec) -> None:
    layer = Layer(spec, 30)
    y = at_all_levels(lambda: layer.native(layer.slots(), [(0, 30, 0)]))
    expected = layer.reference([(0, 30, 0)])
    assert np.abs(y - expected).max() < 1e-5 * np.abs(expected).max()
    assert_same(layer.native(layer.slots(), [(0, 30, 0)], threads=3), y)


@given(spec=st.sampled_from(SPECS), data=st.data())
def test_steps_and_wrong_guesses_change_no_bit(spec: StateSpec, data: Any) -> None:
    """Guesses of which some turn out to be right, as the sequence goes on among them, or after them."""
    layer, slots = Layer(spec, 24), None
    whole = layer.native(layer.slots(), [(0, 24, 0)])
    slots, position, got = layer.slots(), 0, np.zeros_like(whole)
    states = LayerStates(np, np.dtype(np.float64), spec, 2, EPSILON)
    assert not states._guessed[1]
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


def test_halves_of_a_span_that_is_guessed() -> None:
    """What a second half finds behind guesses of the first stays a guess, and can be taken back."""
    layer = Layer(SPECS[0], 12)
    whole = layer.native(layer.slots(), [(0, 12, 0)])
    slots = layer.slots()
    halves = layer.native(slots, [(0, 5, 0), (5, 3, 2), (8, 2, 2)])
    assert_same(halves, whole[:10])
    assert_same(layer.native(slots, [(7, 5, 0)]), whole[7:])


def test_sequences_are_apart_and_begin_anew() -> None:
    layer = Layer(SPECS[0], 12)
    whole, slots = layer.native(layer.slots(), [(0, 12, 0)]), layer.slots()
    layer.native(slots, [(0, 7, 0)], slot=0)
    assert_same(layer.native(slots, [(0, 12, 0)]), whole)
    assert_same(layer.native(slots, [(7, 5, 0)], slot=0), whole[7:])
    assert_same(layer.native(slots, [(0, 12, 0)]), whole)


def test_rows_behind_the_last_span_get_its_last_result() -> None:
    layer = Layer(SPECS[2], 6)
    spans, y, pool = DeltaSpans(4), np.zeros((6, layer.wide), np.float32), Pool(2)
    spans.set([DeltaRows(0, 2, 0, 1), DeltaRows(2, 3, 0, 0)])
    bind_delta(layer.qkvz, layer.ba, y, spans, layer.slots(), **layer.weights, epsilon=EPSILON, pool=pool)()
    pool.close()
    assert_same(y[:2], layer.native(layer.slots(), [(0, 2, 0)]))
    assert_same(y[5], y[4])


@pytest.mark.parametrize(
    "span", [(0, 7, 0, 0, 0), (0, 1, 0, 2, 0), (0, 2, 0, 0, 3), (-1, 1, 0, 0, 0), (0, 1, -1, 0, 0)]
)
def test_spans_that_do_not_fit_are_named(span: tuple[int, int, int, int, int]) -> None:
    layer = Layer(SPECS[2], 6)
    spans, slots, pool = DeltaSpans(1), layer.slots(), Pool(1)
    spans.set([DeltaRows(*span)])
    y = np.zeros((6, layer.wide), np.float32)
    with pytest.raises(IndexError, match=r"span 0 is of rows .* of 6, in slot \d of 2"):
        bind_delta(layer.qkvz, layer.ba, y, spans, slots, **layer.weights, epsilon=EPSILON, pool=pool)()
    with pytest.raises(ValueError, match="qkvz must be"):
        bind_delta(layer.ba, layer.ba, y, spans, slots, **layer.weights, epsilon=EPSILON, pool=pool)
    pool.close()
