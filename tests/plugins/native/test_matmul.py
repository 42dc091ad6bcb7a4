"""Our own quantised matmul against float64, and against itself: every level, pool and batch gives the same bits."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from motley.plugins.native import library as native
from motley.plugins.native.library import F32, U8
from motley.plugins.native.matmul import BLOCKS, Pool, QuantisedMatrix
from tests.plugins.native.native_levels import LEVELS, assert_same, set_level

POOLS = {threads: Pool(threads) for threads in (1, 2, 3)}


@dataclass(frozen=True)
class Case:
    """A matrix and what it is multiplied by."""

    codes: U8
    scales: F32
    zeros: U8 | None
    bias: F32 | None
    bits: int
    block: int
    x: F32

    @classmethod
    def random(
        cls, rows: int, blocks: int, tokens: int, bits: int, block: int, zeros: bool = False, bias: bool = False
    ) -> Case:
        random = np.random.default_rng([rows, blocks, tokens, bits, block])
        return cls(
            random.integers(0, 256, (rows, blocks, block * bits // 8), np.uint8),
            random.standard_normal((rows, blocks)).astype(np.float32),
            random.integers(0, 256, (rows, -(-blocks * bits // 8)), np.uint8) if zeros else None,
            random.standard_normal(rows).astype(np.float32) if bias else None,
            bits,
            block,
            random.standard_normal((tokens, blocks * block)).astype(np.float32),
        )

    def matrix(self, threads: int = 1) -> QuantisedMatrix:
        return QuantisedMatrix(self.codes, self.scales, self.zeros, self.bias, self.bits, self.block, POOLS[threads])

    def result(self, threads: int = 1) -> F32:
        y = np.full((len(self.x), len(self.codes)), np.nan, np.float32)
        self.matrix(threads).bind(self.x, y)()
        return y

    def weights(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """f64[N, K]."""
        rows, blocks = self.scales.shape
        codes = unpacked(self.codes, self.bits).reshape(rows, blocks, self.block).astype(np.float64)
        if self.zeros is None:
            codes -= 1 << (self.bits - 1)
        else:
            codes -= unpacked(self.zeros, self.bits)[:, :blocks, None]
        return (codes * self.scales[..., None]).reshape(rows, -1)


def unpacked(codes: U8, bits: int) -> U8:
    return codes if bits == 8 else np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)


def assert_close(case: Case, y: F32) -> None:
    """Codes of activations are off by at most half a step of max|x| / 127; sums are float32."""
    weights, x = case.weights(), case.x.astype(np.float64)
    largest = np.abs(x).reshape(len(x), -1, case.block).max(-1).repeat(case.block, -1)
    bound = (largest / 254 + 1e-5 * np.abs(x)) @ np.abs(weights).T
    exact = x @ weights.T + (0 if case.bias is None else case.bias)
    assert (np.abs(y - exact) <= bound + 1e-6 * np.abs(exact)).all()


cases = st.builds(
    Case.random,
    rows=st.integers(1, 40),
    blocks=st.integers(1, 20),
    tokens=st.integers(1, 9),
    bits=st.sampled_from((4, 8)),
    block=st.sampled_from(BLOCKS),
    zeros=st.booleans(),
    bias=st.booleans(),
)


@given(case=cases)
def test_every_level_is_close_to_float64_and_has_the_same_bits(case: Case) -> None:
    set_level("portable")
    expected = case.result()
    assert_close(case, expected)
    for level in LEVELS[1:]:
        set_level(level)
        assert_same(case.result(), expected)


@given(case=cases, level=st.sampled_from(LEVELS), data=st.data())
def test_a_row_has_the_same_bits_whatever_stands_beside_it(case: Case, level: str, data: st.DataObject) -> None:
    set_level(level)
    together = case.result()
    chosen = data.draw(st.lists(st.integers(0, len(case.x) - 1), min_size=1, max_size=9))
    assert_same(replace(case, x=case.x[chosen]).result(), together[chosen])
    other = replace(case, x=np.where(np.arange(len(case.x))[:, None] == chosen[0], case.x, np.float32(np.inf)))
    assert_same(other.result()[chosen[0]], together[chosen[0]])


@given(case=cases, level=st.sampled_from(LEVELS), threads=st.sampled_from((2, 3)))
def test_threads_do_not_change_bits(case: Case, level: str, threads: int) -> None:
    set_level(level)
    assert_same(case.result(threads), case.result())


@given(
    case=cases,
    heads=st.integers(1, 5),
    first=st.integers(0, 20),
    more=st.integers(0, 3),
    threads=st.sampled_from((1, 3)),
)
def test_heads_get_together_what_each_gets_alone(case: Case, heads: int, first: int, more: int, threads: int) -> None:
    """To the bit, each of some of its own elements."""
    assume(not len(case.codes) % heads)
    tokens, columns, rows = len(case.x), case.x.shape[1], len(case.codes) // heads
    x = np.random.default_rng(heads).standard_normal((tokens, heads, first + columns + more)).astype(np.float32)
    y = np.full((tokens, heads * rows), np.nan, np.float32)
    parts = case.codes, case.scales, case.zeros, case.bias
    matrix = QuantisedMatrix(*parts, case.bits, case.block, POOLS[threads], heads)
    matrix.bind_heads(x.reshape(tokens, -1), y, first)()
    for head in range(heads):
        codes, scales, zeros, bias = (each if each is None else each[head * rows :][:rows] for each in parts)
        assert codes is not None
        assert scales is not None
        own = np.ascontiguousarray(x[:, head, first : first + columns])
        alone = replace(case, codes=codes, scales=scales, zeros=zeros, bias=bias, x=own)
        assert_same(np.ascontiguousarray(y[:, head * rows :][:, :rows]), alone.result())


def test_heads_that_do_not_fit_are_refused_by_name() -> None:
    case = Case.random(rows=6, blocks=1, tokens=2, bits=8, block=16)
    with pytest.raises(ValueError, match="heads must divide the 6 rows of codes, and are 4"):
        QuantisedMatrix(case.codes, case.scales, None, None, 8, 16, POOLS[1], heads=4)
    matrix, y = (
        QuantisedMatrix(case.codes, case.scales, None, None, 8, 16, POOLS[1], heads=3),
        np.zeros((2, 6), np.float32),
    )
    for width, first in ((50, 0), (48, 1), (60, -1)):
        with pytest.raises(ValueError, match=r"x must be float32\[M, 3 \* S\], S at least"):
            matrix.bind_heads(np.zeros((2, width), np.float32), y, first)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [16, 128, 256])
@pytest.mark.parametrize("zeros", [False, True])
def test_long_rows(bits: int, block: int, zeros: bool) -> None:
    """They are computed chunk by chunk, and in panels that threads share."""
    case = Case.random(rows=83, blocks=4352 // block + 1, tokens=7, bits=bits, block=block, zeros=zeros, bias=True)
    set_level("portable")
    expected = case.result()
    assert_close(case, expected)
    for level in LEVELS:
        set_level(level)
        assert_same(case.result(threads=3), expected)
        assert_same(replace(case, x=case.x[2:3]).result(threads=2), expected[2:3])


def test_the_arithmetic_is_as_stated() -> None:
    """Codes of activations are exact: half to even, by token and block."""
    case = Case.random(rows=5, blocks=3, tokens=2, bits=8, block=32)
    x = np.tile(np.array([127, 2.5, 3.5, -2.5, 0.49, -127, 1, 64.5], np.float32), (2, 12))
    x[1] *= 8
    codes = np.tile(np.array([127, 2, 4, -2, 0, -127, 1, 64], np.float64), (2, 12)) * [[1], [8]]
    np.testing.assert_allclose(replace(case, x=x).result(), codes @ case.weights().T, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("offset", [1, 3, 4, 63])
def test_operands_may_lie_anywhere_and_be_read_only(level: str, offset: int) -> None:
    case = Case.random(rows=9, blocks=5, tokens=5, bits=4, block=32, zeros=True, bias=True)
    set_level(level)

    def moved(array: np.ndarray[Any, Any], by: int) -> Any:
        memory = np.zeros(array.nbytes + 64, np.uint8)
        place = memory[by : by + array.nbytes].view(array.dtype).reshape(array.shape)
        place[...] = array
        place.flags.writeable = False
        return place

    assert case.zeros is not None
    elsewhere = replace(
        case,
        codes=moved(case.codes, offset),
        zeros=moved(case.zeros, offset),
        scales=moved(case.scales, 4 * offset % 64),
        x=moved(case.x, 4 * offset % 64),
    )
    assert_same(elsewhere.result(), case.result())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("bits", "block"), [(4, 32), (4, 128), (8, 16), (8, 256)])
def test_what_is_not_finite_does_not_vanish(level: str, value: float, bits: int, block: int) -> None:
    case = Case.random(rows=6, blocks=3, tokens=3, bits=bits, block=block)
    set_level(level)
    finite = case.result()
    case.x[1, block + 3] = value
    y = case.result()
    assert not np.isfinite(y[1]).any()
    assert_same(y[[0, 2]], finite[[0, 2]])


@pytest.mark.parametrize("level", LEVELS)
def test_magnitudes_at_the_ends_of_float32(level: str) -> None:
    case = Case.random(rows=6, blocks=2, tokens=4, bits=4, block=64)
    set_level(level)
    scaled = case.x * np.array([[0], [1e-42], [1e-20], [1e30]], np.float32)
    y = replace(case, x=scaled).result()
    assert not y[:2].any()
    assert_close(replace(case, x=scaled[2:]), y[2:])


def test_results_are_computed_anew_by_every_call() -> None:
    case = Case.random(rows=33, blocks=4, tokens=1, bits=4, block=128)
    wide = Case.random(rows=8, blocks=64, tokens=40, bits=8, block=64)
    y = np.empty((1, 33), np.float32)
    call = case.matrix(threads=2).bind(case.x, y)
    call()
    first = y.copy()
    wide.result(threads=2)  # which makes the pool's memory grow
    case.x[...] *= 2
    call()
    assert_same(y, first * 2)


def test_callers_of_one_pool_take_turns() -> None:
    many = [Case.random(rows=50 + i, blocks=4, tokens=1 + i, bits=4, block=32) for i in range(4)]
    expected = [case.result() for case in many]
    wrong = []

    def work(case: Case, result: F32) -> None:
        y = np.empty_like(result)
        call = case.matrix(threads=3).bind(case.x, y)
        for _ in range(300):
            y.fill(0)
            call()
            if not np.array_equal(y, result):
                wrong.append(case)

    workers = [threading.Thread(target=work, args=pair) for pair in zip(many, expected, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_an_idle_pool_sleeps() -> None:
    pool = Pool(3)
    case = Case.random(rows=400, blocks=8, tokens=2, bits=8, block=128)
    y = np.empty((2, 400), np.float32)
    QuantisedMatrix(case.codes, case.scales, None, None, 8, 128, pool).bind(case.x, y)()
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
    pool.close()


def test_a_closed_pool_still_computes() -> None:
    pool = Pool(2)
    case = Case.random(rows=40, blocks=8, tokens=2, bits=8, block=128)
    y = np.empty((2, 40), np.float32)
    call = QuantisedMatrix(case.codes, case.scales, None, None, 8, 128, pool).bind(case.x, y)
    pool.close()
    pool.close()
    del pool
    call()
    assert_same(y, case.result())


BEYOND = """
import numpy as np
from motley.plugins.native.matmul import Pool, QuantisedMatrix
from tests.plugins.native.native_levels import LEVELS, at_the_end, set_level

