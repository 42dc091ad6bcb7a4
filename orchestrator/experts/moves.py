"""The way from one placement of experts to the next, while the session serves. Pure.

The planner says what to do as a list of *moves*: a host fetches an expert, or drops it. A host is *ordered* to hold a
set and says what it *holds*; the trunk asks it for what is in both. A fetch is ordered at once unless a drop that comes
before it must first make room. A drop waits until every fetch of its expert has come; then the trunk is told not to ask
there, and the host, `RETIRE_S` later, to let it go. So in every moment each expert has a host, if it had one, and no
host holds more than it has room for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from motley.orchestrator.experts.hosts import ExpertHost
from motley.orchestrator.planning.placement.terms import ExpertKey, Move

RETIRE_S = 5.0
"""A replica that is not asked for any more is kept for so long: a step under way may still ask."""


def by_host(moves: Iterable[Move]) -> defaultdict[str, list[Move]]:
    """The moves of every host, by its name, in order."""
    found = defaultdict[str, list[Move]](list)
    for move in moves:
        found[move.host].append(move)
    return found


def set_moves(moves: Iterable[Move], hosts: Iterable[ExpertHost]) -> list[Move]:
    """Make these the moves to come, of every host and of all."""
    moves = list(moves)
    own = by_host(moves)
    for host in hosts:
        host.to_come = [] if host.gone else own[host.name]
    return moves


def go_on(moves: Sequence[Move], hosts: Sequence[ExpertHost], now: float) -> tuple[list[Move], list[ExpertHost]]:
    """Carry out moves as far as possible: the moves that are left, and the hosts whose orders have changed."""
    if not moves:
        return [], []
    by_name = {host.name: host for host in hosts if not host.gone}
    coming = {key for host in hosts for key in host.fetching}
    full: set[str] = set()
    ordered: list[ExpertHost] = []
    left: list[Move] = []
    for move in moves:
        host = by_name.get(move.host)
        if host is None:
            continue  # lost: the planner is asked again
        if move.action == "fetch" and move.host not in full:
            host.ordered.add(move.expert)
            coming.add(move.expert)
            ordered.append(host)
        elif move.action == "fetch":
            coming.add(move.expert)
            left.append(move)
        elif not _dropped(move.expert, host, hosts, coming, now, ordered):
            full.add(move.host)
            left.append(move)
    return set_moves(left, hosts), list({host.number: host for host in ordered}.values())


def _dropped(
    key: ExpertKey,
    host: ExpertHost,
    hosts: Sequence[ExpertHost],
    coming: set[ExpertKey],
    now: float,
    ordered: list[ExpertHost],
) -> bool:
    """Go on with dropping an expert from a host; whether the host has dropped it.

    Args:
        coming: experts that some host is still to fetch.
        ordered: where the host is added if its orders change.
    """
    if key not in host.ordered:
        return not any(key in worker.held for worker in host.group)
    elsewhere = any(key in other.serving for other in hosts if other is not host)
    if key in coming or not elsewhere:
        host.retiring.pop(key, None)
    elif now - host.retiring.setdefault(key, now) >= RETIRE_S:
        host.ordered.discard(key)
        del host.retiring[key]
        ordered.append(host)
    return False
