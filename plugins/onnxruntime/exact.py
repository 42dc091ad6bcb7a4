"""Whether this machine's kernels give a row the same bits whatever rows are beside it, as exact sessions promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from motley.plugins.engine import F32, EngineError

PROBE = 7
"""Rows with which an exact engine tests its kernels: odd, as last rows are what some compute differently."""


def check_company(outcome: Callable[[int], Sequence[F32]]) -> None:
    """Refuse kernels that give a row other bits when it is computed beside others.

    Args:
        outcome: what they make of at most `PROBE` rows that are computed so many at a time, put together.

    Raises:
        EngineError: they do.
    """
    together = outcome(PROBE)
    for rows in (3, 1):
        if not all(map(np.array_equal, outcome(rows), together)):
            raise EngineError(
                "engine 'onnxruntime' cannot keep exact=true on this machine: its kernels give a row other bits beside"
                " other rows"
            )
