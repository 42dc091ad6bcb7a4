"""Binds our own kernels to layers with a recurrent state, and allocates their states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from motley.plugins.mapped_share import Array
from motley.plugins.native.matmul import Pool
from motley.plugins.native.recurrent import (
    RecurrentSpans,
    Slots,
    bind_dilated_convolution,
    bind_gated_delta,
    bind_short_convolution,
    bind_state_space,
)
from motley.plugins.native.rows import Action
from motley.plugins.nodes import attributes_of
from motley.plugins.onnxruntime.kernels import Weight
from motley.plugins.recurrent import MOST_GUESSES, StateSpec
from motley.plugins.segments import CONVOLUTION, DELTA, DILATED, SPACE, Kernel


@dataclass(frozen=True)
class Recur:
    """The layer with a recurrent state that follows a segment.

    Attributes:
        bind: binds it to the places of its values, to the spans of its rows and to its states.
        layer: whose states these are.
    """

    bind: Callable[[Mapping[str, Array], RecurrentSpans, Slots], Action]
    layer: int


def allocated_slots(spec: StateSpec, slots: int) -> Slots:
    """The states of a layer, for so many sequences."""
    sizes = spec.heads, spec.key_size, spec.value_size, spec.columns, spec.gates, spec.reach
    return Slots(slots, *sizes, MOST_GUESSES)


def recurrence(then: Kernel, weight: Weight, pool: Pool) -> tuple[Recur, dict[str, int]]:
    """What computes the node of a layer with a recurrent state, and the width of its operands and result by names."""
    kinds = {DELTA: _gated_delta, SPACE: _state_space, CONVOLUTION: _short_convolution, DILATED: _dilated_convolution}
    return kinds[then.node.op_type](then, weight, pool)


def _gated_delta(then: Kernel, weight: Weight, pool: Pool) -> tuple[Recur, dict[str, int]]:
    of = attributes_of(then.node)
    qkvz, ba, *names = then.node.input
    (y,) = then.results
    filters, decay, bias, gain = _weights(names, weight)

    def bind(places: Mapping[str, Array], spans: RecurrentSpans, slots: Slots) -> Action:
        return bind_gated_delta(
            places[qkvz],
            places[ba],
            places[y],
            spans,
            slots,
            group=of["group"],
            filters=filters,
            decay=decay,
            bias=bias,
            gain=gain,
            epsilon=of["epsilon"],
            pool=pool,
            written=of["written"],
            squashed=of["gate"] == b"sigmoid",
            floor=of["floor"],
        )

    values = len(decay) * of["value_size"]
    return Recur(bind, of["layer"]), {qkvz: len(filters) + values, ba: len(decay) + len(bias), y: values}


def _state_space(then: Kernel, weight: Weight, pool: Pool) -> tuple[Recur, dict[str, int]]:
    of = attributes_of(then.node)
    xz, bc, dt, *names = then.node.input
    (y,) = then.results
    filters, decay, bias, skip, *more = _weights(names, weight)

    def bind(places: Mapping[str, Array], spans: RecurrentSpans, slots: Slots) -> Action:
        return bind_state_space(
            places[xz],
            places[bc],
            places[dt],
            places[y],
            spans,
            slots,
            group=of["group"],
            filters=filters,
            filter_bias=more[0] if more else None,
            decay=decay,
            bias=bias,
            skip=skip,
            limits=(of["least"], of["most"]),
            pool=pool,
        )

    values = len(decay) * of["value_size"]
    return Recur(bind, of["layer"]), {xz: 2 * values, bc: len(filters) - values, dt: len(decay), y: values}


def _short_convolution(then: Kernel, weight: Weight, pool: Pool) -> tuple[Recur, dict[str, int]]:
    (bcx, *names), (y,) = then.node.input, then.results
    filters, *more = _weights(names, weight)

    def bind(places: Mapping[str, Array], spans: RecurrentSpans, slots: Slots) -> Action:
        added = more[0] if more else None
        return bind_short_convolution(
            places[bcx], places[y], spans, slots, filters=filters, filter_bias=added, pool=pool
        )

    columns = len(filters)
    return Recur(bind, attributes_of(then.node)["layer"]), {bcx: 3 * columns, y: columns}


def _dilated_convolution(then: Kernel, weight: Weight, pool: Pool) -> tuple[Recur, dict[str, int]]:
    (x, name), (y,), of = then.node.input, then.results, attributes_of(then.node)
    (filters,) = _weights([name], weight)

    def bind(places: Mapping[str, Array], spans: RecurrentSpans, slots: Slots) -> Action:
        return bind_dilated_convolution(
            places[x], places[y], spans, slots, filters=filters, dilation=of["dilation"], pool=pool
        )

    return Recur(bind, of["layer"]), {x: len(filters), y: len(filters)}


def _weights(names: list[str], weight: Weight) -> list[Array]:
    found = [weight(name) for name in names]
    return [each for each in found if each is not None]