def ones(shape, dtype):
    return at_the_end(np.ones(shape, dtype))

pool = Pool(1)
for level in LEVELS:
    set_level(level)
    for bits in (4, 8):
        for block in (16, 32, 64, 128, 256):
            for blocks in (1, 2, 3, 5, 9):
                codes = ones((5, blocks, block * bits // 8), np.uint8)
                scales, bias = ones((5, blocks), np.float32), ones((5,), np.float32)
                zeros = ones((5, -(-blocks * bits // 8)), np.uint8)
                matrix = QuantisedMatrix(codes, scales, zeros, bias, bits, block, pool)
                for tokens in (1, 2, 5):
                    x, y = ones((tokens, blocks * block), np.float32), ones((tokens, 5), np.float32)
                    matrix.bind(x, y)()
print("done")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="pages are fenced by mprotect")
def test_nothing_is_read_beyond_the_last_byte() -> None:
    root = Path(__file__).parents[3]
    ran = subprocess.run([sys.executable, "-c", BEYOND], capture_output=True, text=True, timeout=200, cwd=root)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")


REFUSED: dict[str, Callable[[Case], Case]] = {
    "codes": lambda case: replace(case, codes=case.codes[:, :, ::2]),
    "codes must be": lambda case: replace(case, codes=case.codes.astype(np.int8)),
    "codes .* contiguous": lambda case: replace(case, codes=np.repeat(case.codes, 2, axis=0)[::2]),
    "scales": lambda case: replace(case, scales=case.scales[1:]),
    "scales must be": lambda case: replace(case, scales=case.scales.astype(np.float64)),
    "scales .* aligned": lambda case: replace(
        case, scales=np.zeros(case.scales.nbytes + 4, np.uint8)[1:-3].view(np.float32).reshape(case.scales.shape)
    ),
    "zeros": lambda case: replace(case, zeros=np.zeros(case.scales.shape, np.uint8)),
    "bias": lambda case: replace(case, bias=np.zeros(3, np.float32)),
    "bits": lambda case: replace(case, bits=2),
    "block": lambda case: replace(case, block=48),
    "x": lambda case: replace(case, x=case.x[:, 1:]),
    "x must be": lambda case: replace(case, x=case.x[0]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_by_name(message: str) -> None:
    case = Case.random(rows=4, blocks=3, tokens=2, bits=4, block=32)
    with pytest.raises(ValueError, match=f"^{message}"):
        REFUSED[message](case).result()


def test_results_need_a_place() -> None:
    case = Case.random(rows=4, blocks=3, tokens=2, bits=4, block=32)
    y = np.empty((2, 4), np.float32)
    with pytest.raises(ValueError, match=r"^y must be"):
        case.matrix().bind(case.x, y[:, :3])
    y.flags.writeable = False
    with pytest.raises(ValueError, match=r"^y must be writeable"):
        case.matrix().bind(case.x, y)


def test_a_pool_has_at_least_the_calling_thread() -> None:
    with pytest.raises(ValueError, match="threads must be at least 1, not 0"):
        Pool(0)


def test_a_missing_library_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "PATH", tmp_path / "_kernels.so")
    with pytest.raises(ImportError, match=r"run `pip install \.`"):
        native.library.__wrapped__()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("PATH", Path(np.random.mtrand.__file__), "motley_interface"),
        ("INTERFACE", (native.INTERFACE[0] + 1, *native.INTERFACE[1:]), "its interface is"),
        ("INTERFACE", (*native.INTERFACE[:-1], native.INTERFACE[-1] + 8), "its interface is"),
        ("FUNCTIONS", (*native.FUNCTIONS, ("of_tomorrow", [], None)), "motley_of_tomorrow"),
    ],
    ids=["before there was an interface", "another version", "another struct", "a function is missing"],
)
def test_a_library_of_other_sources_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, reason: str
) -> None:
    monkeypatch.setattr(native, name, value)
    with pytest.raises(ImportError, match=rf"{reason}.*run `pip install \.`"):
        native.library.__wrapped__()
