"""Making the busiest host less busy by moving, swapping and dealing anew the replicas that it has.

Step 3 of `motley.orchestrator.planning.placement.place`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from motley.orchestrator.planning.placement.board import Board

STEPS = 100
"""Improvements of the local search, at most, if moves cost nothing."""

_GAIN = 1e-4
"""An improvement makes the busiest host less busy by at least this fraction."""

_PARTNERS = 4
"""Hosts, the least busy first, that the busiest swaps with, and among which it deals anew."""

DEALT = 8
"""Experts dealt anew at once."""


@dataclass(frozen=True)
class _Step:
    """What the local search does next: a move, or with `back` a swap."""

    peak: float
    """How busy the busiest of the hosts concerned is afterwards."""
    expert: int
    target: int
    back: int | None = None


class _Leaving:
    """The experts that may leave a host, and what that would mean for every host they may go to."""

    def __init__(self, board: Board, host: int) -> None:
        self.board = board
        self.host = host
        there = board.holds[:, host]  # what was fetched for this very placement stays
        self.experts = np.flatnonzero(there & ~board.fetched[:, host] if board.stays_put else there)
        self.size = board.size[self.experts]
        self.now = board.load[self.experts] / board.rates[self.experts]
        """Seconds on this host now, f64[experts]."""
        others = board.holds[self.experts]
        others[:, host] = False
        self.elsewhere: NDArray[np.float64] = np.where(others, board.seconds, 0.0).max(axis=1, initial=0.0)
        """How busy the busiest of each expert's other holders is, f64[experts]; 0: there is none."""
        self.may = ~board.holds[self.experts] & (
            (board.in_zone[self.experts][:, board.zone] < board.quota) | (board.zone == board.zone[host])
        )
        """Where each may go if there is room, bool[experts, hosts]: not twice on one, nor too many in another zone."""
        rates = board.rates[self.experts] - board.rate[self.experts, host]
        self.then = board.load[self.experts, None] / (rates[:, None] + board.rate[self.experts])
        """Seconds on every host, if it goes there, f64[experts, hosts]."""


def improve(board: Board, budget: float) -> None:
    """Make the busiest host less busy, again and again: step 3."""
    fluid = (board.load / board.rate.sum(axis=1)).sum()
    spent = 0
    for _ in range(STEPS if math.isinf(budget) else int(budget)):
        busiest = int(np.argmax(board.seconds))
        peak = board.seconds[busiest]
        if peak <= fluid * 1.001 or budget - spent < 1:
            break
        enough = peak * (1 - _GAIN)
        partners = [host for host in np.argsort(board.seconds, kind="stable").tolist() if host != busiest][:_PARTNERS]
        leaving = _Leaving(board, busiest)
        steps = _moves(leaving)
        if budget - spent >= 2 and not any(step.peak < enough for step in steps):
            steps = [step for host in partners for step in _swaps(leaving, _Leaving(board, host))]
        best = min(steps, key=lambda step: step.peak, default=None)
        if best is not None and best.peak < enough:
            _take(board, best, busiest)
            spent += 1 if best.back is None else 2
        elif board.stays_put or not _deal(board, busiest, partners):
            break


def _take(board: Board, step: _Step, busiest: int) -> None:
    if step.back is None:
        board.replace(step.expert, busiest, step.target)
        return
    there, back = (step.expert, busiest, step.target), (step.back, step.target, busiest)
    roomy = board.free[step.target] >= board.size[step.expert]
    for move in (there, back) if roomy else (back, there):
        board.replace(*move)


def _moves(leaving: _Leaving) -> list[_Step]:
    """The best move of one replica to any host, if there is one."""
    if not leaving.experts.size:
        return []
    board, now, then = leaving.board, leaving.now[:, None], leaving.then
    peak = np.maximum(board.seconds + then, leaving.elsewhere[:, None] + then - now)
    peak = np.maximum(peak, board.seconds[leaving.host] - now)
    peak[~(leaving.may & (board.free >= leaving.size[:, None]))] = np.inf
    expert, target = np.unravel_index(np.argmin(peak), peak.shape)
    return [_Step(float(peak[expert, target]), int(leaving.experts[expert]), int(target))]


