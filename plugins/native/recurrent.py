"""Our own recurrent layers: the states of sequences, which lie in slots, and what rows make of them.

The arithmetic is stated in recurrent.c. Results are the same to the bit on every CPU and for any number of threads. A
row's depend neither on which other rows are computed with it, nor on how its sequence is cut in steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from motley.plugins.recurrent import WIDEST_HEAD

from .library import F32, address, library, place
from .matmul import Pool
from .structs import Recurrent, RecurrentSpan, RecurrentSpanList


class _Kind(IntEnum):
    """``enum recurrence`` of recurrent.h."""

    GATED_DELTA = 0
    STATE_SPACE = 1
    SHORT_CONVOLUTION = 2
    DILATED_CONVOLUTION = 3


class RecurrentRows(NamedTuple):
    """Some rows of a step that are consecutive tokens of one sequence: see ``struct recurrent_span`` of recurrent.h."""

    row: int
    rows: int
    position: int
    slot: int
    guesses: int = 0


class RecurrentSpans:
    """The spans of a step, as every layer reads them that was bound to this. They are set before each step.

    Args:
        most: how many spans a step may have.
    """

    def __init__(self, most: int) -> None:
        spans = (RecurrentSpan * most)()
        self._spans = list(spans)
        self.struct = RecurrentSpanList(all=spans, count=0)

    def set(self, spans: Sequence[RecurrentRows]) -> None:
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
        states: f32[slots, heads, key_size, value_size].
        recent: f32[slots, reach - 1, columns], the rows that the convolution of the next one sees.
    """

    def __init__(
        self, slots: int, heads: int, key_size: int, value_size: int, columns: int, gates: int, reach: int, guesses: int
    ) -> None:
        """`guesses`: rows of a span that may be such, at most; the others as in `StateSpec`."""
        self.columns, self.gates, self.reach, self.guesses = columns, gates, reach, guesses
        self.states = _zeros(slots, heads, key_size, value_size)
        self.recent = _zeros(slots, reach - 1, columns)
        self.guessed = _zeros(slots, guesses, columns + gates)
        self.marks = np.zeros((slots, 2), np.int64)

    def copy(self, source: int, target: int) -> None:
        """Make one slot what another is, but for its guesses, which are forgotten."""
        self.states[target] = self.states[source]
        self.recent[target] = self.recent[source]
        self.marks[target] = self.marks[source, 0], 0


def _zeros(*shape: int) -> F32:
    array = np.empty(shape, np.float32)
    array.fill(0)
    return array


def bind_gated_delta(
    qkvz: F32,
    ba: F32,
    y: F32,
    spans: RecurrentSpans,
    slots: Slots,
    *,
    group: int,
    filters: F32,
    decay: F32,
    bias: F32,
    gain: F32,
    epsilon: float,
    pool: Pool,
    written: float = 1.0,
    squashed: bool = False,
    floor: float = 0.0,
) -> Callable[[], None]:
    """What the rows of all spans of a step make of their sequences' states, in one layer, and these of them: a gated
    DeltaNet's.

    A row of M that no span has, after all that some span has, gets the result of the one before it.
    A call raises `IndexError`, and writes nothing, if a span does not fit the rows, the slots or the guesses, or
    neither begins its sequence nor goes on where the slot's state stands, or among the guesses behind that.

    Args:
        qkvz: f32[M, C + heads * value_size]: queries, keys, values and what opens the gates.
        ba: f32[M, heads * (1 + decays)], where a state has one number by which it decays, or one for each row of it.
        y: f32[M, heads * value_size], overwritten.
        spans: read by every call; no two have a slot in common.
        slots: written to.
        group: value heads of a key head.
        filters: f32[C, reach].
        decay: f32[heads].
        bias: f32[heads * decays].
        gain: f32[value_size].
        written: how much of a value is written at most.
        squashed: gates are opened by the sigmoid of what opens them, not by that times it.
        floor: the logarithm of what is left of a state at least, which a sigmoid is multiplied by; 0: there is none.

    Raises:
        ValueError: an operand has another shape or type, is not contiguous or aligned, or is to be written but
            read-only; or heads are too wide. The message names it.
        MemoryError: there is no memory for what the pool's threads find.
    """
    rows = len(y)
    _, heads, _, value_size = slots.states.shape
    width = heads * value_size
    rate = np.exp(decay.astype(np.float64)).astype(np.float32)
    more: dict[str, Any] = {
        "kind": _Kind.GATED_DELTA,
        "first": address("qkvz", qkvz, np.float32, rows, slots.columns + width),
        "gates": address("ba", ba, np.float32, rows, slots.gates),
        "first_columns": slots.columns,
        "first_stride": slots.columns + width,
        "rate": address("decay", rate, np.float32, heads),
        "bias": address("bias", bias, np.float32, slots.gates - heads),
        "gain": address("gain", gain, np.float32, value_size),
        "group": group,
        "epsilon": epsilon,
        "decays": (slots.gates - heads) // heads,
        "written": written,
        "squashed": squashed,
        "floor": floor,
    }
    return _bound(more, y, width, filters, None, spans, slots, pool, (qkvz, ba, rate, bias, gain))


