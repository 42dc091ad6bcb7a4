"""Sums over the ranks: the nodes by which a rank meets the others.

A sum is an all-reduce of each rank's one term. In exact mode it is made by the tree over the leaves of all ranks
(`motley.daemon.models.cutting.tree`): a rank sums its leaves to subtrees, all ranks gather those of all, and everyone
sums them on alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import TensorProto

from motley.daemon.models.cutting.share import Share
from motley.daemon.models.cutting.tree import fold, subtrees
from motley.daemon.models.cutting.units import Units
from motley.daemon.models.description.axes import Axis, Placement
from motley.daemon.models.description.model import Model
from motley.daemon.models.description.operations import Operation
from motley.daemon.models.description.operations.experts import Experts
from motley.daemon.models.description.operations.rows import Add, Linear, Scale, ScaleRows, Sum
from motley.daemon.models.graph.nodes import Nodes, Terms
from motley.daemon.models.graph.protos import declared_value
from motley.daemon.models.graph.rank_holding import RankHolding
from motley.plugins.engine import DOMAIN


class RankSums(Nodes):
    """One rank's nodes, with the collectives among them.

    Attributes:
        holding: what this rank has; `holdings` is what each has, by rank.
        size: of all ranks.
        crossing: values that are read on the other side of a collective, or of a layer's experts, by name.
        residual: the rows that the layer being lowered begins with, f32[T, D].
        inner: the axes along which partial values are made, which say what their leaves are.
    """

    def __init__(self, model: Model, cut: Units, shares: Sequence[Share], rank: int) -> None:
        self.holdings = [RankHolding(cut, share) for share in shares]
        super().__init__(self.holdings[rank], cut.held)
        self.cut = cut
        self.rank = rank
        self.size = len(shares)
        self.crossing: dict[str, onnx.ValueInfoProto] = {}
        self.residual = ""
        self.inner = {name: axis for layer in model.layers for name, axis in _inner_axes(layer.operations).items()}

    def sum(self, operation: Sum) -> None:
        """f32[T, N]{U_tp} of each -> f32[T, N], all at once but in trees, of which each axis has its own."""
        xs, y, width = operation.xs, operation.y, operation.y.axis.size
        parts = [x for x in xs if not self.is_whole(x)]  # others have been summed by experts elsewhere
        if len(parts) > 1 and not self.cut.exact:
            terms = [term for x in parts for term in self.partial(x).values()]
            together = {range(0): self.added(terms, f"{y.name}.partial")} if terms else {}
            found = [self.read(x) for x in xs if x not in parts]
            found.append(self.summed(together, self.inner[parts[0].name], y.name, width))
        else:
            found = [
                self.summed(self.partial(x), self.inner[x.name], y.name if len(xs) == 1 else x.name, width)
                if x in parts
                else self.read(x)
                for x in xs
            ]
        self.given(y, self.added(found, f"{y.name}.total"))

    def added(self, xs: Sequence[str], name: str) -> str:
        """Values added up in their order; a single one as it is."""
        total = xs[0]
        for number, x in enumerate(xs[1:], start=2):
            total = self.node("Add", [total, x], name if number == len(xs) else f"{name}.{number}")
        return total

    def summed(self, terms: Terms, axis: Axis, name: str, width: int) -> str:
        """f32[T, width], made of every rank's terms along an axis."""
        at = name.removesuffix(".reduced")
        if self.cut.exact:
            return self.tree_sum(at, axis, terms, width)
        own = next(iter(terms.values()), "") or self.zeros(f"{at}.partial", width)
        return self.all_reduce(own, at, width)

    def tree_sum(self, at: str, axis: Axis, terms: Terms, width: int) -> str:
        """f32[T, width] of this rank's leaves -> f32[T, width]: the sum of all ranks', by the tree over all leaves."""

        def add(span: range, left: str, right: str) -> str:
            return self.node("Add", [left, right], f"{at}.sum.{span.start}.{span.stop}")

        leaves = [holding.leaf_range(axis) for holding in self.holdings]
        total = range(leaves[-1].stop)
        trees = [subtrees(own, len(total)) for own in leaves]
        own = [fold(span, terms, add) for span in trees[self.rank]]
        spans = [span for tree in trees for span in tree]
        gathered = [f"{at}.gathered.{span.start}.{span.stop}" for span in spans]
        counts = [len(tree) for tree in trees]
        everyone = self._collective(own, gathered, width, "all_gather", counts=counts)
        return fold(total, dict(zip(spans, everyone, strict=True)), add)

    def all_reduce(self, partial: str, at: str, width: int) -> str:
        """f32[T, width]{U_tp} -> f32[T, width]: the sum of all ranks' terms, in rank order."""
        return self._collective([partial], [f"{at}.reduced"], width, "all_reduce", reduce_op="sum")[0]

    def _collective(
        self, operands: list[str], results: list[str], width: int, operation: str, **attributes: Any
    ) -> list[str]:
        self.node(
            "DistCollective",
            operands,
            *results,
            domain=DOMAIN,
            collective_operation=operation,
            root=-1,
            group_size=0,
            nb_rank=self.size,
            **attributes,
        )
        for value in (*operands, *results):
            self.crosses(value, width)
        return results

    def crosses(self, name: str, width: int, kind: int = TensorProto.FLOAT) -> None:
        """Declare a value [T, width] that is read on the other side of a collective, or of a layer's experts."""
        self.crossing[name] = declared_value(name, "T", width, kind=kind)

    def zeros(self, name: str, width: int) -> str:
        """f32[T, width]: what a rank without units adds to a sum."""
        rows = self.node("Shape", [self.residual], f"{name}.rows", start=0, end=1)
        shape = self.node("Concat", [rows, self.integers([width])], f"{name}.shape", axis=0)
        return self.node("ConstantOfShape", [shape], name)


def _inner_axes(operations: Sequence[Operation]) -> dict[str, Axis]:
    """The axes along which partial values are made, by their names."""
    axes: dict[str, Axis] = {}
    for each in operations:
        if isinstance(each, Linear) and each.ys[0].placement is Placement.PARTIAL:
            assert each.ws[0].in_ is not None
            axes[each.ys[0].name] = each.ws[0].in_
        elif isinstance(each, Add | Scale | ScaleRows) and each.x.name in axes:
            axes[each.y.name] = axes[each.x.name]
        elif isinstance(each, Experts):
            axes[each.y.name] = _inner_axes(each.body)[each.body_y.name]
    return axes
