"""Products by codes: the GPU's kernels, compiled for the host, give the bits of the CPU engine's at any number of rows;
and how much a GPU has to do for each code, by the machine code that it would run."""

from __future__ import annotations

import ctypes
import re
import subprocess
from functools import cache
from importlib.metadata import distribution
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from motley.plugins.cuda import kernels, modules
from motley.plugins.cuda.kernels import BLOCKS, THREADS, TILES, Coded, RowSource, View
from motley.plugins.cuda.modules import Module
from motley.plugins.native.matmul import Pool, QuantisedMatrix
from motley.transport.cuda.compiler import Capability, compile_kernels
from tests.plugins.cuda.launching import launch_kernel

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

MOST_PER_CODE = 2.2
"""Instructions for a 4-bit code at one token: with 4.5 a GPU with the memory of an RTX 3090 would wait for them."""
MOST_PER_TILE = {"16x8": (42, 50), "32x32": (17, 22)}
"""Instructions for a multiplication of tiles, that is for 4096 products, by the rows and tokens of a warp: in blocks of
a stretch at least, and in shorter ones. With 57 for eight tokens an H200 could just read 4-bit codes as fast as memory
gives them. With 29 for many an H100 could just do four tenths of the operations that FP16 does there at 512 rows, if it
began one in every cycle; with 17, in six of ten."""


