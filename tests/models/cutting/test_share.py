"""Properties of the integer arithmetic that shares are made with."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.models.cutting.share import ShareError, kv_heads
from motley.daemon.models.description.axes import Heads
from tests.models.cuts import apportion, cut

weights = st.lists(st.floats(0, 1e6), min_size=1, max_size=12).filter(lambda values: sum(values) > 0)


@given(st.lists(st.integers(0, 50), max_size=12))
def test_cuts_tile(counts: list[int]) -> None:
    ranges = cut(counts)
    assert [len(own) for own in ranges] == counts
    assert list(chain.from_iterable(ranges)) == list(range(sum(counts)))


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ShareError, match="negative"):
        cut([3, -1])


@given(st.integers(0, 5000), weights)
def test_apportioning_adds_up_and_is_fair(total: int, values: list[float]) -> None:
    counts = apportion(total, values)
    assert sum(counts) == total
    for count, value in zip(counts, values, strict=True):
        assert abs(count - total * value / sum(values)) < 1 + 1e-6


@given(st.integers(0, 5000), weights)
def test_ranks_without_weight_get_nothing(total: int, values: list[float]) -> None:
    assert apportion(total, [*values, 0.0])[-1] == 0


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [1.0, -1.0]])
def test_impossible_weights_are_refused(values: list[float]) -> None:
    with pytest.raises(ShareError, match="weights"):
        apportion(5, values)


heads = st.builds(lambda keys, group: Heads(keys * group, keys, 2), st.integers(1, 8), st.integers(1, 8))


@given(heads, st.data())
def test_kv_heads_cover_some_query_heads_in_equal_steps(heads: Heads, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, heads.queries))
    queries = range(start, data.draw(st.integers(start, heads.queries)))
    found = kv_heads(queries, heads)
    assert list(chain.from_iterable(read for _, read in found)) == list(queries)
    assert len({len(read) for _, read in found}) <= 1
    assert all(query // heads.group == key for key, read in found for query in read)


@given(heads)
def test_all_query_heads_read_every_kv_head_once(heads: Heads) -> None:
    groups = [(key, range(key * heads.group, (key + 1) * heads.group)) for key in range(heads.keys)]
    assert kv_heads(range(heads.queries), heads) == groups


def test_a_kv_head_is_repeated_only_where_parts_are_unequal() -> None:
    pairs = Heads(4, 2, 64)
    assert kv_heads(range(4), pairs) == [(0, range(2)), (1, range(2, 4))]
    assert kv_heads(range(1, 4), pairs) == [(0, range(1, 2)), (1, range(2, 3)), (1, range(3, 4))]
    assert kv_heads(range(1, 3), pairs) == [(0, range(1, 2)), (1, range(2, 3))]