def bind_state_space(
    xz: F32,
    bc: F32,
    dt: F32,
    y: F32,
    spans: RecurrentSpans,
    slots: Slots,
    *,
    group: int,
    filters: F32,
    filter_bias: F32 | None,
    decay: F32,
    bias: F32,
    skip: F32,
    limits: tuple[float, float],
    pool: Pool,
) -> Callable[[], None]:
    """As `bind_gated_delta`, of Mamba2's state space.

    Args:
        xz: f32[M, 2 * heads * value_size]: inputs, and what opens the gates.
        bc: f32[M, 2 * groups * key_size]: what is written with, and read with.
        dt: f32[M, heads].
        group: heads that share the same of b and c.
        filters, filter_bias: f32[C, reach] and f32[C] of x, b and c.
        skip: f32[heads].
        limits: of a step.

    Raises:
        ValueError, MemoryError: see `bind_gated_delta`.
    """
    rows = len(y)
    _, heads, _, value_size = slots.states.shape
    width = heads * value_size
    rate = np.exp(decay.astype(np.float64)).astype(np.float32)
    more: dict[str, Any] = {
        "kind": _Kind.STATE_SPACE,
        "first": address("xz", xz, np.float32, rows, 2 * width),
        "second": address("bc", bc, np.float32, rows, slots.columns - width),
        "gates": address("dt", dt, np.float32, rows, slots.gates),
        "first_columns": width,
        "first_stride": 2 * width,
        "rate": address("decay", rate, np.float32, heads),
        "bias": address("bias", bias, np.float32, heads),
        "gain": address("skip", skip, np.float32, heads),
        "group": group,
        "least": limits[0],
        "most": limits[1],
    }
    return _bound(more, y, width, filters, filter_bias, spans, slots, pool, (xz, bc, dt, rate, bias, skip))


def bind_short_convolution(
    bcx: F32,
    y: F32,
    spans: RecurrentSpans,
    slots: Slots,
    *,
    filters: F32,
    filter_bias: F32 | None,
    pool: Pool,
) -> Callable[[], None]:
    """As `bind_gated_delta`, of a short convolution with a gate before and one behind it.

    Args:
        bcx: f32[M, 3 * C].
        filters, filter_bias: f32[C, reach] and f32[C].

    Raises:
        ValueError, MemoryError: see `bind_gated_delta`.
    """
    more: dict[str, Any] = {
        "kind": _Kind.SHORT_CONVOLUTION,
        "first": address("bcx", bcx, np.float32, len(y), 3 * slots.columns),
        "first_columns": slots.columns,
        "first_stride": 3 * slots.columns,
    }
    return _bound(more, y, slots.columns, filters, filter_bias, spans, slots, pool, (bcx,))


