"""Workers whose node is cut off from the orchestrator, while they may well compute on: who is waited for, and for how
long. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from motley.orchestrator.mesh.nodes import CONNECTION_ENDED
from motley.orchestrator.workers import Away, Rank, Worker

RETURN_S = 3.0
"""A node whose connection ended, and that has the leader or all ranks, is back so soon, or lost: it may have been
killed."""
CUT_S = 15.0
"""A node that has fallen silent, likewise: its network may be cut for a while."""
AWAY_S = 3600.0
"""Any other node may be cut off for so long: the ranks themselves see whether it computes."""


def cut_off(workers: Iterable[Worker], reason: str, now: float) -> None:
    """Note that a node's stream has ended, with no word of its workers.

    Args:
        workers: those there that are not gone.
        reason: what became of the stream.
    """
    patience = RETURN_S if reason.startswith(CONNECTION_ENDED) else CUT_S
    for worker in workers:
        worker.away = Away(now, patience, reason)


def taken_up(workers: Iterable[Worker], node_id: str, name: str) -> list[Worker]:
    """Note that a node has joined that was cut off before, under the same name; its workers."""
    back = [worker for worker in workers if worker.away and not worker.gone and worker.node_name == name]
    for worker in back:
        worker.away, worker.node_id = None, node_id
    return back


def overdue(workers: Iterable[Worker], ranks: Sequence[Rank], now: float) -> tuple[Worker, Away] | None:
    """A worker whose node is not waited for any longer, if there is one.

    Args:
        ranks: of these workers.
    """
    waited_for = ranks[0].away is not None or all(rank.away for rank in ranks)
    computing = {rank.node_id for rank in ranks}
    for worker in workers:
        if worker.away and not worker.gone:
            urgent = waited_for or worker.node_id not in computing  # nobody tells whether a cache holder is there
            if now - worker.away.since > (worker.away.patience_s if urgent else AWAY_S):
                return worker, worker.away
    return None
