"""Our own gated DeltaNet: the recurrent states of sequences, which lie in slots, and what rows make of them.

The arithmetic is stated in delta.c. Results are the same to the bit on every CPU and for any number of threads. A
row's depend neither on which other rows are computed with it, nor on how its sequence is cut in steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from .library import F32, Delta, DeltaSpan, DeltaSpanList, address, library, place
from .matmul import Pool

WIDEST_HEAD = 512
"""Elements of a head at most; stated in delta.h."""


class DeltaRows(NamedTuple):
    """Some rows of a step that are consecutive tokens of one sequence: see ``struct delta_span`` of delta.h."""

    row: int
    rows: int
    position: int
    slot: int
    guesses: int = 0


class DeltaSpans:
    """The spans of a step, as every layer reads them that was bound to this. They are set before each step.

    Args:
        most: how many spans a step may have.
    """

    def __init__(self, most: int) -> None:
        spans = (DeltaSpan * most)()
        self._spans = list(spans)
        self.struct = DeltaSpanList(all=spans, count=0)

    def set(self, spans: Sequence[DeltaRows]) -> None:
        """Take the spans of the next step.

        Raises:
            ValueError: there are too many.
        """
        if len(spans) > len(self._spans):
            raise ValueError(f"a step has at most {len(self._spans)} spans, not {len(spans)}")
        for of, span in zip(self._spans, spans, strict=False):
            of.row, of.rows, of.position, of.slot, of.guesses = span
        self.struct.count = len(spans)


class Slots:
    """The recurrent states of one layer, at first zero. All memory is allocated, and written to.

    Attributes:
        states: f32[slots, values, key_size, value_size].
    """

    def __init__(self, slots: int, keys: int, group: int, key_size: int, value_size: int, reach: int, guesses: int):
        """`guesses`: rows of a span that may be such, at most; the others as in `motley.plugins.engine.StateSpec`."""
        self.sizes = keys, group, key_size, value_size, reach, guesses
        self.columns = 2 * keys * key_size + keys * group * value_size
        self.states = _zeros(slots, keys * group, key_size, value_size)
        self.recent = _zeros(slots, reach - 1, self.columns)
        self.guessed = _zeros(slots, guesses, self.columns + 2 * keys * group)
        self.marks = np.zeros((slots, 2), np.int64)


def _zeros(*shape: int) -> F32:
    array = np.empty(shape, np.float32)
    array.fill(0)
    return array


def bind_delta(
    qkvz: F32,
    ba: F32,
    y: F32,
    spans: DeltaSpans,
    slots: Slots,
    *,
    filters: F32,
    decay: F32,
    bias: F32,
    gain: F32,
    epsilon: float,
    pool: Pool,
) -> Callable[[], None]:
    """What the rows of all spans of a step make of their sequences' states, in one layer, and these of them.

    A row of M that no span has, after all that some span has, gets the result of the one before it.
    A call raises `IndexError`, and writes nothing, if a span does not fit the rows, the slots or the guesses.

    Args:
        qkvz: f32[M, C + values * value_size]: queries, keys, values and what opens the gates.
        ba: f32[M, 2 * values].
        y: f32[M, values * value_size], overwritten.
        spans: read by every call; no two have a slot in common.
        slots: written to.
        filters: f32[C, reach].
        decay: f32[values].
        bias: f32[values].
        gain: f32[value_size].

    Raises:
        ValueError: an operand has another shape or type, is not contiguous or aligned, or is to be written but
            read-only; or heads are too wide. The message names it.
        MemoryError: there is no memory for what the pool's threads find.
    """
    keys, group, key_size, value_size, reach, guesses = slots.sizes
    if max(key_size, value_size) > WIDEST_HEAD:
        raise ValueError(f"heads of {key_size} and {value_size} elements are wider than {WIDEST_HEAD}")
    rows, values = len(y), keys * group
    turned = np.ascontiguousarray(filters.T)
    rate = np.exp(decay.astype(np.float64)).astype(np.float32)
    delta = Delta(
        pool=pool.handle,
        spans=ctypes.pointer(spans.struct),
        qkvz=address("qkvz", qkvz, np.float32, rows, slots.columns + values * value_size),
        ba=address("ba", ba, np.float32, rows, 2 * values),
        filters=address("filters", turned, np.float32, reach, slots.columns),
        rate=address("decay", rate, np.float32, values),
        bias=address("bias", bias, np.float32, values),
        gain=address("gain", gain, np.float32, value_size),
        states=place("states", slots.states, np.float32, *slots.states.shape),
        recent=place("recent", slots.recent, np.float32, *slots.recent.shape),
        guessed=place("guessed", slots.guessed, np.float32, *slots.guessed.shape),
        marks=place("marks", slots.marks, np.int64, *slots.marks.shape),
        y=place("y", y, np.float32, rows, values * value_size),
        rows=rows,
        slots=len(slots.states),
        keys=keys,
        group=group,
        key_size=key_size,
        value_size=value_size,
        columns=slots.columns,
        reach=reach,
        most_guesses=guesses,
        epsilon=epsilon,
    )
    if not library().motley_prepare_delta(delta):
        raise MemoryError(f"no memory to compute {values} heads of {key_size} by {value_size} elements")
    delta.kept = (qkvz, ba, y, spans, slots, turned, rate, bias, gain, pool)
    return partial(_compute, delta)


def _compute(delta: Delta) -> None:
    """
    Raises:
        IndexError: a span does not fit.
    """
    misfit = library().motley_delta(delta)
    if misfit >= 0:
        span = delta.spans.contents.all[misfit]
        raise IndexError(
            f"span {misfit} is of rows {span.row} to {span.row + span.rows} of {delta.rows}, in slot {span.slot} of "
            f"{delta.slots}, and has {span.guesses} guesses of at most {delta.most_guesses}"
        )
