"""Norms of rows of which every rank has a part: their root mean squares are over all ranks' parts."""

from __future__ import annotations

import numpy as np
from onnx import numpy_helper

from motley.daemon.models.cutting.share import kv_heads
from motley.daemon.models.description.axes import Axis, Kind, query_axis
from motley.daemon.models.description.operations.rows import Linear, WholeNorm
from motley.daemon.models.graph.nodes import Holding
from motley.daemon.models.graph.rank_sums import RankSums
from motley.daemon.weights.spec import Piece, Weight


def lower_whole_norm(nodes: RankSums, operation: WholeNorm) -> None:
    """Root mean squares of every row over all ranks' parts of some axes, and the norms by them.

    A key head that several ranks have, or one has several times, is counted where its first query head is.
    """
    at, xs = operation.name, operation.xs
    heads = xs[0].axis.heads
    assert heads is not None
    queries = query_axis(heads)
    present = nodes.has(xs[0])
    if present:
        product = nodes.maker(xs[0])
        for made in product.ys if isinstance(product, Linear) else xs:  # values are read beside queries and keys
            nodes.crosses(nodes.read(made), nodes.width(made.axis))
    if nodes.cut.exact:
        terms = _leaf_squares(nodes, operation) if present else {}
        total = nodes.tree_sum(at, queries, terms, len(xs))
    else:
        own = _own_squares(nodes, operation) if present else nodes.zeros(at, len(xs))
        total = nodes.all_reduce(own, at, len(xs))
    if not present:
        return
    shares = nodes.floats(*(1 / x.axis.size for x in xs))
    mean = nodes.node("Mul", [total, shares], f"{at}.mean")
    above = nodes.node("Add", [mean, nodes.floats(operation.epsilon)], f"{at}.above")
    root = nodes.node("Sqrt", [above], f"{at}.rms")
    rms = [root] if len(xs) == 1 else nodes.split(root, {f"{at}.rms.{index}": 1 for index in range(len(xs))})
    for x, y, gain, own in zip(xs, operation.ys, operation.gains, rms, strict=True):
        pieces = tuple(Piece(gain.name, rows) for rows in nodes.holding.ranges(gain.out))
        vector = nodes.weight(Weight(f"{y.name}.weight", pieces))
        unscaled = nodes.node("Div", [nodes.read(x), own], f"{y.name}.unscaled")
        nodes.given(y, nodes.node("Mul", [unscaled, vector], y.name))


def _own_squares(nodes: RankSums, operation: WholeNorm) -> str:
    """f32[T, 1 per axis]{U_tp}: the sums of squares of this rank's parts."""
    sums = []
    for x in operation.xs:
        heads = _counted(nodes.holding, x.axis)
        counted = np.repeat(heads, nodes.width(x.axis) // len(heads))
        name = f"f32.counted.{len(counted)}." + "".join(str(int(each)) for each in heads)
        nodes.constants[name] = numpy_helper.from_array(counted.astype(np.float32)[None], name)
        read = nodes.read(x)
        squares = nodes.node("Mul", [read, read], f"{x.name}.squared")
        sums.append(nodes.node("Gemm", [squares, name], f"{x.name}.squares", transB=1))
    return nodes.node("Concat", sums, operation.name, axis=1)


def _counted(holding: Holding, axis: Axis) -> list[bool]:
    """For each head of an axis that this rank has, whether it is this one that counts."""
    assert axis.heads is not None
    (queries,) = holding.ranges(query_axis(axis.heads))
    own = range(queries.start // axis.heads.size, queries.stop // axis.heads.size)
    if axis.kind is Kind.HEADS:
        return [True] * len(own)
    return [part.start == head * axis.heads.group for head, part in kv_heads(own, axis.heads)]


def _leaf_squares(nodes: RankSums, operation: WholeNorm) -> dict[range, str]:
    """f32[T, 1 per axis] for each of this rank's leaves: the sums of squares of it alone."""
    heads = operation.xs[0].axis.heads
    assert heads is not None
    none = nodes.zeros(f"{operation.name}.none", 1)
    sums: dict[range, list[str]] = {}
    for x in operation.xs:
        read = nodes.read(x)
        squares = nodes.node("Mul", [read, read], f"{x.name}.squared")
        for leaf, parts in _heads_by_leaf(nodes.holding, x.axis).items():
            columns = [column for start in parts for column in range(start * heads.size, (start + 1) * heads.size)]
            if not columns:
                sums.setdefault(leaf, []).append(none)
                continue
            at = f"{x.name}.squares.{leaf.start}"
            own = nodes.node("Gather", [squares, nodes.integers(columns)], f"{at}.columns", axis=1)
            sums.setdefault(leaf, []).append(nodes.node("ReduceSum", [own, nodes.integers([1])], at, keepdims=1))
    return {leaf: nodes.node("Concat", parts, f"{operation.name}.{leaf.start}", axis=1) for leaf, parts in sums.items()}


def _heads_by_leaf(holding: Holding, axis: Axis) -> dict[range, list[int]]:
    """Which of this rank's heads of an axis, by their place, count in each of its leaves."""
    assert axis.heads is not None
    size, group = axis.heads.size, axis.heads.group
    (queries,) = holding.ranges(query_axis(axis.heads))
    own = range(queries.start // size, queries.stop // size)
    firsts = (
        [*own]
        if axis.kind is Kind.HEADS
        else [part.start if part.start == head * group else -1 for head, part in kv_heads(own, axis.heads)]
    )
    return {
        leaf: [place for place, first in enumerate(firsts) if first * size in columns]
        for leaf, columns in holding.leaves(query_axis(axis.heads)).items()
    }
