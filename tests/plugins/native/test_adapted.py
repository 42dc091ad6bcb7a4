"""What adapters add to products, against float64 and against themselves: every level, and a row beside any others and
beside whatever else is loaded, gives the same bits."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.plugins.native.adapted import (
    KINDS,
    AdaptedProduct,
    PackedFactors,
    StepRows,
    down_bytes,
    pack_down,
    pack_up,
    up_bytes,
)
from motley.plugins.native.library import F32
from motley.plugins.native.matmul import Pool, QuantisedMatrix
from tests.plugins.native.native_levels import assert_same, at_all_levels, at_the_end, normal

POOL = Pool(1)
Pair = tuple[npt.NDArray[Any], npt.NDArray[Any]]
WIDTHS = (5, 0, 37)


def packed(down: npt.NDArray[Any], up: npt.NDArray[Any]) -> PackedFactors:
    """A and B as the kernel reads them, at the end of pages."""
    places = [at_the_end(np.full(size, 0xFF, np.uint8)) for size in (down_bytes(down), up_bytes(up))]
    (rank, columns), width = down.shape, len(up)
    return PackedFactors(rank, columns, width, pack_down(down, places[0]), pack_up(up, places[1]))


def packed_whole(matrix: npt.NDArray[Any]) -> PackedFactors:
    """A matrix in place of the base's, likewise."""
    width, columns = matrix.shape
    place = at_the_end(np.full(down_bytes(matrix), 0xFF, np.uint8))
    return PackedFactors(width, columns, width, pack_down(matrix, place), None)


def pair(random: np.random.Generator, rank: int, columns: int, width: int, kind: np.dtype[Any]) -> Pair:
    """A and B of an adapter for one part of a product."""
    return normal(random, rank, columns).astype(kind), normal(random, rank, width).astype(kind).T


def loaded(slots: dict[int, dict[int, Pair]], columns: int, widths: tuple[int, ...], pool: Pool) -> AdaptedProduct:
    """A product with adapters, by the slots and the numbers of the parts."""
    product = AdaptedProduct(columns, widths, max(slots, default=1), pool)
    for slot, pairs in slots.items():
        for part, (down, up) in pairs.items():
            product.load(slot, part, packed(down, up))
    return product


def adapted(product: AdaptedProduct, x: F32, y: F32, rows: dict[int, list[int]]) -> F32:
    """y after what the adapters of its rows have added."""
    own, result = StepRows(len(x)), y.copy()
    own.set(rows)
    product.bind(x, result, own)()
    return result


@given(
    slots=st.lists(st.integers(0, 3), min_size=1, max_size=11),
    columns=st.sampled_from([1, 15, 16, 33, 64, 200]),
    rank=st.sampled_from([0, 1, 4, 9, 16, 35]),
    kinds=st.tuples(st.sampled_from(sorted(KINDS, key=str)), st.sampled_from(sorted(KINDS, key=str))),
)
def test_rows_of_several_adapters(
    slots: list[int], columns: int, rank: int, kinds: tuple[np.dtype[Any], np.dtype[Any]]
) -> None:
    random = np.random.default_rng([columns, rank, len(slots)])
    x, y = normal(random, len(slots), columns), normal(random, len(slots), sum(WIDTHS))
    pairs = {
        1: {0: pair(random, rank, columns, 5, kinds[0]), 2: pair(random, rank + 3, columns, 37, kinds[1])},
        2: {2: pair(random, rank, columns, 37, kinds[1])},
        3: {0: pair(random, 2, columns, 5, kinds[1])},
    }
    product = loaded(pairs, columns, WIDTHS, POOL)
    rows = {slot: [row for row, own in enumerate(slots) if own == slot] for slot in {*slots} - {0}}
    result = at_all_levels(lambda: adapted(product, x, y, rows))
    exact, size = y.astype(np.float64), np.abs(y.astype(np.float64))
    for row, slot in enumerate(slots):
        for part, (down, up) in pairs.get(slot, {}).items():
            columns_of = slice(sum(WIDTHS[:part]), sum(WIDTHS[: part + 1]))
            inner, outer = down.astype(np.float64), up.astype(np.float64)
            exact[row, columns_of] += outer @ (inner @ x[row])
            size[row, columns_of] += np.abs(outer) @ (np.abs(inner) @ np.abs(x[row]))
    assert (np.abs(result - exact) <= 8 * 2.0**-24 * size).all()
    assert_same(result[[slot == 0 for slot in slots]], y[[slot == 0 for slot in slots]])
    for row, slot in enumerate(slots):
        if slot:  # alone, with nothing else in the slots
            alone = loaded({slot: pairs[slot]}, columns, WIDTHS, POOL)
            assert_same(adapted(alone, x[row : row + 1], y[row : row + 1], {slot: [0]}), result[row : row + 1])


@pytest.mark.parametrize("threads", [2, 5])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    random, kind = np.random.default_rng(threads), np.dtype(ml_dtypes.bfloat16)
    x, y = normal(random, 7, 300), normal(random, 7, 2000)
    pairs = {slot: {0: pair(random, 40, 300, 2000, kind)} for slot in (1, 2)}
    rows = {2: [0, 3, 4, 6], 1: [5, 1]}
    pool = Pool(threads)
    results = [adapted(loaded(pairs, 300, (2000,), each), x, y, rows) for each in (POOL, pool)]
    pool.close()
    assert_same(*results)
    assert_same(results[0][2], y[2])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 3, 21])
