"""Layers with a recurrent state: what they do between their projections, as nodes of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from motley.daemon.models.description.axes import Value, W
from motley.daemon.models.description.operations.recurrence import (
    DeltaRule,
    DilatedConvolution,
    HeadParts,
    Recurrence,
    ShortConvolution,
    StateSpace,
)
from motley.daemon.weights.spec import Piece, Weight
from motley.plugins.engine import DOMAIN
from motley.plugins.recurrent import DILATED_CONVOLUTION, GATED_DELTA, SHORT_CONVOLUTION, STATE_SPACE

if TYPE_CHECKING:
    from motley.daemon.models.graph.nodes import Nodes
    from motley.daemon.models.graph.rank_sums import RankSums


def lower_head_parts(nodes: Nodes, parts: HeadParts) -> None:
    """f32[T, heads * N]{tp} -> f32[T, heads * n]{tp} for each part of the heads."""
    x, of = nodes.read(parts.x), parts.x.axis.heads
    assert of is not None
    count = nodes.width(parts.x.axis) // of.size
    apart = nodes.node("Reshape", [x, nodes.integers((-1, count, of.size))], f"{x}.heads")
    sizes = {f"{y.name}.heads": nodes.width(y.axis) // count for y in parts.ys}
    nodes.node("Split", [apart, nodes.integers(sizes.values())], *sizes, axis=2)
    for y in parts.ys:
        rows = nodes.integers((-1, nodes.width(y.axis)))
        nodes.given(y, nodes.node("Reshape", [f"{y.name}.heads", rows], y.name))


def lower_recurrence(nodes: RankSums, recurrence: Recurrence) -> None:
    """The node of what an owner has of a layer with a recurrent state, see `motley.plugins.recurrent`."""
    match recurrence:
        case DeltaRule(heads=heads):
            weights = {
                "filters": recurrence.filters,
                "decay": (recurrence.decay,),
                "bias": (recurrence.bias,),
                "gain": (recurrence.gain,),
            }
            _lower(
                nodes,
                recurrence,
                GATED_DELTA,
                (recurrence.q, recurrence.k, recurrence.v, recurrence.z, recurrence.b, recurrence.a),
                weights,
                key_heads=nodes.width(recurrence.q.axis) // heads.key_size,
                group=heads.group,
                key_size=heads.key_size,
                value_size=heads.value_size,
                epsilon=recurrence.epsilon,
                decays=recurrence.decays,
                written=recurrence.written,
                floor=recurrence.floor,
                gate="sigmoid" if recurrence.squashed else "silu",
            )
        case StateSpace(heads=heads):
            own = nodes.width(heads.gate_axis)
            weights = {
                "filters": recurrence.filters,
                "decay": (recurrence.decay,),
                "bias": (recurrence.bias,),
                "skip": (recurrence.skip,),
                "filter_bias": recurrence.filter_biases or (),
            }
            _lower(
                nodes,
                recurrence,
                STATE_SPACE,
                (recurrence.x, recurrence.z, recurrence.b, recurrence.c, recurrence.dt),
                weights,
                heads=own,
                group=own if heads.shared else heads.group,
                key_size=heads.key_size,
                value_size=heads.value_size,
                least=recurrence.limits[0],
                most=recurrence.limits[1],
            )
        case ShortConvolution(b=b, c=c, x=x, filter_bias=bias):
            weights = {"filter": (recurrence.filter,), "filter_bias": (bias,) if bias else ()}
            _lower(nodes, recurrence, SHORT_CONVOLUTION, (b, c, x), weights)
        case DilatedConvolution(x=x, dilation=dilation):
            filters = {"filter": (recurrence.filter,)}
            _lower(nodes, recurrence, DILATED_CONVOLUTION, (x,), filters, dilation=dilation)


def _lower(
    nodes: RankSums,
    recurrence: Recurrence,
    operator: str,
    values: Sequence[Value],
    weights: Mapping[str, Sequence[W]],
    **attributes: Any,
) -> None:
    at = recurrence.y.name
    operands = [nodes.read(each) for each in values]
    for each in values:  # some are made before the products of others
        nodes.crosses(nodes.read(each), nodes.width(each.axis))

    def columns(w: W) -> range | None:
        return None if w.in_ is None else range(w.in_.size)

    for name, ws in weights.items():
        if ws:
            pieces = tuple(Piece(w.name, rows, columns(w)) for w in ws for rows in nodes.holding.ranges(w.out))
            operands.append(nodes.weight(Weight(f"{at}.{name}", pieces)))
    nodes.node(operator, operands, at, domain=DOMAIN, layer=recurrence.layer, **attributes)
    nodes.crosses(at, nodes.width(recurrence.y.axis))
    nodes.given(recurrence.y)
