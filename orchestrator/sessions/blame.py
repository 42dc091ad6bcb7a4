"""Why a session loses ranks or ends: who is to blame, and what people are told of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from motley.orchestrator.experts.registry import ExpertMap
from motley.orchestrator.mesh.nodes import what_became
from motley.orchestrator.workers import CacheHolder, Worker
from motley.protocol.mesh_pb2 import Failure

NODE_LOST = "node_lost"
"""The code of a failure that a lost node is to blame for."""


def reported(worker: Worker, failure: Failure, named: Callable[[int], Worker | None]) -> Failure:
    """What a worker has reported, with the names of its node and of the one to blame.

    Args:
        named: gives the worker with an index, if there is one.
    """
    blamed = named(failure.lost_rank - 1)
    if blamed is not None and blamed.away is not None:
        message = f"node {blamed.node_name!r} ({blamed.role}) {what_became(blamed.away.why)}"
        return Failure(code=NODE_LOST, message=message, lost_rank=failure.lost_rank)
    finder = named(failure.found_by - 1) or worker
    found = f", as {finder} has found" if blamed not in (None, finder) else ""
    return Failure(
        code=failure.code or "rank_failed",
        message=f"{blamed or worker}{found}: {failure.message}",
        lost_rank=failure.lost_rank or worker.index + 1,
    )


def ended_unasked(worker: Worker) -> Failure:
    """A worker's process is over though nobody has told it to stop."""
    return Failure(code="rank_ended", message=f"{worker} has ended unasked")


def ended_cut_off(worker: Worker) -> Failure:
    """A worker's node is back that was cut off, and no longer has it."""
    message = f"{worker}: its worker process ended while its node was cut off ({worker.node_name})"
    return Failure(code="worker_died", message=message, lost_rank=worker.index + 1)


def node_gone(workers: Sequence[Worker], reason: str) -> Failure:
    """A node is lost on which these workers were.

    Args:
        reason: see `motley.orchestrator.mesh.nodes.what_became`.
    """
    roles = " and ".join(worker.role for worker in workers)
    message = f"node {workers[0].node_name!r} ({roles}) {what_became(reason)}"
    return Failure(code=NODE_LOST, message=message, lost_rank=workers[0].index + 1)


def caches_lost(leader: Worker, holder: CacheHolder | None, why: str) -> Failure:
    """A request needs caches that are lost. None: no holder is known to be, so the leader misses one, or a disk has
    failed, as `why` says.

    Args:
        why: what the leader has told.
    """
    if holder is None:
        return Failure(code="caches_lost", message=f"{leader}: {why}")
    return Failure(code="caches_lost", message=holder.lost, lost_rank=holder.index + 1)


def stuck(workers: Sequence[Worker], what: str, waited: float) -> Failure:
    """Workers are taken to hang: `what` they did for so many seconds."""
    names = ", ".join(map(str, workers))
    message = f"{names} {what} for {waited:.0f} s; look at the log of the daemon there"
    return Failure(code="timed_out", message=message, lost_rank=workers[0].index + 1)


def no_room(experts: ExpertMap) -> Failure:
    """Experts of lost hosts have found no other place for long."""
    lost = "; ".join(f"{host}: {host.lost}" for host in experts.hosts if host.gone)
    together = ", or several that have it together" if experts.slices > 1 else ""
    apart = [host for host in experts.hosts if host.gone and host.others]
    back = f", or bring {' or '.join(str(host) for host in apart)} back" if apart else ""
    message = (
        f"no room is left for the experts of lost hosts ({lost}). {experts.short}. Free memory or add a node with"
        f" room for a whole expert{together}{back}"
    )
    return Failure(code="insufficient_memory", message=message)
