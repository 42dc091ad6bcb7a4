from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.transport.schedule import (
    TRANSFER_S,
    Algorithm,
    Schedule,
    build,
    choose,
    cost,
    even_parts,
    one_shot,
    ring,
    two_shot,
)

RANKS = st.integers(1, 16)


def uniform(ranks: int, value: float) -> list[list[float]]:
    return [[value] * ranks for _ in range(ranks)]


@given(RANKS, st.integers(0, 300))
def test_even_parts_tile_and_differ_by_at_most_one(ranks: int, elements: int) -> None:
    parts = even_parts(elements, ranks)
    assert [index for part in parts for index in part] == list(range(elements))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(RANKS, st.integers(0, 300))
def test_one_shot_is_an_all_reduce(ranks: int, elements: int) -> None:
    schedule = one_shot(elements, ranks)
    schedule.check()
    assert len(schedule.transfers) == ranks * (ranks - 1)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=16))
def test_two_shot_is_an_all_reduce_with_unequal_and_empty_parts(lengths: list[int]) -> None:
    two_shot([range(a, b) for a, b in pairwise(accumulate(lengths, initial=0))]).check()


@given(RANKS, st.integers(0, 60), st.integers(1, 40))
def test_ring_is_an_all_reduce_between_neighbours(ranks: int, elements: int, piece: int) -> None:
    schedule = ring(elements, ranks, piece)
    schedule.check()
    assert all((t.source + 1) % ranks == t.target for t in schedule.transfers)


@pytest.mark.parametrize("ranks", [3, 7])
def test_ring_loads_every_link_with_at_most_twice_the_payload(ranks: int) -> None:
    for source in range(ranks):
        assert sum(len(t.part) for t in ring(1000, ranks, 10).transfers if t.source == source) <= 2000


@given(st.sampled_from(Algorithm), st.integers(2, 6), st.integers(1, 40), st.data())
def test_check_finds_any_missing_or_doubled_transfer(
    algorithm: Algorithm, ranks: int, elements: int, data: st.DataObject
) -> None:
    schedule = build(algorithm, elements, ranks)
    index = data.draw(st.integers(0, len(schedule.transfers) - 1))
    lost = replace(schedule, transfers=[t for i, t in enumerate(schedule.transfers) if i != index])
    again = replace(schedule, transfers=sorted([*schedule.transfers, schedule.transfers[index]], key=lambda t: t.step))
    for broken in (lost, again):
        with pytest.raises(ValueError, match=r".+"):
            broken.check()


def test_check_refuses_sums_out_of_rank_order() -> None:
    schedule = ring(8, 3, 8)
    swapped = [
        replace(t, source=(t.source + 1) % 3, target=(t.target + 1) % 3, terms=t.terms) for t in schedule.transfers
    ]
    with pytest.raises(ValueError, match="holds the sum"):
        Schedule(3, 8, swapped).check()


def test_cost_is_latency_and_bytes_of_the_busiest_rank() -> None:
    seconds = cost(one_shot(1000, 3), 4, uniform(3, 1e-3), uniform(3, 1e6))
    assert seconds == pytest.approx(1e-3 + 2 * (4000 / 1e6 + TRANSFER_S))


def test_choose_follows_latency_bandwidth_and_payload() -> None:
    slow_links = uniform(4, 100e-6), uniform(4, 117e6)
    assert choose(512, 4, *slow_links) is Algorithm.ONE_SHOT
    assert choose(16384, 4, *slow_links) is Algorithm.TWO_SHOT
    assert choose(1 << 20, 2, *slow_links) is Algorithm.ONE_SHOT
    assert choose(0, 4, *slow_links) is Algorithm.ONE_SHOT
    slow_diagonals = [[117e6 if (a - b) % 4 in (1, 3) else 5e6 for b in range(4)] for a in range(4)]
    assert choose(4 << 20, 4, slow_links[0], slow_diagonals) is Algorithm.RING
