"""What of rows of which every rank has a part is above a threshold that all ranks' parts decide."""

from __future__ import annotations

from motley.daemon.models.description.operations.rows import Linear, StatisticalTopK
from motley.daemon.models.graph.emitter import LARGEST
from motley.daemon.models.graph.rank_sums import RankSums


def lower_statistical_top_k(nodes: RankSums, operation: StatisticalTopK) -> None:
    """The sums of every row and of its squares over all ranks' parts, and what is above the threshold by them."""
    at, x, y = operation.name, operation.x, operation.y
    present = nodes.has(x)
    if present:
        product = nodes.maker(x)
        for made in product.ys if isinstance(product, Linear) else (x,):  # what lies beside it is read behind the sum
            nodes.crosses(nodes.read(made), nodes.width(made.axis))
    if nodes.cut.exact:
        total = nodes.tree_sum(at, x.axis, _leaf_sums(nodes, operation) if present else {}, 2)
    else:
        total = nodes.all_reduce(_own_sums(nodes, operation) if present else nodes.zeros(at, 2), at, 2)
    if not present:
        return
    means = nodes.node("Mul", [total, nodes.floats(1 / x.axis.size)], f"{at}.means")
    mean, of_squares = nodes.split(means, {f"{at}.mean": 1, f"{at}.mean_of_squares": 1})
    square = nodes.node("Mul", [mean, mean], f"{at}.square_of_mean")
    less = nodes.node("Mul", [square, nodes.floats(-1.0)], f"{at}.less")
    difference = nodes.node("Add", [of_squares, less], f"{at}.difference")
    variance = nodes.node("Clip", [difference, nodes.floats(0.0), nodes.floats(LARGEST)], f"{at}.variance")
    deviation = nodes.node("Sqrt", [variance], f"{at}.deviation")
    further = nodes.node("Mul", [deviation, nodes.floats(operation.deviations)], f"{at}.further")
    threshold = nodes.node("Add", [further, mean], f"{at}.threshold")
    down = nodes.node("Mul", [threshold, nodes.floats(-1.0)], f"{at}.down")
    lowered = nodes.node("Add", [nodes.read(x), down], f"{y.name}.lowered")
    nodes.given(y, nodes.node("Clip", [lowered, nodes.floats(0.0), nodes.floats(LARGEST)], y.name))


def _own_sums(nodes: RankSums, operation: StatisticalTopK) -> str:
    """f32[T, 2]{U_tp}: the sums of this rank's parts and of their squares; products, which engines compute fast."""
    x, at = nodes.read(operation.x), operation.name
    ones = nodes.row_of(1.0, nodes.width(operation.x.axis))
    squares = nodes.node("Mul", [x, x], f"{at}.squared")
    sums = [nodes.node("Gemm", [x, ones], f"{at}.sum", transB=1)]
    sums.append(nodes.node("Gemm", [squares, ones], f"{at}.sum_of_squares", transB=1))
    return nodes.node("Concat", sums, at, axis=1)


def _leaf_sums(nodes: RankSums, operation: StatisticalTopK) -> dict[range, str]:
    """f32[T, 2] for each of this rank's leaves: the sums of it alone, and of its squares."""
    x, axis, at = nodes.read(operation.x), operation.x.axis, operation.name
    squares = nodes.node("Mul", [x, x], f"{at}.squared")
    leaves = nodes.holding.leaves(axis)
    sums: dict[range, list[str]] = {leaf: [] for leaf in leaves}
    for value, called in ((x, "sum"), (squares, "sum_of_squares")):
        widths = {f"{at}.{called}.{leaf.start}.x": len(own) for leaf, own in leaves.items()}
        parts = nodes.split(value, widths) if len(widths) > 1 else [value]
        for leaf, part in zip(leaves, parts, strict=True):
            name = f"{at}.{called}.{leaf.start}"
            sums[leaf].append(nodes.node("ReduceSum", [part, nodes.integers([1])], name, keepdims=1))
    return {leaf: nodes.node("Concat", both, f"{at}.{leaf.start}", axis=1) for leaf, both in sums.items()}
