"""The sums of collectives, as a rank takes them on its host.

Sums are always taken in rank order, ``((x0 + x1) + x2) + ...``, whatever the algorithm that brought the terms here, so
that every rank holds the same bits and the result does not depend on the algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .formats import Bytes, Codec

Array = npt.NDArray[Any]


def sum_in_order(terms: Sequence[Array], own: int, out: Array) -> None:
    """Sum ``terms`` from first to last into `out`, without allocating.

    Args:
        terms: equally long vectors of the type that sums are taken in; all but ``terms[own]`` are scratch (the first
            is overwritten if ``own > 1``).
        own: index of the rank's own term.
        out: takes the sum; may be ``terms[own]``.
    """
    total = terms[0]
    for index in range(1, len(terms)):
        target = out if index >= own else terms[0]
        np.add(total, terms[index], out=target)
        total = target


def sum_encoded(terms: Sequence[tuple[Codec, Bytes]], total: Array, scratch: Array) -> None:
    """Sum ``terms`` from first to last into `total`, without allocating.

    Args:
        terms: each as it travels, with what decodes it; all of as many elements as `total`.
        total: accumulator[n], takes the sum.
        scratch: accumulator[n], is overwritten.
    """
    (codec, payload), *others = terms
    codec.decode(payload, total)
    for codec, payload in others:
        codec.decode(payload, scratch)
        np.add(total, scratch, out=total)
