"""How large the recurrent states of layers are, for whatever part of them somebody has."""

from __future__ import annotations

from collections.abc import Callable

from motley.daemon.models.description.axes import Axis, W
from motley.daemon.models.description.operations.recurrence import (
    DeltaRule,
    DilatedConvolution,
    Recurrence,
    ShortConvolution,
    StateSpace,
)
from motley.plugins.recurrent import StateSpec


def state_spec(recurrence: Recurrence, width: Callable[[Axis], int]) -> StateSpec:
    """The state of a layer; `width` says how many elements of an axis are there."""
    match recurrence:
        case DeltaRule(layer=layer, heads=heads, filters=filters, b=b, a=a):
            columns = 2 * width(heads.key_axis) + width(heads.value_axis)
            gates = width(b.axis) + width(a.axis)
            sizes = heads.key_size, heads.value_size
            return StateSpec(layer, columns, reach(filters[0]), width(heads.gate_axis), *sizes, gates)
        case StateSpace(layer=layer, heads=heads, filters=filters):
            columns = width(heads.group_axis) + 2 * width(heads.key_axis)
            count = width(heads.gate_axis)
            return StateSpec(layer, columns, reach(filters[0]), count, heads.key_size, heads.value_size, count)
        case ShortConvolution(layer=layer, filter=own):
            return StateSpec(layer, width(own.out), reach(own))
        case DilatedConvolution(layer=layer, filter=own, dilation=dilation):
            return StateSpec(layer, width(own.out), (reach(own) - 1) * dilation + 1)


def reach(filters: W) -> int:
    """Positions that a convolution sees, a row's own among them."""
    assert filters.in_ is not None
    return filters.in_.size
