"""Nodes that a session was asked for with, and goes on without. Pure."""

from __future__ import annotations

from collections import Counter

from motley.orchestrator.sessions.facts import State
from motley.orchestrator.sessions.session import Session


def missed_nodes(session: Session) -> list[str]:
    """Names of the nodes on which a session that is ready has fewer ranks than its request names for them: they were
    lost, say. None where experts are on hosts, which come and go by themselves, and not those that its plan has no part
    for."""
    if session.state is not State.READY or session.experts is not None:
        return []
    wanted = Counter(place.node for place in session.request.places) - Counter(each.node for each in session.no_part)
    return list(wanted - Counter(rank.node_name for rank in session.ranks))
