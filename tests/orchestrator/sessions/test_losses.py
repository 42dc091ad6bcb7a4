"""What a session remembers of what it has lost."""

from __future__ import annotations

import pytest

from motley.orchestrator.sessions.losses import AGAIN_S, KEPT, LOSSES, Losses
from motley.orchestrator.workers import Worker
from motley.protocol.mesh_pb2 import Failure


def worker(index: int, *, died: bool = False, gone: bool = False) -> Worker:
    made = Worker(index, f"id-{index}", f"node-{index}", memory_limit=0)
    made.died, made.gone = died, gone
    return made


def failure(index: int, why: str = "lost") -> Failure:
    return Failure(code="node_lost", message=why, lost_rank=index + 1)


@pytest.mark.parametrize(
    ("died", "before", "suspected"),
    [
        pytest.param(False, None, True, id="a machine"),
        pytest.param(True, None, False, id="a process for the first time"),
        pytest.param(True, AGAIN_S - 1, True, id="a process again"),
        pytest.param(True, AGAIN_S + 1, False, id="a process again after a while"),
    ],
)
def test_where_a_machine_is_lost_or_a_process_dies_again_is_done_without(
    died: bool, before: float | None, suspected: bool
) -> None:
    lost, other = worker(1, died=died), worker(0)
    losses = Losses()
    if before is not None:
        losses.add(failure(1), lost, 1, 100.0)
    losses.add(failure(1), lost, 2, 100.0 + (before or 0.0))
    assert losses.suspects([other, lost]) == ({"id-1"} if suspected else set())


def test_another_node_s_losses_do_not_count() -> None:
    losses = Losses()
    losses.add(failure(0), worker(0), 1, 100.0)
    losses.add(failure(1), worker(1), 2, 101.0)
    assert losses.suspects([worker(0), worker(1, died=True)]) == set()


def test_a_loss_that_nobody_is_blamed_for_makes_nobody_suspect() -> None:
    losses = Losses()
    losses.add(Failure(code="timed_out", message="?"), None, 1, 1.0)
    assert losses.suspects([worker(0), worker(1)]) == set()
    assert losses.last[-1].node == ""


def test_the_reason_is_the_best_that_is_known() -> None:
    losses = Losses()
    losses.add(failure(0, "first"), worker(0), 1, 1.0)
    losses.add(failure(1, "silent"), worker(1), 2, 2.0)
    losses.explain(failure(1, "out of memory"))
    assert [loss.why.message for loss in losses.last] == ["first", "out of memory"]


def test_workers_that_have_not_ended_occupy_their_nodes() -> None:
    losses = Losses()
    losses.linger(1, [worker(0), worker(1), worker(2, gone=True), worker(3)])
    losses.ended(2, 0)  # of another plan
    assert losses.occupied == {"id-0", "id-1", "id-3"}
    losses.ended(1, 0)
    losses.node_lost("id-3")
    assert losses.occupied == {"id-1"}


def test_a_row_of_losses_ends_when_the_session_works() -> None:
    losses = Losses()
    for _ in range(LOSSES):
        losses.add(failure(0), worker(0), 1, 1.0)
    assert not losses.too_many
    losses.prove()
    for _ in range(LOSSES + 1):
        losses.add(failure(0), worker(0), 1, 1.0)
    assert losses.too_many
    assert losses.count == 2 * LOSSES + 1


def test_old_losses_are_counted_only() -> None:
    losses = Losses()
    for epoch in range(KEPT + 5):
        losses.add(failure(0), worker(0), epoch, float(epoch))
        losses.prove()
    assert (len(losses.last), losses.last[0].epoch, losses.count) == (KEPT, 5, KEPT + 5)
