"""Fewer combinations of several parameters than their product, in which every two values still meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with a value of each parameter, such that any two values of two parameters are in one row at least.

    Most faults show with a certain value or a certain pair; three at once would each need a row of their own. The rows
    are the same each time: each begins with the first pair that none has yet, and takes what meets most that it lacks.
    """
    numbers = [range(len(values)) for values in parameters]
    missing = {
        ((one, a), (other, b)): None  # in this order
        for one, other in combinations(range(len(parameters)), 2)
        for a, b in product(numbers[one], numbers[other])
    }
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for parameter in sorted(set(range(len(parameters))) - row.keys()):
            row[parameter] = max(
                numbers[parameter],
                key=lambda value, at=parameter: sum(  # type: ignore[misc] # the first of equals
                    tuple(sorted([(at, value), chosen])) in missing for chosen in row.items()
                ),
            )
        for pair in combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        rows.append(tuple(values[row[at]] for at, values in enumerate(parameters)))
    return rows