def bind_dilated_convolution(
    x: F32, y: F32, spans: RecurrentSpans, slots: Slots, *, filters: F32, dilation: int, pool: Pool
) -> Callable[[], None]:
    """As `bind_gated_delta`, of a convolution that sees each `dilation`-th row, and is opened by itself.

    Args:
        x: f32[M, C].
        filters: f32[C, taps]; the slots' reach is ``(taps - 1) * dilation + 1``.

    Raises:
        ValueError, MemoryError: see `bind_gated_delta`.
    """
    if dilation < 1 or slots.reach != (filters.shape[1] - 1) * dilation + 1:
        raise ValueError(f"filters of {filters.shape[1]} taps, {dilation} rows apart, do not see {slots.reach} rows")
    more: dict[str, Any] = {
        "kind": _Kind.DILATED_CONVOLUTION,
        "first": address("x", x, np.float32, len(y), slots.columns),
        "first_columns": slots.columns,
        "first_stride": slots.columns,
        "dilation": dilation,
    }
    return _bound(more, y, slots.columns, filters, None, spans, slots, pool, (x,))


def _bound(
    more: dict[str, Any],
    y: F32,
    width: int,
    filters: F32,
    filter_bias: F32 | None,
    spans: RecurrentSpans,
    slots: Slots,
    pool: Pool,
    kept: tuple[F32, ...],
) -> Callable[[], None]:
    """A call with some fields of its own, and those that all kinds have; `kept` are arrays that they point to."""
    count, heads, key_size, value_size = slots.states.shape
    if max(key_size, value_size) > WIDEST_HEAD:
        raise ValueError(f"heads of {key_size} and {value_size} elements are wider than {WIDEST_HEAD}")
    turned = np.ascontiguousarray(filters.T)
    taps = (slots.reach - 1) // more.get("dilation", 1) + 1
    added = None if filter_bias is None else address("filter_bias", filter_bias, np.float32, slots.columns)
    recurrent = Recurrent(
        pool=pool.handle,
        spans=ctypes.pointer(spans.struct),
        filters=address("filters", turned, np.float32, taps, slots.columns),
        filter_bias=added,
        states=place("states", slots.states, np.float32, *slots.states.shape),
        recent=place("recent", slots.recent, np.float32, *slots.recent.shape),
        guessed=place("guessed", slots.guessed, np.float32, *slots.guessed.shape),
        marks=place("marks", slots.marks, np.int64, *slots.marks.shape),
        y=place("y", y, np.float32, len(y), width),
        rows=len(y),
        slots=count,
        heads=heads,
        key_size=key_size,
        value_size=value_size,
        columns=slots.columns,
        gate_columns=slots.gates,
        reach=slots.reach,
        most_guesses=slots.guesses,
        width=width,
        **more,
    )
    if not library().motley_prepare_recurrent(recurrent):
        raise MemoryError(f"no memory to compute {heads} heads of {key_size} by {value_size} elements")
    recurrent.kept = (*kept, y, spans, slots, turned, filter_bias, pool)
    return partial(_compute, recurrent)


def _compute(recurrent: Recurrent) -> None:
    """
    Raises:
        IndexError: a span does not fit, or does not go on where its state stands.
    """
    misfit = library().motley_recurrent(recurrent)
    if misfit >= 0:
        span = recurrent.spans.contents.all[misfit]
        raise IndexError(
            f"span {misfit} is of rows {span.row} to {span.row + span.rows} of {recurrent.rows}, in slot {span.slot} "
            f"of {recurrent.slots}, and has {span.guesses} guesses of at most {recurrent.most_guesses}; it begins at "
            f"position {span.position}{_standing(recurrent, span.slot)}"
        )


def _standing(recurrent: Recurrent, slot: int) -> str:
    """Where the state in a slot stands, for messages; nothing where there is no such slot."""
    if not 0 <= slot < recurrent.slots:
        return ""
    before, guessed = ctypes.cast(recurrent.marks, ctypes.POINTER(ctypes.c_int64))[2 * slot : 2 * slot + 2]
    return f", and the state stands before {before}, with {guessed} guesses behind it"
