"""How many threads NumPy's products have."""

from __future__ import annotations

import numpy as np  # noqa: F401 (has the library)
from threadpoolctl import threadpool_info

from motley.daemon.machine.products import limit_products


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
