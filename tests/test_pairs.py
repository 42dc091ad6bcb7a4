"""The helper that thins products of parameters loses no pair."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest

from tests.pairs import pairwise


@pytest.mark.parametrize("sizes", [(2, 3), (3, 3, 3), (17, 3, 3), (2, 5, 3, 4), (1, 4, 2), (2,) * 8], ids=str)
def test_every_pair_is_there_in_fewer_rows_than_all(sizes: tuple[int, ...]) -> None:
    parameters = [[f"{name}{number}" for number in range(size)] for name, size in zip("abcdefgh", sizes, strict=False)]
    rows = pairwise(*parameters)
    for one, other in combinations(range(len(sizes)), 2):
        assert {(row[one], row[other]) for row in rows} == set(product(parameters[one], parameters[other]))
    largest = sorted(sizes)[-2:]
    assert prod(largest) <= len(rows) <= 1.5 * prod(largest) + 6
    assert len(rows) == len(set(rows)) <= prod(sizes)
    assert rows == pairwise(*parameters)
    assert set(rows) <= set(product(*parameters))


def test_values_need_not_be_comparable() -> None:
    assert len(pairwise([{}, []], [None, {}], [[], 1.0])) == 4
