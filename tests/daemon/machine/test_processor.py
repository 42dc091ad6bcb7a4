"""Keeping a process on a core, and its products to so many threads."""

from __future__ import annotations

import numpy as np  # noqa: F401 (has the library)
import psutil
from threadpoolctl import threadpool_info

from motley.daemon.machine.processor import limit_products, pin_to_core


def test_pinning_wraps_around_the_cores_allowed() -> None:
    process = psutil.Process()
    if not hasattr(process, "cpu_affinity"):
        assert pin_to_core(0) is False
        return
    before = process.cpu_affinity()
    assert before
    try:
        assert pin_to_core(len(before)) is True
        assert process.cpu_affinity() == [before[0]]
    finally:
        process.cpu_affinity(before)


def test_products_are_computed_by_so_many_threads() -> None:
    def threads() -> list[int]:
        return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]

    before = threads()
    assert before, "NumPy has a library for products"
    try:
        limit_products(1)
        assert set(threads()) == {1}
    finally:
        limit_products(before[0])
    assert threads() == before
