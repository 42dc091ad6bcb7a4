"""Who is told to be to blame where a session loses ranks."""

from __future__ import annotations

from motley.orchestrator.mesh.nodes import LEFT
from motley.orchestrator.sessions import blame
from motley.orchestrator.workers import Away, Worker
from motley.protocol.mesh_pb2 import Failure


class Some(Worker):
    """A worker, of which nothing but its place matters."""

    @property
    def role(self) -> str:
        return f"rank {self.index}"


def workers() -> list[Some]:
    return [Some(index, f"id-{index}", f"node-{index}", memory_limit=0) for index in range(3)]


def reported(by: int, lost: int, found: int = 0, *, away: int | None = None) -> Failure:
    """What is told of a report; `lost` and `found` count from 1, as in a `Failure`, and 0 is nobody."""
    all_ = workers()
    if away is not None:
        all_[away].away = Away(0.0, 1.0, "its connection ended")
    named = {worker.index: worker for worker in all_}
    return blame.reported(all_[by], Failure(message="silence", lost_rank=lost, found_by=found), named.get)


def test_a_report_names_who_is_to_blame_and_then_who_has_found_it() -> None:
    alone = reported(by=1, lost=0)
    assert (alone.code, alone.message, alone.lost_rank) == ("rank_failed", "node 'node-1' (rank 1): silence", 2)
    assert reported(by=1, lost=2).message == "node 'node-1' (rank 1): silence"
    other = reported(by=0, lost=3)
    told = "node 'node-2' (rank 2), as node 'node-0' (rank 0) has found: silence"
    assert (other.message, other.lost_rank) == (told, 3)
    found = "node 'node-2' (rank 2), as node 'node-1' (rank 1) has found: silence"
    assert reported(by=0, lost=3, found=2).message == found


def test_of_a_node_that_is_cut_off_that_is_the_reason() -> None:
    failure = reported(by=0, lost=3, away=2)
    assert (failure.code, failure.lost_rank) == ("node_lost", 3)
    assert failure.message == "node 'node-2' (rank 2) is lost: its connection ended"


def test_a_node_that_is_gone_is_named_with_all_its_workers() -> None:
    lost = workers()[1:]
    lost[1].node_name = lost[0].node_name
    failure = blame.node_gone(lost, LEFT)
    assert (failure.code, failure.lost_rank) == ("node_lost", 2)
    assert failure.message == f"node 'node-1' (rank 1 and rank 2) has left: {LEFT}"