@pytest.mark.parametrize("widths", [(5, 0, 11), (70, 58), (40, 300, 7)], ids=str)  # one panel, two and many
def test_beside_the_base_s_product_bits_are_as_after_it(widths: tuple[int, ...], tokens: int, threads: int) -> None:
    """Of factors, of a matrix in place of the base's, and where no row has an adapter."""
    random, width = np.random.default_rng([tokens, *widths]), sum(widths)
    codes = random.integers(0, 256, (width, 3, 32), np.uint8)
    scales = random.standard_normal((width, 3)).astype(np.float32)
    pool = Pool(threads)
    base = QuantisedMatrix(codes, scales, None, None, 4, 64, pool)
    kinds = [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)]
    pairs = {
        slot: {part: pair(random, 3 * slot, 192, own, kind) for part, own in enumerate(widths) if own}
        for slot, kind in enumerate(kinds, 1)
    }
    product = loaded(pairs, 192, widths, pool)
    product.load(2, len(widths) - 1, packed_whole(normal(random, widths[-1], 192).astype(np.float16)))
    x, y, rows = normal(random, tokens, 192), np.empty((tokens, width), np.float32), StepRows(tokens)
    together = product.bind(x, y, rows, base)

    def run() -> F32:
        y.fill(np.nan)
        together()
        return y.copy()

    for slots in ({}, {3: [0]}, {2: [*range(tokens)][1::2], 1: [*range(tokens)][::2]}):
        own = {slot: each for slot, each in slots.items() if each}
        rows.set(own)
        result = at_all_levels(run)
        base.bind(x, y)()
        assert_same(result, adapted(product, x, y, own))
    pool.close()


def test_zeros_change_no_bit() -> None:
    """Not even of a zero, whose sign an addition of zero may change."""
    random = np.random.default_rng(0)
    x, y = normal(random, 3, 32), normal(random, 3, 20)
    y[:, ::3] = -0.0
    down, up = pair(random, 4, 32, 20, np.dtype(np.float32))
    pairs = {1: {0: (down, np.zeros_like(up))}, 2: {0: (np.zeros_like(down), up)}, 3: {0: (down[:0], up[:, :0])}}
    product = loaded(pairs, 32, (20,), POOL)
    assert_same(at_all_levels(lambda: adapted(product, x, y, {1: [0], 2: [1], 3: [2]})), y)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("columns", "width"), [(1, 1), (33, 5), (64, 130), (200, 67)])
def test_a_matrix_in_place_of_the_base_s(kind: np.dtype[Any], columns: int, width: int, threads: int) -> None:
    """Beside rows of other adapters and of none, with the bits that a row has alone."""
    random = np.random.default_rng([columns, width])
    x, y = normal(random, 8, columns), normal(random, 8, 3 + width)
    y[5] = np.nan
    matrix = normal(random, width, columns).astype(kind)
    pool = Pool(threads)
    product = loaded({1: {1: pair(random, 4, columns, width, kind)}, 2: {}}, columns, (3, width), pool)
    product.load(2, 1, packed_whole(matrix))
    rows = {2: [7, 0, 5, 2, 3, 6], 1: [4]}
    result = at_all_levels(lambda: adapted(product, x, y, rows))
    of_it = rows[2]
    exact = x[of_it].astype(np.float64) @ matrix.astype(np.float64).T
    size = np.abs(x[of_it]).astype(np.float64) @ np.abs(matrix.astype(np.float64)).T
    assert (np.abs(result[of_it, 3:] - exact) <= 4 * 2.0**-24 * size).all()
    assert_same(result[:, :3], y[:, :3])
    assert_same(result[1], y[1])
    assert (result[4, 3:] != y[4, 3:]).any()
    for row in of_it:
        assert_same(adapted(product, x[row : row + 1], y[row : row + 1], {2: [0]})[0], result[row])
    product.unload(2)
    assert_same(adapted(product, x, y, {2: of_it}), y)
    with pytest.raises(ValueError, match="is none for the"):
        product.load(2, 1, packed_whole(matrix)._replace(rank=width + 1))
    pool.close()


def test_an_unloaded_slot_adds_nothing() -> None:
    random = np.random.default_rng(1)
    x, y = normal(random, 1, 8), normal(random, 1, 6)
    product = loaded({1: {0: pair(random, 2, 8, 6, np.dtype(np.float32))}}, 8, (6,), POOL)
    assert (adapted(product, x, y, {1: [0]}) != y).any()
    product.unload(1)
    assert_same(adapted(product, x, y, {1: [0]}), y)


@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_nothing_is_read_beyond_the_end(kind: np.dtype[Any]) -> None:
    random = np.random.default_rng(2)
    x, y = at_the_end(normal(random, 3, 21)), normal(random, 3, 7)
    down, up = pair(random, 5, 21, 7, kind)
    product = loaded({1: {0: (down, up)}}, 21, (7,), POOL)
    at_all_levels(lambda: adapted(product, x, y, {1: [0, 1, 2]}))


def test_misfits_are_told() -> None:
    random = np.random.default_rng(3)
    x, y = normal(random, 2, 8), normal(random, 2, 6)
    down, up = pair(random, 2, 8, 6, np.dtype(np.float32))
    product = loaded({1: {0: (down, up)}}, 8, (6,), POOL)
    rows = StepRows(4)
    rows.set({1: [2]})
    with pytest.raises(IndexError, match="slot 1 has a row that is not among the 2"):
        product.bind(x, y, rows)()
    with pytest.raises(ValueError, match="at most 4 rows"):
        rows.set({1: [0, 1, 2], 2: [3, 4]})
    with pytest.raises(ValueError, match="6 by 9 is not 6 by 8"):
        product.load(1, 0, packed(normal(random, 2, 9), up))
    with pytest.raises(ValueError, match="not int32"):
        product.load(1, 0, packed(down.astype(np.int32), up))
    with pytest.raises(ValueError, match="y must be"):
        product.bind(x, normal(random, 2, 7), rows)
