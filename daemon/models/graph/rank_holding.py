"""What a rank has of each axis of a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from motley.daemon.models.cutting.share import Share, kv_heads
from motley.daemon.models.cutting.units import Units
from motley.daemon.models.description.axes import Axis, Kind


class RankHolding:
    """What a rank has of each axis: see `motley.daemon.models.graph.nodes.Holding`."""

    def __init__(self, cut: Units, share: Share) -> None:
        self._cut = cut
        self._share = share

    def ranges(self, axis: Axis) -> list[range]:
        """The elements of an axis, in order."""
        match axis.kind:
            case Kind.HEADS | Kind.KV_HEADS:
                assert axis.heads is not None
                queries = self._cut.query_heads(self._share.attention, self._share.attention_split, axis.heads)
                own = (
                    [queries] if axis.kind is Kind.HEADS else runs([head for head, _ in kv_heads(queries, axis.heads)])
                )
                found = [scaled(heads, axis.heads.size) for heads in own]
            case Kind.MLP:
                found = [self._cut.columns(self._share.mlp, axis.size)]
            case Kind.VOCABULARY:
                rows = self._cut.vocabulary_rows
                bounds = (self._share.vocabulary.start, self._share.vocabulary.stop)
                found = [range(*(min(bound * rows, axis.size) for bound in bounds))]
            case _:
                found = [range(axis.size)]
        return [each for each in found if each]

    def leaves(self, axis: Axis) -> dict[range, range]:
        """The terms that a product along an axis is made in."""
        own = self.leaf_range(axis)
        if not self._cut.exact:
            return dict(zip([own], self.ranges(axis), strict=False))
        return {range(leaf, leaf + 1): self._leaf(leaf, axis) for leaf in own}

    def leaf_range(self, axis: Axis) -> range:
        """The leaves of the tree of sums that this rank has of products along an axis."""
        if axis.kind is Kind.MLP:
            return self._share.mlp
        return scaled(self._share.attention, self._cut.attention_splits[-1] // self._share.attention_split)

    def _leaf(self, leaf: int, axis: Axis) -> range:
        one = range(leaf, leaf + 1)
        if axis.kind is Kind.MLP:
            return self._cut.columns(one, axis.size)
        assert axis.heads is not None
        return scaled(self._cut.query_heads(one, self._cut.attention_splits[-1], axis.heads), axis.heads.size)


def runs(numbers: Sequence[int]) -> list[range]:
    """Numbers as ranges of neighbours: ``[1, 2, 2, 3] -> [1..2], [2..3]``."""
    groups = groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    return [range(run[0], run[-1] + 1) for run in ([number for _, number in group] for _, group in groups)]


def scaled(span: range, width: int) -> range:
    """Heads as elements."""
    return range(span.start * width, span.stop * width)