def pointer(array: npt.NDArray[Any] | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def run(kernel: str, threads: int, *arguments: Any) -> None:
    given = [ctypes.c_int(each) if isinstance(each, int) else each for each in arguments]
    launch_kernel(kernel, -(-threads // THREADS), given)


def packed(points: npt.NDArray[Any], bits: int) -> U8:
    """Zero points as a share file has them, 4-bit ones two in a byte whatever row they are of."""
    flat = points.astype(np.uint8).ravel()
    if bits == 8:
        return flat
    flat = np.append(flat, np.zeros(flat.size % 2, np.uint8))
    return flat[0::2] | flat[1::2] << 4


def packed_rows(points: npt.NDArray[Any], bits: int) -> U8:
    """As `packed`, but each row begins with a byte of its own."""
    return np.stack([packed(row, bits) for row in points])


def on_the_gpu(x: F32, codes: U8, scales: F32, points: npt.NDArray[Any] | None, coded: Coded) -> F32:
    """y[tokens, rows] by the kernels that are chosen for so many tokens."""
    tokens, rows = len(x), len(codes)
    room = np.full(coded.activation_bytes(tokens) + 16, 0xAB, np.uint8)
    quantised = room[-room.ctypes.data % 16 :]
    run(
        coded.quantise(tokens),
        tokens * coded.quantising_threads,
        RowSource.of(View(x.ctypes.data, coded.columns, x.shape[1])),
        *(pointer(quantised), coded.columns, coded.shift, coded.stretches),
    )
    y = np.full((tokens, rows), np.nan, np.float32)
    zeros = None if points is None else packed(points, coded.bits)
    run(
        *coded.product(rows, tokens, zeros is not None),
        *(pointer(quantised), coded.stretches, pointer(codes), pointer(scales), pointer(zeros), pointer(None)),
        *(pointer(y), rows, tokens, rows, coded.row_bytes, coded.block_shift, scales.shape[1]),
    )
    return y


def check(bits: int, block: int, blocks: int, tokens: int, rows: int, zeros: bool, kind: str, seed: int) -> None:
    """That a random product has the bits of the CPU engine's."""
    rng = np.random.default_rng(seed)
    coded = Coded(bits, blocks * block, block.bit_length() - 1)
    room = np.zeros(rows * coded.row_bytes + 16, np.uint8)
    codes = room[-room.ctypes.data % 16 :][: rows * coded.row_bytes].reshape(rows, coded.row_bytes)
    codes[:] = rng.integers(0, 256, codes.shape)
    scales = rng.standard_normal((rows, blocks)).astype(np.float32)
    points = rng.integers(0, 1 << bits, (rows, blocks)) if zeros else None
    x = rng.standard_normal((tokens, coded.columns)).astype(np.float32)
    x *= {"tiny": 1e-38, "huge": 1e35}.get(kind, 1.0)
    if kind in ("inf", "nan", "zero"):
        x[rng.integers(tokens), rng.integers(coded.columns) // block * block :][:block] = float(
            kind.replace("zero", "0")
        )
    own = codes.reshape(rows, blocks, block * bits // 8)
    told = packed_rows(points, bits) if points is not None else None
    expected = np.empty((tokens, rows), np.float32)
    QuantisedMatrix(own, scales, told, None, bits, block, pool()).bind(x, expected)()
    got = on_the_gpu(x, codes, scales, points, coded)
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    assert np.where(np.isnan(got), 0, got).tobytes() == np.where(np.isnan(expected), 0, expected).tobytes()


@cache
def pool() -> Pool:
    return Pool(1)


FORMS = [(4, 16), (4, 32), (4, 128), (8, 16), (8, 64), (8, 256)]
"""Bits and columns of blocks: the least, some in between, the most."""
COUNTS = (1, *(tokens for _, tokens in TILES[:-1]), TILES[-1][1] + 1)
"""Of tokens: each chooses other kernels, where there are others."""


@pytest.mark.parametrize(("bits", "block"), FORMS)
def test_each_kernel_has_the_bits_of_the_cpu_engine(bits: int, block: int) -> None:
    """Rows that are no whole tiles, and that end within a stretch."""
    for tokens, zeros in product(COUNTS, [False, True]):
        check(bits, block, 1500 // block | 1, tokens, 35, zeros, "usual", tokens)


@pytest.mark.parametrize(("bits", "block"), FORMS)
def test_one_token_has_them_where_outputs_are_many(bits: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "NARROW", 0)
    for zeros in (False, True):
        check(bits, block, 1500 // block | 1, 1, 35, zeros, "usual", bits)


@given(
    st.sampled_from([4, 8]),
    st.sampled_from(BLOCKS),
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from(["usual", "tiny", "huge", "inf", "nan", "zero"]),
    st.integers(0, 1000),
)
@example(4, 128, 32, 2, 9, False, "usual", 0)  # several times as many stretches as are under way
@example(4, 16, 63, 9, 9, True, "usual", 1)  # rows that are no multiple of what a thread reads
@example(8, 256, 5, 1, 1, True, "usual", 2)  # blocks of several stretches
@example(4, 32, 500, 40, 17, False, "usual", 3)  # several times as many stretches as are under way, in tiles
def test_it_has_the_bits_of_the_cpu_engine(
    bits: int, block: int, blocks: int, tokens: int, rows: int, zeros: bool, kind: str, seed: int
) -> None:
    check(bits, block, max(1, blocks * 16 // block), tokens, rows, zeros, kind, seed)


def test_panels_of_rows_are_all_multiplied() -> None:
    """More blocks of rows than all tokens have before others."""
    check(4, 32, 1, 33, 256 * 32 + 40, False, "usual", 0)


def disassembler() -> Path:
    """NVIDIA's, which comes as a package."""
    found = pytest.importorskip("importlib.metadata")
    try:
        files = distribution("nvidia-cuda-nvdisasm").files or []
    except found.PackageNotFoundError:
        pytest.skip("nvidia-cuda-nvdisasm is not installed")
    return next(Path(str(file.locate())) for file in files if file.stem == "nvdisasm")


def per_multiplication(listing: str, kernel: str, multiplies: str) -> list[float]:
    """Instructions for each multiplication (of such a name) in the innermost loops of a kernel that multiply most,
    ascending."""
    (body,) = re.findall(rf"^\.text\.{kernel}:\n(.*?)(?=^//-----)", listing, re.DOTALL | re.MULTILINE)
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in body.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
    back = [
        (labels[target[1]], at + 1)
        for at, each in enumerate(instructions)
        if (target := re.search(r"\bBRA\b.*?(\.L_x_\d+)", each)) and labels[target[1]] <= at
    ]
    counts = {(begin, end): sum(multiplies in each for each in instructions[begin:end]) for begin, end in back}
    loops = [loop for loop, count in counts.items() if count]
    innermost = [one for one in loops if not any(one[0] <= a and b <= one[1] for a, b in loops if (a, b) != one)]
    most = max(counts[loop] for loop in innermost)
    return sorted((end - begin) / most for begin, end in innermost if counts[begin, end] == most)


@pytest.mark.soak
@pytest.mark.parametrize("capability", [Capability(8, 6), Capability(12, 0)], ids=str)
def test_a_gpu_has_little_to_do_for_a_code(capability: Capability, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    program = disassembler()

    def told(module: Module) -> str:
        cubin = tmp_path / "kernels.cubin"
        cubin.write_bytes(compile_kernels(module, capability))
        done = subprocess.run([program, "-c", cubin], capture_output=True, text=True, check=True, timeout=100)
        return done.stdout

    codes, tiles = told(modules.CODES["int4"]), told(modules.TILES["int4"])
    for kernel in ("products_int4", "products_int4_zeros"):
        assert 4 < per_multiplication(codes, kernel, "IDP")[-1] <= 4 * MOST_PER_CODE, kernel
    for tile, (most, most_in_short_blocks) in MOST_PER_TILE.items():
        long_blocks, short_blocks = per_multiplication(tiles, f"products_int4_{tile}", "IMMA")[:2]
        assert 9 < long_blocks <= most, tile
        assert 12 < short_blocks <= most_in_short_blocks, tile
