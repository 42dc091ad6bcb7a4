"""Layers with a recurrent state: what they do between their projections, as nodes of a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motley.daemon.models.description.axes import W
from motley.daemon.models.description.operations import DeltaRule, HeadParts
from motley.daemon.weights.spec import Piece, Weight
from motley.plugins.engine import DOMAIN

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


def lower_delta_rule(nodes: RankSums, delta: DeltaRule) -> None:
    """The node ``motley.GatedDelta`` of what an owner has of the heads, see `motley.plugins.engine`."""
    heads, at = delta.heads, delta.y.name

    def weight(name: str, *ws: W) -> str:
        def columns(w: W) -> range | None:
            return None if w.in_ is None else range(w.in_.size)

        pieces = tuple(Piece(w.name, rows, columns(w)) for w in ws for rows in nodes.holding.ranges(w.out))
        return nodes.weight(Weight(f"{at}.{name}", pieces))

    values = (delta.q, delta.k, delta.v, delta.z, delta.b, delta.a)
    operands = [nodes.read(each) for each in values]
    for each in values:  # some are made before the products of others
        nodes.crosses(nodes.read(each), nodes.width(each.axis))
    operands += [weight("filters", *delta.filters), weight("decay", delta.decay)]
    operands += [weight("bias", delta.bias), weight("gain", delta.gain)]
    nodes.node(
        "GatedDelta",
        operands,
        delta.y.name,
        domain=DOMAIN,
        layer=delta.layer,
        key_heads=nodes.width(delta.q.axis) // heads.key_size,
        group=heads.group,
        key_size=heads.key_size,
        value_size=heads.value_size,
        epsilon=delta.epsilon,
    )
    nodes.crosses(at, nodes.width(delta.y.axis))
    nodes.given(delta.y)
