"""Which lost hosts may begin anew, and which nodes are taken by hosts. Pure.

A node is in one host of a session at a time, so a lost host is not started again where another has its nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from motley.orchestrator.experts.hosts import ExpertHost

RESTART_S = 5.0
"""A lost host is started again after this long, twice that the second time, and so on."""
RESTARTS = 3
"""So often; a host that is lost again is left alone until its node registers anew."""


def may_restart(hosts: Sequence[ExpertHost], lost: ExpertHost, node_ids: Sequence[str], now: float) -> bool:
    """Whether a lost host may begin anew now.

    Args:
        hosts: all of the session.
        node_ids: the nodes that have the names of its own now.
    """
    patience_s = RESTART_S * 2 ** min(lost.restarts, RESTARTS)
    ended = all(worker.ended for worker in lost.group)
    return ended and now >= lost.lost_at + patience_s and _may_return(hosts, lost, node_ids)


def bound_nodes(hosts: Sequence[ExpertHost], node_ids: Mapping[str, str], *, complete: bool = False) -> set[str]:
    """Names of nodes that cannot be in a new host: they are in one, or in a lost one that is still ending or may
    begin anew.

    Args:
        node_ids: the nodes that may have hosts now, by name.
        complete: do not count a lost host that lacks a node of its own now.
    """
    bound = _busy(hosts)
    for host in [host for host in hosts if host.gone]:
        own = [node_ids.get(worker.node_name, "") for worker in host.group]
        if (all(own) or not complete) and _may_return(hosts, host, own):
            bound |= host.node_names
        bound |= {worker.node_name for worker in host.group if not worker.ended}
    return bound


def gave_up(hosts: Sequence[ExpertHost], host: ExpertHost) -> bool:
    """Whether another host on just the nodes of this one is lost."""
    return any(old.gone and old.node_ids == host.node_ids for old in hosts)


def _may_return(hosts: Sequence[ExpertHost], lost: ExpertHost, node_ids: Sequence[str]) -> bool:
    """Whether a lost host may begin anew on these nodes at some time: not where it was lost too often, nor where one
    of its nodes is in another host."""
    others = [worker.node_id for worker in lost.group] != list(node_ids)
    return (lost.restarts < RESTARTS or others) and lost.node_names.isdisjoint(_busy(hosts))


def _busy(hosts: Sequence[ExpertHost]) -> set[str]:
    """Names of the nodes that are in a host now."""
    return set[str]().union(*(host.node_names for host in hosts if not host.gone))
