"""Kernels are refused that show a row's company; test_engine.py has those of this machine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from motley.plugins.engine import F32, EngineError
from motley.plugins.onnxruntime.exact import PROBE, check_company


def in_chunks(kernel: Callable[[F32], F32]) -> Callable[[int], list[F32]]:
    """What a kernel makes of all rows, so many at a time."""
    rows = np.arange(PROBE, dtype=np.float32)[:, None]
    return lambda count: [np.concatenate([kernel(rows[at : at + count]) for at in range(0, PROBE, count)])]


def test_a_kernel_that_takes_rows_by_themselves_is_taken() -> None:
    check_company(in_chunks(lambda rows: rows * 2))


@pytest.mark.parametrize("even", [True, False])
def test_a_kernel_that_takes_a_last_odd_row_otherwise_is_refused(even: bool) -> None:
    def kernel(rows: F32) -> F32:
        made = rows * 2
        if (len(rows) % 2 == 0) == even or len(rows) == 1:
            made[-1] += 1e-3
        return made

    with pytest.raises(EngineError, match="other bits beside other rows"):
        check_company(in_chunks(kernel))
