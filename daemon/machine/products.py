"""How many threads compute NumPy's products in this process."""

from __future__ import annotations

from threadpoolctl import threadpool_limits


def limit_products(threads: int) -> None:
    """Have no more than so many threads compute one of NumPy's products in this process.

    By itself it takes one for each core. Where a process has fewer cores to itself, these wait for each other.
    """
    threadpool_limits(threads, user_api="blas")
