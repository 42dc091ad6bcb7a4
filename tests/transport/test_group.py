"""Groups of a mesh: collectives among some ranks, messages among all, and one end for both."""

from __future__ import annotations

import numpy as np
import pytest

from motley.transport import Communicator, PeerLost, PeerTimeout, UsageError, group_of
from motley.transport.schedules.forecast import Crowd, Network
from tests.transport.ranks import Run, values


def total(ranks: list[int], elements: int) -> np.ndarray:
    found = values(ranks[0], elements)
    for rank in ranks[1:]:
        found = found + values(rank, elements)
    return found


def test_groups_sum_by_themselves_while_messages_cross(run_ranks: Run) -> None:
    """Two groups of unlike sizes, in another order than the mesh's, make unlike numbers of calls."""
    groups = [[0, 2], [4, 1, 3]]

    def work(mesh: Communicator) -> tuple[int, int]:
        rank = mesh.rank
        ranks = next(own for own in groups if rank in own)
        group = group_of(mesh, ranks)
        assert (group.rank, group.size) == (ranks.index(rank), len(ranks))
        for turn in range(len(ranks) * 3):
            for elements in (1, 3000, 70_000):
                buffer = values(rank, elements)
                group.all_reduce(buffer)
                assert buffer.tobytes() == total(ranks, elements).tobytes()
            if rank == 2 and turn < 6:  # as an activation does: one of the first group has something for the other one
                mesh.send(values(turn, 5000), 3)
            if rank == 3 and turn < 6:
                assert mesh.recv(2, 10.0) == values(turn, 5000).tobytes()
        started = group.all_reduce_start(buffer)
        with pytest.raises(UsageError, match="must be finished before the next call"):
            mesh.send(b"", 1 if rank == 0 else 0)
        started.finish()
        everyone = values(rank, 10)
        mesh.all_reduce(everyone)
        assert everyone.tobytes() == total([0, 1, 2, 3, 4], 10).tobytes()
        return group.stats.snapshot().collectives, mesh.stats.snapshot().collectives

    found = run_ranks(5, work)
    assert found == [(20, 20) if rank in (0, 2) else (29, 29) for rank in range(5)]


def test_a_group_of_all_ranks_is_the_mesh(run_ranks: Run) -> None:
    def work(mesh: Communicator) -> bool:
        for wrong in ([0, 2], [0, 0, 1], [0 if mesh.rank else 1]):
            with pytest.raises(UsageError, match="can be in no group"):
                group_of(mesh, wrong)
        return group_of(mesh, range(2)) is mesh

    assert run_ranks(2, work) == [True, True]


def test_whoever_does_not_come_to_a_call_of_the_group_ends_the_mesh(run_ranks: Run) -> None:
    def work(mesh: Communicator) -> str:
        group = group_of(mesh, [0, 2] if mesh.rank != 1 else [1])
        group.deadline_s = 1.0
        if mesh.rank == 0:
            with pytest.raises(PeerTimeout, match="rank 2"):
                group.all_reduce(np.zeros(3, np.float32))
            for call in (lambda: mesh.send(b"", 1), lambda: group.all_reduce(np.zeros(3, np.float32))):
                with pytest.raises(PeerTimeout):
                    call()
            return "told"
        with pytest.raises(PeerLost):
            mesh.recv(1 if mesh.rank == 2 else 0, 30.0)
        with pytest.raises(PeerLost):
            group.barrier()
        return "heard"

    assert run_ranks(3, work) == ["told", "heard", "heard"]


def test_the_network_of_a_group_is_a_part_of_the_mesh_s() -> None:
    numbers = [[10.0 * one + other for other in range(4)] for one in range(4)]
    network = Network(numbers, numbers, 1e-6, 2e-9, [Crowd([0, 1, 3], 1)])
    part = network.among([3, 1])
    assert part == Network([[33.0, 31.0], [13.0, 11.0]], [[33.0, 31.0], [13.0, 11.0]], 1e-6, 2e-9, [Crowd([1, 0], 1)])
    assert network.among([0, 2]).crowds == []
