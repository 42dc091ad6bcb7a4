"""Giving every expert its replicas: those it has already, those asked for, and those for which there is room to spare.

Steps 1 and 2 of `motley.orchestrator.planning.placement.place`.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from motley.orchestrator.planning.placement.board import Board
from motley.orchestrator.planning.placement.terms import ExpertKey, Move, PlacementError, expert_name
from motley.protocol.wording import counted, human_bytes

SPARE_COST = 1.05
"""Replicas beyond those asked for are worth this factor in cost: they let any host die unnoticed."""


def restore(board: Board, previous: Mapping[str, Collection[ExpertKey]], replicas: int, most: int) -> int:
    """Put what the hosts hold already on the board.

    Returns:
        How many fetches the hosts that have left and joined account for; see `moves` of `place_experts`.
    """
    numbers = {expert.key: number for number, expert in enumerate(board.experts)}
    holders: list[list[int]] = [[] for _ in board.experts]
    unknown: list[Move] = []
    for host, offer in enumerate(board.hosts):
        for key in sorted(set(previous.get(offer.name, ()))):
            if key in numbers:
                holders[numbers[key]].append(host)
            else:
                unknown.append(Move("drop", key, offer.name))
    for expert, held in enumerate(holders):
        board.assign(expert, [held[place] for place in np.argsort(-board.rate[expert, held], kind="stable")])
    board.fetched[:] = False
    board.stays_put = True
    board.moves = unknown
    for expert, held in enumerate(board.holders):
        if len(held) > most:
            board.assign(expert, held[:most])
    for host in np.flatnonzero(board.free < 0).tolist():
        _relieve(board, host)

    names = {host.name for host in board.hosts}
    lost = sum(len(numbers.keys() & set(held)) for name, held in previous.items() if name not in names)
    speed = board.rate.sum(axis=0)
    fair = replicas * len(board.experts) * speed / speed.sum()
    joined = [host for host, offer in enumerate(board.hosts) if offer.name not in previous]
    return lost + sum(math.ceil(float(fair[host])) for host in joined)


def _relieve(board: Board, host: int) -> None:
    """Take replicas from a host whose memory shrank below what it holds: those with other holders first."""
    held = [int(expert) for expert in np.flatnonzero(board.holds[:, host])]
    for expert in sorted(held, key=lambda expert: (len(board.holders[expert]) == 1, board.load[expert], expert)):
        if board.free[host] >= 0:
            return
        if not board.holds[expert, host]:
            continue  # moved out of another's way already
        if len(board.holders[expert]) == 1:
            _add_replica(board, expert, 1)
        board.assign(expert, [other for other in board.holders[expert] if other != host])


def place_asked(board: Board, replicas: int) -> None:
    """Every expert gets the replicas asked for: step 1. The first of each comes before the second of any.

    Of every host's room, a part is left for the layers and replicas to come: else the fast hosts would be full of the
    first layers, and the last would wait for the slow ones. For the next replica, the expert that takes longest goes
    first: two replicas on slow hosts are what costs most.
    """
    layers = np.array([expert.layer for expert in board.experts])
    missing = np.array([max(0, replicas - len(holders)) for holders in board.holders])
    room = board.free.copy()
    whole = to_come = int(missing @ board.size)
    for number in range(replicas):
        held = np.array([len(holders) for holders in board.holders])
        for layer in np.unique(layers):
            members = np.flatnonzero((layers == layer) & (held == number))
            to_come -= int(board.size[members].sum())
            reserve = (room * (to_come / max(1, whole))).astype(np.int64)
            work = (
                board.load[members] * board.size[members] if number == 0 else board.load[members] / board.rates[members]
            )
            for expert in members[np.argsort(-work, kind="stable")].tolist():
                _add_replica(board, expert, replicas, reserve)


def pack(board: Board, replicas: int) -> None:
    """Every expert gets the replicas asked for, where sizes differ and memory is short: the largest go first."""
    for expert in np.argsort(-board.size, kind="stable").tolist():
        for _ in range(replicas):
            _add_replica(board, expert, replicas)


def _add_replica(board: Board, expert: int, replicas: int, reserve: NDArray[np.int64] | int = 0) -> None:
    """One more replica, where it is done soonest, in another zone if that is possible: where there is room beside
    the reserve, else where there is room at all, else where room can be made."""
    size = board.size[expert]
    done = board.seconds + board.load[expert] / (board.rates[expert] + board.rate[expert])
    for quota, make_room in ((board.quota, board.spreads), (math.inf, True)):
        allowed = ~board.holds[expert] & (board.in_zone[expert, board.zone] < quota)
        for fits in (allowed & (board.free - reserve >= size), allowed & (board.free >= size)):
            if fits.any():
                target = int(np.argmin(np.where(fits, done, np.inf)))
                break
        else:
            nearest = np.argsort(done, kind="stable")
            made = _make_room(board, expert, nearest[allowed[nearest]].tolist(), quota) if make_room else None
            if made is None:
                board.spreads = False
                continue
            target = made
        board.assign(expert, [*board.holders[expert], target])
        return
    raise PlacementError(_explain(board, expert, replicas))


def _make_room(board: Board, expert: int, allowed: Sequence[int], quota: float) -> int | None:
    """Move other replicas out of the way of this expert: the host that then has room for it, or None.

    A breadth-first search for the shortest chain "into A, from there one to B, from there one to C, which has room":
    an augmenting path in the bipartite graph of experts and hosts. The moves are made from its end.
    """
    came: dict[int, tuple[int, int]] = {}  # host: which expert would come, and from where (-1: it is new)
    for host in allowed:
        came[host] = (expert, -1)
    seen = {expert}
    queue = deque(allowed)
    while queue:
        host = queue.popleft()
        coming, _ = came[host]
        if board.free[host] >= board.size[coming]:
            while (source := came[host][1]) >= 0:
                board.replace(came[host][0], source, host)
                host = source
            return host
        for other in np.flatnonzero(board.holds[:, host]).tolist():
            if other in seen or board.free[host] + board.size[other] < board.size[coming]:
                continue
            seen.add(other)
            crowd = board.in_zone[other, board.zone] - (board.zone == board.zone[host])
            for target in np.flatnonzero(~board.holds[other] & (crowd < quota)).tolist():
                if target not in came:
                    came[target] = (other, host)
                    queue.append(target)
    return None


def place_spare(board: Board, most: int, budget: float) -> int:
    """Place replicas beyond those asked for: step 2. Returns how many."""
    limit = SPARE_COST * board.seconds.max()
    heap = [
        (-board.load[expert] / len(holders), expert)
        for expert, holders in enumerate(board.holders)
        if len(holders) < most
    ]
    heapq.heapify(heap)
    added: list[int] = []
    kept = 0
    while heap and len(added) < budget:
        _, expert = heapq.heappop(heap)
        rates = board.rates[expert] + board.rate[expert]
        done = board.seconds + board.load[expert] / rates
        possible = np.flatnonzero(~board.holds[expert] & (board.free >= board.size[expert]))
        if not possible.size:
            continue
        crowd = board.in_zone[expert, board.zone[possible]]
        best = possible[np.lexsort((done[possible], crowd))[0]]
        board.assign(expert, [*board.holders[expert], int(best)])
        added.append(expert)
        if board.seconds.max() <= limit:
            kept = len(added)
        if len(board.holders[expert]) < most:
            heapq.heappush(heap, (-board.load[expert] / len(board.holders[expert]), expert))
    moves = len(board.moves)
    for expert in reversed(added[kept:]):
        board.assign(expert, board.holders[expert][:-1])
    if board.stays_put:
        del board.moves[moves - (len(added) - kept) :]
    return kept


def _explain(board: Board, expert: int, replicas: int) -> str:
    """What is missing so that all get the replicas asked for; `expert` is the first that found no host."""
    key, size = board.experts[expert].key, int(board.size[expert])
    memory = np.array([host.memory for host in board.hosts])
    able = int((memory >= size).sum())
    needed, usable = replicas * int(board.size.sum()), int(np.minimum(memory, board.size.sum()).sum())
    if able < replicas:
        verdict = (
            f"{expert_name(key)} ({human_bytes(size)}) fits on {able} of {len(memory)} nodes (the largest has"
            f" {human_bytes(memory.max())}): {counted(replicas - able, 'node')} missing"
        )
    elif usable < needed:
        verdict = (
            f"{human_bytes(needed - usable)} are missing ({human_bytes(needed)} needed, {human_bytes(usable)} usable:"
            " a node can use memory for one replica of each)"
        )
    else:
        most = int(board.free[~board.holds[expert]].max(initial=0))
        verdict = (
            f"the total would do, but not in whole experts: {expert_name(key)} takes {human_bytes(size)} on one more"
            f" node, and the most that is free on one is {human_bytes(most)}: {human_bytes(size - most)} missing"
        )
    short = [one.key for one, holders in zip(board.experts, board.holders, strict=True) if len(holders) < replicas]
    named = ", ".join(expert_name(key) for key in short[:4]) + (f" and {len(short) - 4} more" if len(short) > 4 else "")
    return (
        f"{counted(replicas, 'replica')} of {len(board.experts)} experts do not fit on"
        f" {counted(len(memory), 'node')}: {verdict}. Without all replicas: {named}"
    )