def _swaps(mine: _Leaving, theirs: _Leaving) -> list[_Step]:
    """The best swap of two replicas between two hosts, if there is one."""
    if not mine.experts.size or not theirs.experts.size:
        return []
    board, here, there = mine.board, mine.host, theirs.host
    goes, comes = mine.then[:, there], theirs.then[:, here]
    peak = np.maximum(
        board.seconds[here] - mine.now[:, None] + comes,
        board.seconds[there] - theirs.now + goes[:, None],
    )
    more = np.maximum(goes - mine.now, 0)[:, None] + np.maximum(comes - theirs.now, 0)
    peak = np.maximum(peak, np.maximum(mine.elsewhere[:, None], theirs.elsewhere) + more)
    surplus = mine.size[:, None] - theirs.size
    fits = (surplus <= board.free[there]) & (-surplus <= board.free[here])
    if board.stays_put:  # one of the two needs room before the other has left
        fits &= (board.free[there] >= mine.size)[:, None] | (board.free[here] >= theirs.size)
    peak[~(fits & mine.may[:, there, None] & theirs.may[:, here])] = np.inf
    one, two = np.unravel_index(np.argmin(peak), peak.shape)
    return [_Step(float(peak[one, two]), int(mine.experts[one]), there, int(theirs.experts[two]))]


def _deal(board: Board, busiest: int, partners: Sequence[int]) -> bool:
    """Deal some experts of the busiest host and of its partners anew among them, as well as possible: branch and bound,
    the most work first. Whether that made a host less busy.

    Where a host has few experts, no single move or swap may lead out of a bad deal; there, this sees all of them.
    """
    window = [busiest, *partners]
    spans = board.load / board.rates
    on = [sorted(np.flatnonzero(board.holds[:, host]).tolist(), key=lambda e: (-spans[e], e)) for host in window]
    chosen = dict.fromkeys(on[0][: DEALT // 2])
    for rank in range(max(map(len, on))):
        chosen.update(dict.fromkeys(held[rank] for held in on if rank < len(held)))
    dealt = sorted(list(chosen)[:DEALT], key=lambda expert: (-spans[expert] * len(board.holders[expert]), expert))

    price = board.rate.sum(axis=0)
    seconds, free = board.seconds.copy(), board.free.copy()
    for expert in dealt:
        seconds[board.holders[expert]] -= spans[expert]
        free[board.holders[expert]] += board.size[expert]
    ways = [_ways(board, expert, window) for expert in dealt]
    cheapest = [min(span * price[holders].sum() for holders, span in options) for options in ways]
    rest = np.array([sum(cheapest[depth:]) for depth in range(len(dealt) + 1)])

    holding = [np.zeros((len(options), len(seconds)), bool) for options in ways]
    for held, options in zip(holding, ways, strict=True):
        for number, (holders, _) in enumerate(options):
            held[number, holders] = True
    added = [held * np.array([[span] for _, span in options]) for held, options in zip(holding, ways, strict=True)]

    best_peak = float(board.seconds.max() * (1 - _GAIN))
    best: list[list[int]] = []
    path: list[list[int]] = []

    def descend(seconds: NDArray[np.float64], free: NDArray[np.int64]) -> None:
        nonlocal best_peak, best
        depth = len(path)
        if depth == len(dealt):
            best_peak, best = float(seconds.max()), list(path)
            return
        left = free - holding[depth] * board.size[dealt[depth]]  # i64[ways, hosts]
        then = seconds + added[depth]
        peaks = then.max(axis=1)
        bounds = np.maximum(peaks, (then @ price + rest[depth + 1]) / price.sum())
        bounds[((left < 0) & holding[depth]).any(axis=1)] = np.inf
        for number in np.argsort(peaks, kind="stable").tolist():
            if bounds[number] >= best_peak or board.deals == 0:
                continue
            board.deals -= 1
            path.append(ways[depth][number][0])
            descend(then[number], left[number])
            path.pop()

    descend(seconds, free)
    for expert, holders in zip(dealt, best, strict=False):
        board.assign(expert, holders)
    return bool(best)


def _ways(board: Board, expert: int, window: Sequence[int]) -> list[tuple[list[int], float]]:
    """How an expert's replicas on hosts of the window can lie there: its holders and its seconds on each of them."""
    outside = [host for host in board.holders[expert] if host not in window]
    limit = np.maximum(board.in_zone[expert], board.quota)
    ways = []
    for inside in combinations(sorted(set(window)), len(board.holders[expert]) - len(outside)):
        holders = [*outside, *inside]
        if (np.bincount(board.zone[holders], minlength=len(limit)) <= limit).all():
            ways.append((holders, float(board.load[expert] / board.rate[expert, holders].sum())))
    return ways
