"""Products by codes on a real device have the bits of the CPU engine."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from motley.plugins.cuda.kernels import SOURCES, THREADS, TOKENS, WARP, Coded
from motley.plugins.native.matmul import Pool, QuantisedMatrix
from motley.transport.cuda.driver import CudaDriver
from motley.transport.cuda.stream import CudaStream
from tests.plugins.cuda.test_quantised import packed, packed_rows

Array = np.ndarray[Any, Any]


@pytest.mark.parametrize(("bits", "block", "columns"), [(4, 32, 4096), (4, 128, 2048), (8, 128, 4096), (4, 16, 1008)])
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_products_by_codes(gpu: CudaDriver, bits: int, block: int, columns: int, tokens: int, zeros: bool) -> None:
    rng = np.random.default_rng(bits + block)
    rows, coded = 1000, Coded(bits, columns, block.bit_length() - 1)
    codes = rng.integers(0, 256, (rows, coded.row_bytes), np.uint8)
    scales = rng.standard_normal((rows, columns // block)).astype(np.float32)
    x = rng.standard_normal((tokens, columns)).astype(np.float32)
    expected = np.empty((tokens, rows), np.float32)
    own = codes.reshape(rows, columns // block, block * bits // 8)
    points = rng.integers(0, 1 << bits, scales.shape)
    QuantisedMatrix(own, scales, packed_rows(points, bits) if zeros else None, None, bits, block, Pool(1)).bind(
        x, expected
    )()
    together = next(each for each in TOKENS if each >= tokens)
    with ExitStack() as memory, CudaStream(gpu) as stream:

        def room(nbytes: int) -> int:
            address = gpu.allocate(nbytes)
            memory.callback(gpu.free, address)
            return address

        def moved(array: Array, address: int, *, out: bool = False) -> int:
            pinned = gpu.allocate_pinned(array.nbytes)
            memory.callback(gpu.free_pinned, pinned)
            staging = pinned.host.view(array.dtype).reshape(array.shape)
            ends = (staging.ctypes.data, address) if out else (address, staging.ctypes.data)
            staging[:] = array
            gpu.copy(*ends, array.nbytes, stream.handle)
            stream.synchronise(20)
            array[:] = staging
            return address

        def launch(kernel: str, threads: int, *given: int | None) -> None:
            """An address is larger than any other number here."""
            arguments = [
                ctypes.c_void_p(each) if each is None or each > 1 << 31 else ctypes.c_int(each) for each in given
            ]
            stream.launch(SOURCES, kernel, -(-threads // THREADS), THREADS, arguments)

        there, weights, parts, middles = (
            moved(each, room(each.nbytes)) for each in (x, codes, scales, packed(points, bits))
        )
        quantised, y = room(tokens * coded.token_bytes), room(expected.nbytes)
        shape = tokens, columns, coded.shift, coded.stretches
        launch(coded.quantise, tokens * coded.quantising_threads, there, columns, quantised, *shape)
        groups = -(-rows // coded.rows(together)) * -(-tokens // together)
        launch(
            coded.products(together, zeros),
            groups * WARP,
            *(quantised, coded.stretches, weights, parts, middles if zeros else None, None, y, rows, tokens, rows),
            *(coded.row_bytes, coded.block_shift, columns // block),
        )
        got = np.empty_like(expected)
        moved(got, y, out=True)
    assert got.tobytes() == expected.tobytes()
