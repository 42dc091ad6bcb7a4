"""How fast this machine's processor computes products, in each format that weights are held in: what plans rest on.

A product of one row reads its weights once, and is as fast as memory; one of many rows, of a prompt or of many
requests, computes more than it reads. Quantised weights are measured with the kernels that the CPU engine has, floats
with NumPy's matrix product, which like the engine's reads them at the speed of memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from motley.plugins.engine import FormatSpeed
from motley.plugins.native.library import F32
from motley.plugins.native.matmul import Pool, QuantisedMatrix
from motley.plugins.native.reach import Product, choose_reach
from motley.plugins.native.rows import bind_norm

SIDE = 2048
"""Rows and columns of the matrices that are measured with."""
BLOCK = 128
READ = 96 << 20
"""Bytes of weights that one row is measured with: more than most caches keep."""
ROWS = 32
"""Rows of a product of many."""
PASS_S = 0.15
"""Passes are repeated for so long, and the median counts."""


@dataclass(frozen=True)
class ComputeSpeed:
    """How fast a processor computes.

    Attributes:
        formats: one for each format.
        call_s: seconds that a small operation takes between two products, when caches hold nothing of it.
    """

    formats: Sequence[FormatSpeed]
    call_s: float

    def of(self, held: str) -> FormatSpeed:
        """With weights in a format, one of those that were measured."""
        return next(each for each in self.formats if each.format == held)


def measure_compute_speed(threads: int) -> ComputeSpeed:
    """Measure with so many threads. Takes about two seconds and 200 MB; NumPy's own threads are to be set to as many
    by whoever starts this process (``OPENBLAS_NUM_THREADS``)."""
    pool = Pool(threads)
    formats, calls = [], []
    for bits in (4, 8):
        one, many = (_quantised(bits, rows, pool) for rows in (1, ROWS))
        choose_reach(bits, one)
        formats.append(FormatSpeed(f"int{bits}", _speed(one), ROWS * _speed(many[:2])))
        calls.append(_call_s(one))
    one, many = _floats(1), _floats(ROWS)
    read, multiplied = _speed(one), ROWS * _speed(many[:2])
    # An engine on the processor holds fp16 as fp32, in twice the bytes.
    formats += [FormatSpeed("fp16", read / 2, multiplied / 2), FormatSpeed("fp32", read, multiplied)]
    pool.close()
    return ComputeSpeed(formats, median(calls))


def _quantised(bits: int, rows: int, pool: Pool) -> list[Product]:
    """Products by quantised matrices that are `READ` bytes together."""
    x, y = np.ones((rows, SIDE), np.float32), np.empty((rows, SIDE), np.float32)
    scales = np.full((SIDE, SIDE // BLOCK), 0.01, np.float32)
    each = SIDE * SIDE * bits // 8
    products = []
    for number in range(READ // each):
        codes = np.full((SIDE, SIDE // BLOCK, BLOCK * bits // 8), 17 + number, np.uint8)
        products.append(
            (each + scales.nbytes, QuantisedMatrix(codes, scales.copy(), None, None, bits, BLOCK, pool).bind(x, y))
        )
    return products


def _floats(rows: int) -> list[Product]:
    """Products by matrices of float32 that are `READ` bytes together."""
    x, y = np.ones((SIDE, rows), np.float32), np.empty((SIDE, rows), np.float32)

    def product(number: int) -> Product:
        weights = np.full((SIDE, SIDE), 0.01 * number, np.float32)
        return weights.nbytes, partial(_multiply, weights, x, y)

    return [product(number) for number in range(READ // (4 * SIDE * SIDE))]


def _multiply(weights: F32, x: F32, y: F32) -> None:
    np.matmul(weights, x, out=y)


def _speed(products: Sequence[Product]) -> float:
    """Bytes/s of the median pass over all products."""
    passes: list[float] = []
    deadline = time.perf_counter() + PASS_S
    while len(passes) < 3 or time.perf_counter() < deadline:
        began = time.perf_counter()
        for _, compute in products:
            compute()
        passes.append(time.perf_counter() - began)
    return sum(size for size, _ in products) / median(passes)


def _call_s(products: Sequence[Product]) -> float:
    """Seconds that a norm takes between products whose weights have streamed through the caches."""
    x, weight, y = np.ones((1, SIDE), np.float32), np.ones(SIDE, np.float32), np.empty((1, SIDE), np.float32)
    norm = bind_norm(x, None, weight, 1e-6, y, None)
    taken = []
    for _, compute in products:
        compute()
        began = time.perf_counter()
        norm()
        taken.append(time.perf_counter() - began)
    return median(taken)
