"""FP32 reduction on a host rank.

Sums are always taken in rank order, ``((x0 + x1) + x2) + ...``, whatever the algorithm that brought the terms here, so
that every rank holds the same bits and the result does not depend on the algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def sum_in_order(terms: Sequence[npt.NDArray[Any]], own: int) -> None:
    """Sum ``terms`` from first to last into ``terms[own]``, without allocating.

    Args:
        terms: equally long vectors; all but ``terms[own]`` are scratch (the first is overwritten if ``own > 1``).
        own: index of the term that becomes the sum.
    """
    total = terms[0]
    for index in range(1, len(terms)):
        target = terms[own] if index >= own else terms[0]
        np.add(total, terms[index], out=target)
        total = target
