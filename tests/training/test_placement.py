from __future__ import annotations

import time
from itertools import permutations, product

import numpy as np
import pytest

from motley.training.errors import TrainingError
from motley.training.placement import F64, I64, assign, assign_greedily, assign_randomly


def drawn(parts: int, nodes: int, seed: int) -> tuple[F64, F64, F64]:
    rng = np.random.default_rng(seed)
    return rng.random((parts, nodes)), rng.uniform(1, 3, parts), rng.uniform(2, 5, nodes)


def worth(affinity: F64, nodes: I64) -> float:
    return float(affinity[np.arange(len(nodes)), nodes].sum())


class TestWithScipy:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("scipy")

    @pytest.mark.parametrize("seed", range(5))
    def test_no_assignment_is_worth_more(self, seed: int) -> None:
        affinity, need, free = drawn(4, 6, seed)
        nodes = assign(affinity, need, free)
        assert len(set(nodes)) == 4
        assert (need <= free[nodes]).all()
        tried = [np.array(each) for each in permutations(range(6), 4)]
        best = max(worth(affinity, each) for each in tried if (need <= free[each]).all())
        assert worth(affinity, nodes) == pytest.approx(best)

    @pytest.mark.parametrize("seed", range(5))
    def test_more_parts_than_nodes_share_them_within_their_memory(self, seed: int) -> None:
        affinity, need, free = drawn(5, 3, seed)
        free = free * 2
        nodes = assign(affinity, need, free)

        def fits(each: I64) -> bool:
            return bool((np.bincount(each, need, 3) <= free + 1e-9).all())

        assert fits(nodes)
        best = max(worth(affinity, each) for each in map(np.array, product(range(3), repeat=5)) if fits(each))
        assert worth(affinity, nodes) == pytest.approx(best)

    def test_parts_that_compete_for_one_large_node_share_it(self) -> None:
        nodes = assign(np.ones((2, 3)), np.array([5.0, 5.0]), np.array([12.0, 1.0, 1.0]))
        assert nodes.tolist() == [0, 0]

    def test_too_little_memory_is_told(self) -> None:
        with pytest.raises(TrainingError, match="part 1 takes 9 bytes, and no node has more than 4 free"):
            assign(np.ones((2, 2)), np.array([1.0, 9.0]), np.array([4.0, 4.0]))
        with pytest.raises(TrainingError, match="3 parts of 9 bytes do not fit 2 nodes with 8 bytes free"):
            assign(np.ones((3, 2)), np.full(3, 3.0), np.full(2, 4.0))

    def test_a_hundred_nodes_and_32_parts_take_less_than_40_ms(self) -> None:
        affinity, need, free = drawn(32, 100, 9)
        assign(affinity, need, free)  # which imports scipy
        times = []
        for _ in range(5):
            began = time.perf_counter()
            nodes = assign(affinity, need, free)
            times.append(time.perf_counter() - began)
        assert min(times) < 0.04
        greedy = worth(affinity, assign_greedily(affinity, need, free))
        chance = worth(affinity, assign_randomly(affinity, need, free, np.random.default_rng(1)))
        assert chance < greedy < worth(affinity, nodes)


def test_greedily_each_part_has_a_node_of_its_own_with_the_memory() -> None:
    affinity = np.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    assert assign_greedily(affinity, np.array([1.0, 1.0]), np.array([2.0, 2.0, 2.0])).tolist() == [0, 1]
    assert assign_greedily(affinity, np.array([1.0, 1.0]), np.array([2.0, 0.5, 2.0])).tolist() == [0, 2]
    with pytest.raises(TrainingError, match="no node is left with 1 bytes for part 1"):
        assign_greedily(affinity, np.array([1.0, 1.0]), np.array([2.0, 0.5, 0.5]))
