"""Products by codes on a real device have the bits of the CPU engine."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.plugins.cuda.kernels import THREADS, Coded, RowSource, View
from motley.plugins.cuda.modules import module_of
from motley.plugins.native.matmul import Pool, QuantisedMatrix
from motley.transport.cuda.driver import CudaDriver, Driver
from motley.transport.cuda.stream import CudaStream
from tests.plugins.cuda.test_quantised import packed, packed_rows
from tests.transport.cuda.test_tiles import TILE

Array = np.ndarray[Any, Any]


class Device:
    """A stream, and memory that is given back."""

    def __init__(self, driver: Driver, memory: ExitStack) -> None:
        self._driver, self._memory = driver, memory
        self._stream = memory.enter_context(CudaStream(driver))

    def room(self, nbytes: int) -> int:
        address = self._driver.allocate(nbytes)
        self._memory.callback(self._driver.free, address)
        return address

    def sent(self, array: Array) -> int:
        """The address of a copy."""
        address = self.room(array.nbytes)
        self._copy(array, address, out=False)
        return address

    def fetch(self, array: Array, address: int) -> None:
        self._copy(array, address, out=True)

    def _copy(self, array: Array, address: int, *, out: bool) -> None:
        pinned = self._driver.allocate_pinned(array.nbytes)
        self._memory.callback(self._driver.free_pinned, pinned)
        staging = pinned.host.view(array.dtype).reshape(array.shape)
        staging[:] = array
        ends = (staging.ctypes.data, address) if out else (address, staging.ctypes.data)
        self._driver.copy(*ends, array.nbytes, self._stream.handle)
        self._stream.synchronise(20)
        array[:] = staging

    def launch(self, kernel: str, threads: int, *given: int | RowSource | None, sources: tuple[Path, ...] = ()) -> None:
        """`sources`: of a kernel that is no engine's. An address is larger than any other number here."""

        def argument(each: int | RowSource | None) -> Any:
            if isinstance(each, RowSource):
                return each
            return ctypes.c_void_p(each) if each is None or each > 1 << 31 else ctypes.c_int(each)

        size, arguments = (-(-threads // THREADS), min(threads, THREADS)), [*map(argument, given)]
        self._stream.launch(sources or module_of(kernel), kernel, *size, arguments, early=not sources)


@pytest.fixture
def device(gpu: CudaDriver) -> Iterator[Device]:
    with ExitStack() as memory:
        yield Device(gpu, memory)


@pytest.mark.parametrize("k", [16, 32])
def test_tiles_are_multiplied(device: Device, k: int) -> None:
    """By tensor cores, whose threads have the elements that the products think they have."""
    rng = np.random.default_rng(k)
    a, b = (rng.integers(-128, 128, shape, np.int8) for shape in ((16, k), (k, 8)))
    c = rng.integers(-(1 << 20), 1 << 20, (16, 8), np.int32)
    expected = c + a.astype(np.int32) @ b.astype(np.int32)
    sums = device.sent(c)
    device.launch(f"multiply_{k}", 32, device.sent(a), device.sent(b), sums, sources=TILE)
    device.fetch(c, sums)
    assert np.array_equal(c, expected)


FORMS = [(4, 32, 4096), (4, 128, 2048), (8, 128, 4096), (4, 16, 1008), (8, 16, 1008)]
SIZES = [(1, 1000), (3, 1000), (8, 1000), (13, 1000), (32, 1000), (70, 9000), (512, 2050)]


@pytest.mark.parametrize(("bits", "block", "columns"), FORMS)
@pytest.mark.parametrize(("tokens", "rows"), SIZES)
@pytest.mark.parametrize("zeros", [False, True])
def test_products_by_codes(
    device: Device, bits: int, block: int, columns: int, tokens: int, rows: int, zeros: bool
) -> None:
    rng = np.random.default_rng(bits + block)
    coded = Coded(bits, columns, block.bit_length() - 1)
    codes = rng.integers(0, 256, (rows, coded.row_bytes), np.uint8)
    scales = rng.standard_normal((rows, columns // block)).astype(np.float32)
    x = rng.standard_normal((tokens, columns)).astype(np.float32)
    expected = np.empty((tokens, rows), np.float32)
    own = codes.reshape(rows, columns // block, block * bits // 8)
    points = rng.integers(0, 1 << bits, scales.shape)
    QuantisedMatrix(own, scales, packed_rows(points, bits) if zeros else None, None, bits, block, Pool(1)).bind(
        x, expected
    )()
    there, weights, parts, middles = map(device.sent, (x, codes, scales, packed(points, bits)))
    quantised, y = device.room(coded.activation_bytes(tokens)), device.room(expected.nbytes)
    source = RowSource.of(View(there, columns, columns))
    shape = columns, coded.shift, coded.stretches
    device.launch(coded.quantise(tokens), tokens * coded.quantising_threads, source, quantised, *shape)
    device.launch(
        *coded.product(rows, tokens, zeros),
        *(quantised, coded.stretches, weights, parts, middles if zeros else None, None, y, rows, tokens, rows),
        *(coded.row_bytes, coded.block_shift, columns // block),
    )
    got = np.empty_like(expected)
    device.fetch(got, y)
    assert got.tobytes() == expected.tobytes()
