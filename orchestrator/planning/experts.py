"""Which nodes hold which experts of a mixture-of-experts model, and how to get there from where they are now.

Words. An *expert* is one feed-forward network of one layer. A *host* is a node with memory for whole experts. A
*replica* is one expert's weights on one host. A *zone* is what fails together: a room, a fuse, a line. The *load* of an
expert is the rows it is sent per token: the chance that the router picks it.

Cost model. A row sent to a host is back after its *answer time*; decoding reads an expert's weights once per row:

    answer[e, h] = latency_h + row_bytes / bandwidth_h + bytes_e / speed_h

The trunk sends a row to the replica that answers soonest, by queue and link, so the replicas of an expert share its
load in inverse proportion to their answer times, and all are occupied by it for equally long:

    seconds[e]  = load_e / sum_{h holds e} 1 / answer[e, h]
    seconds[h]  = sum_{e on h} seconds[e]
    cost        = max_h seconds[h]

The cost bounds what concurrent requests get together: one token per `cost` seconds. A token alone also waits for the
slowest host of every layer, so layers are dealt out one by one, and each uses only its part of every host's memory.

1.  Layer by layer, the busiest expert first, the asked-for replicas go where they are done soonest (longest processing
    time first: Graham 1969), in different zones while that is possible. Where no host has room, room is made by moving
    others along a shortest chain. With experts of one size this finds a place whenever there is one; with different
    sizes (bin packing, NP-hard) a refusal may come although the last bytes could have been used.
2.  If more replicas are allowed, the expert with the highest load per replica gets the next one while there is room;
    of these the longest sequence is kept that costs no more than `SPARE_COST` times what it costs without.
3.  A local search moves and swaps replicas of the busiest host while that makes it less busy; from scratch, where
    no single step helps, it deals a few experts anew by branch and bound.

With a previous placement the same steps begin from what the hosts already hold, and a replica that has a host stays
there, but for a bounded number of moves (see `place_experts`).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from motley.orchestrator.planning.shares import human_bytes

ExpertKey = tuple[int, int]
"""Layer and index within it."""

SPARE_COST = 1.05
"""Replicas beyond those asked for are worth this factor in cost: they let any host die unnoticed."""

_STEPS = 100
"""Improvements of the local search, at most, if moves cost nothing."""

_GAIN = 1e-4
"""An improvement makes the busiest host less busy by at least this fraction."""

_PARTNERS = 4
"""Hosts, the least busy first, that the busiest swaps with, and among which it deals anew."""

_DEALT = 8
"""Experts dealt anew at once."""

_DEALS = 8000
"""Partial deals looked at for one placement, at most."""


class PlacementError(Exception):
    """The asked-for replicas do not fit; the message says what is missing: bytes, nodes, and for which experts."""


class PlacementInputError(ValueError):
    """A number that cannot be (negative, NaN), or a name that is there twice."""


@dataclass(frozen=True)
class Expert:
    """What one expert needs."""

    layer: int
    index: int
    bytes: int
    """Of weights, in the format in which they are held."""
    load: float
    """Rows per token, 0 or more: `num_experts_per_tok / num_experts` until measured."""

    def __post_init__(self) -> None:
        name = _name(self.key)
        _require(self.layer >= 0 and self.index >= 0, f"{name}: layer and index are 0 or more")
        _require(self.bytes > 0, f"{name}: has {self.bytes} bytes; it must have some")
        _require(math.isfinite(self.load) and self.load >= 0, f"{name}: load {self.load} is not a number >= 0")

    @property
    def key(self) -> ExpertKey:
        return self.layer, self.index


@dataclass(frozen=True)
class Host:
    """A node's offer to hold experts."""

    name: str
    memory: int
    """Bytes left for experts."""
    speed: float
    """Bytes of weights per second, in the experts' format."""
    zone: str = ""
    latency: float = 0.0
    """Seconds from the trunk to this node and back; 0: the trunk's own node."""
    bandwidth: float = math.inf
    """Bytes per second between the trunk and this node."""

    def __post_init__(self) -> None:
        _require(bool(self.name), "a host has no name")
        _require(self.memory >= 0, f"{self.name}: memory {self.memory} is negative")
        _require(math.isfinite(self.speed) and self.speed > 0, f"{self.name}: speed {self.speed} is not a number > 0")
        _require(
            math.isfinite(self.latency) and self.latency >= 0,
            f"{self.name}: latency {self.latency} is not >= 0 seconds",
        )
        _require(self.bandwidth > 0, f"{self.name}: bandwidth {self.bandwidth} is not > 0 bytes per second")


@dataclass(frozen=True)
class Move:
    """One thing for a node to do. In the order of `Placement.moves` memory is never exceeded, and an expert that has
    a living host at the start has one all the time."""

    action: Literal["fetch", "drop"]
    expert: ExpertKey
    host: str


@dataclass(frozen=True)
class Placement:
    """Who holds what, and what that is expected to cost."""

    hosts: dict[ExpertKey, tuple[str, ...]]
    """Of every expert, the names of its hosts, the one with the shortest answer time first."""
    bytes: dict[str, int]
    """Of every host: memory its replicas take."""
    load: dict[str, float]
    """Of every host: expected rows per token, over all layers."""
    seconds: dict[str, float]
    """Of every host: how long its rows occupy it per token."""
    moves: tuple[Move, ...]
    """From the previous placement to this, to be done in this order."""

    @property
    def held(self) -> dict[str, tuple[ExpertKey, ...]]:
        """The same by host: the experts that each holds, of those with none, too."""
        return {name: tuple(key for key, own in self.hosts.items() if name in own) for name in self.bytes}

    @property
    def seconds_per_token(self) -> float:
        """The cost: no more than one token per so many seconds, however many requests there are."""
        return max(self.seconds.values())


def place_experts(
    experts: Iterable[Expert],
    hosts: Iterable[Host],
    *,
    replicas: int = 1,
    most: int | None = None,
    row_bytes: int = 0,
    previous: Mapping[str, Collection[ExpertKey]] | None = None,
    moves: int | None = None,
) -> Placement:
    """Give every expert its hosts. The same input, in any order, gives the same placement.

    Args:
        replicas: of every expert, on different hosts, at least 1.
        most: replicas of an expert if there is memory to spare; None: no more than `replicas`.
        row_bytes: of one row on the wire, there and back.
        previous: what every host holds now (`Placement.held`). Those not among `hosts` have left; hosts that are not
            in it have joined.
        moves: fetches for the sake of balance and spare replicas, at most; only with `previous`. None: as many as
            replicas were lost with hosts that left, and the fair share (by speed) of those that joined, less the
            fetches that the asked-for replicas need. So after one node left, no more is fetched than it held, and
            after one joined, no more than its fair share, unless room must be made for replicas asked for.

    Raises:
        PlacementError: the asked-for replicas do not fit.
        PlacementInputError: a nonsensical number, or a name or an expert that is there twice.
    """
    ordered = sorted(experts, key=lambda expert: expert.key)
    offers = sorted(hosts, key=lambda host: host.name)
    most = replicas if most is None else most
    _require(len(ordered) > 0, "there are no experts to place")
    _require(replicas >= 1, f"{replicas} replicas asked for; at least 1 is needed")
    _require(most >= replicas, f"at most {most} replicas, but {replicas} are asked for")
    _require(row_bytes >= 0, f"row_bytes {row_bytes} is negative")
    _require(moves is None or moves >= 0, f"moves {moves} is negative")
    _require(moves is None or previous is not None, "moves are bounded only from a previous placement")
    _refuse_twice([_name(expert.key) for expert in ordered])
    _refuse_twice([f"host {host.name}" for host in offers])
    if len(offers) < replicas:
        raise PlacementError(
            f"{replicas} {_plural(replicas, 'replica')} of every expert need {replicas} different"
            f" {_plural(replicas, 'node')}; with room for experts {_there(offers)}, {replicas - len(offers)} missing"
        )
    board = _Board(ordered, offers, row_bytes, replicas)
    budget = math.inf
    if previous is not None:
        caused = _restore(board, previous, replicas, most)
        _place_asked(board, replicas)
        budget = max(0, caused - board.fetches) if moves is None else moves
    else:
        try:
            _place_asked(board, replicas)
        except PlacementError:
            if len({expert.bytes for expert in ordered}) == 1:  # then no other order finds more
                raise
            board = _Board(ordered, offers, row_bytes, replicas)
            _pack(board, replicas)
    if most > replicas:
        if previous is None:
            _improve(board, budget)  # what spare replicas may cost is a part of this
        budget -= _place_spare(board, most, budget)
    _improve(board, budget)
    return board.placement()


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlacementInputError(message)


def _refuse_twice(names: Sequence[str]) -> None:
    for one, other in pairwise(names):
        _require(one != other, f"{one} is there twice")


class _Board:
    """A placement in the making. Experts and hosts are numbers here, in the order of their keys and names."""

    def __init__(self, experts: Sequence[Expert], hosts: Sequence[Host], row_bytes: int, replicas: int) -> None:
        self.experts = experts
        self.hosts = hosts
        zones = sorted({host.zone for host in hosts})
        self.zone = np.array([zones.index(host.zone) for host in hosts])
        self.size = np.array([expert.bytes for expert in experts], dtype=np.int64)
        self.load = np.array([expert.load for expert in experts])
        self.free = np.array([host.memory for host in hosts], dtype=np.int64)
        link = np.array([host.latency + row_bytes / host.bandwidth for host in hosts])
        speed = np.array([host.speed for host in hosts])
        self.rate: NDArray[np.float64] = 1 / (link + self.size[:, None] / speed)
        """Inverse answer times, f64[experts, hosts]."""

        self.holders: list[list[int]] = [[] for _ in experts]
        self.holds = np.zeros((len(experts), len(hosts)), dtype=bool)
        self.in_zone = np.zeros((len(experts), len(zones)), dtype=np.int64)
        """Replicas of every expert in every zone."""
        self.rates = np.zeros(len(experts))
        """Sum of `rate` over the holders."""
        self.seconds = np.zeros(len(hosts))
        """How long every host is occupied per token."""

        roomy = {host.zone for host in hosts if host.memory >= self.size.min()}
        self.quota = math.ceil(replicas / max(1, len(roomy)))
        """Replicas of an expert in one zone, at most, while that is possible."""
        self.spreads = True
        """No room for a replica in another zone was searched for in vain, yet."""

        self.deals = _DEALS
        """Partial deals that may still be looked at."""
        self.moves: list[Move] = []
        self.stays_put = False
        """There is a previous placement: moves cost something, and must be possible one after the other."""
        self.fetched = np.zeros_like(self.holds)
        """Replicas that were not there before."""

    @property
    def fetches(self) -> int:
        return sum(1 for move in self.moves if move.action == "fetch")

    def assign(self, expert: int, holders: Sequence[int]) -> None:
        """Make these, and no others, the holders of this expert: first what is fetched, then what is dropped."""
        before = self.holders[expert]
        if before:
            self.seconds[before] -= self.load[expert] / self.rates[expert]
        for host in [host for host in holders if host not in before]:
            self._change(expert, host, "fetch")
        for host in [host for host in before if host not in holders]:
            self._change(expert, host, "drop")
        self.holders[expert] = list(holders)
        if holders:
            self.rates[expert] = self.rate[expert, holders].sum()
            self.seconds[holders] += self.load[expert] / self.rates[expert]

    def _change(self, expert: int, host: int, action: Literal["fetch", "drop"]) -> None:
        sign = 1 if action == "fetch" else -1
        self.holds[expert, host] = self.fetched[expert, host] = sign > 0
        self.in_zone[expert, self.zone[host]] += sign
        self.free[host] -= sign * self.size[expert]
        if self.stays_put:
            self.moves.append(Move(action, self.experts[expert].key, self.hosts[host].name))

    def replace(self, expert: int, source: int, target: int) -> None:
        self.assign(expert, [target if host == source else host for host in self.holders[expert]])

    def placement(self) -> Placement:
        names = [host.name for host in self.hosts]
        hosts = {
            expert.key: tuple(
                names[host] for host in sorted(holders, key=lambda host: (-self.rate[number, host], host))
            )
            for number, (expert, holders) in enumerate(zip(self.experts, self.holders, strict=True))
        }
        rows = np.where(self.holds, self.load[:, None] * self.rate / self.rates[:, None], 0.0)
        seconds = np.where(self.holds, (self.load / self.rates)[:, None], 0.0)
        everything = tuple(Move("fetch", key, name) for key, holders in hosts.items() for name in holders)
        return Placement(
            hosts=hosts,
            bytes=dict(zip(names, (self.size @ self.holds).tolist(), strict=True)),
            load=dict(zip(names, rows.sum(axis=0).tolist(), strict=True)),
            seconds=dict(zip(names, seconds.sum(axis=0).tolist(), strict=True)),
            moves=tuple(self.moves) if self.stays_put else everything,
        )


def _restore(board: _Board, previous: Mapping[str, Collection[ExpertKey]], replicas: int, most: int) -> int:
    """Put what the hosts hold already on the board. The number of fetches that the changes of the hosts account for."""
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


def _relieve(board: _Board, host: int) -> None:
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


def _place_asked(board: _Board, replicas: int) -> None:
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


def _pack(board: _Board, replicas: int) -> None:
    """Every expert gets the replicas asked for, where sizes differ and memory is short: the largest go first."""
    for expert in np.argsort(-board.size, kind="stable").tolist():
        for _ in range(replicas):
            _add_replica(board, expert, replicas)


def _add_replica(board: _Board, expert: int, replicas: int, reserve: NDArray[np.int64] | int = 0) -> None:
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


def _make_room(board: _Board, expert: int, allowed: Sequence[int], quota: float) -> int | None:
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


def _place_spare(board: _Board, most: int, budget: float) -> int:
    """Replicas beyond those asked for: step 2. How many there are now."""
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


@dataclass(frozen=True)
class _Step:
    """What the local search does next: a move, or with `back` a swap."""

    peak: float
    """How busy the busiest of the hosts concerned is afterwards."""
    expert: int
    target: int
    back: int | None = None


class _Leaving:
    """The experts that may leave a host, and what is known of them whatever comes instead."""

    def __init__(self, board: _Board, host: int) -> None:
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


def _improve(board: _Board, budget: float) -> None:
    """Make the busiest host less busy, again and again: step 3."""
    fluid = (board.load / board.rate.sum(axis=1)).sum()
    spent = 0
    for _ in range(_STEPS if math.isinf(budget) else int(budget)):
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


def _take(board: _Board, step: _Step, busiest: int) -> None:
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


def _deal(board: _Board, busiest: int, partners: Sequence[int]) -> bool:
    """Deal some experts of the busiest host and of its partners anew among them, as well as possible: branch and bound,
    the most work first. Whether that made a host less busy.

    Where a host has few experts, no single move or swap may lead out of a bad deal; there, this sees all of them.
    """
    window = [busiest, *partners]
    spans = board.load / board.rates
    on = [sorted(np.flatnonzero(board.holds[:, host]).tolist(), key=lambda e: (-spans[e], e)) for host in window]
    chosen = dict.fromkeys(on[0][: _DEALT // 2])
    for rank in range(max(map(len, on))):
        chosen.update(dict.fromkeys(held[rank] for held in on if rank < len(held)))
    dealt = sorted(list(chosen)[:_DEALT], key=lambda expert: (-spans[expert] * len(board.holders[expert]), expert))

    price = board.rate.sum(axis=0)
    seconds, free = board.seconds.copy(), board.free.copy()
    for expert in dealt:
        seconds[board.holders[expert]] -= spans[expert]
        free[board.holders[expert]] += board.size[expert]
    ways = [_ways(board, expert, window) for expert in dealt]
    cheapest = [min(span * price[holders].sum() for holders, span in options) for options in ways]
    rest = np.array([sum(cheapest[depth:]) for depth in range(len(dealt) + 1)])

    best_peak = board.seconds.max() * (1 - _GAIN)
    best: list[list[int]] = []
    path: list[list[int]] = []

    def descend(seconds: NDArray[np.float64], free: NDArray[np.int64]) -> None:
        nonlocal best_peak, best
        depth = len(path)
        if depth == len(dealt):
            best_peak, best = float(seconds.max()), list(path)
            return
        size = board.size[dealt[depth]]
        branches = []
        for number, (holders, span) in enumerate(ways[depth]):
            if (free[holders] >= size).all():
                then = seconds.copy()
                then[holders] += span
                branches.append((float(then.max()), number, then))
        for peak, number, then in sorted(branches, key=lambda branch: branch[:2]):
            bound = max(peak, float(then @ price + rest[depth + 1]) / float(price.sum()))
            if bound >= best_peak or board.deals == 0:
                continue
            board.deals -= 1
            holders = ways[depth][number][0]
            left = free.copy()
            left[holders] -= size
            path.append(holders)
            descend(then, left)
            path.pop()

    descend(seconds, free)
    for expert, holders in zip(dealt, best, strict=False):
        board.assign(expert, holders)
    return bool(best)


def _ways(board: _Board, expert: int, window: Sequence[int]) -> list[tuple[list[int], float]]:
    """How an expert's replicas on hosts of the window can lie there: its holders and its seconds on each of them."""
    outside = [host for host in board.holders[expert] if host not in window]
    limit = np.maximum(board.in_zone[expert], board.quota)
    ways = []
    for inside in combinations(sorted(set(window)), len(board.holders[expert]) - len(outside)):
        holders = [*outside, *inside]
        if (np.bincount(board.zone[holders], minlength=len(limit)) <= limit).all():
            ways.append((holders, float(board.load[expert] / board.rate[expert, holders].sum())))
    return ways


def _explain(board: _Board, expert: int, replicas: int) -> str:
    """What is missing so that all get the replicas asked for; `expert` is the first that found no host."""
    key, size = board.experts[expert].key, int(board.size[expert])
    memory = np.array([host.memory for host in board.hosts])
    able = int((memory >= size).sum())
    needed, usable = replicas * int(board.size.sum()), int(np.minimum(memory, board.size.sum()).sum())
    if able < replicas:
        verdict = (
            f"{_name(key)} ({human_bytes(size)}) fits on {able} of {len(memory)} nodes (the largest has"
            f" {human_bytes(memory.max())}): {replicas - able} {_plural(replicas - able, 'node')} missing"
        )
    elif usable < needed:
        verdict = (
            f"{human_bytes(needed - usable)} are missing ({human_bytes(needed)} needed, {human_bytes(usable)} usable:"
            " a node can use memory for one replica of each)"
        )
    else:
        most = int(board.free[~board.holds[expert]].max(initial=0))
        verdict = (
            f"the total would do, but not in whole experts: {_name(key)} takes {human_bytes(size)} on one more node,"
            f" and the most that is free on one is {human_bytes(most)}: {human_bytes(size - most)} missing"
        )
    short = [one.key for one, holders in zip(board.experts, board.holders, strict=True) if len(holders) < replicas]
    named = ", ".join(_name(key) for key in short[:4]) + (f" and {len(short) - 4} more" if len(short) > 4 else "")
    return (
        f"{replicas} {_plural(replicas, 'replica')} of {len(board.experts)} experts do not fit on {len(memory)}"
        f" {_plural(len(memory), 'node')}: {verdict}. Without all replicas: {named}"
    )


def _there(hosts: Sequence[Host]) -> str:
    if not hosts:
        return "there is none"
    return f"there {'are' if len(hosts) > 1 else 'is'} {len(hosts)} ({', '.join(host.name for host in hosts)})"


def _name(key: ExpertKey) -> str:
    return f"layer {key[0]} expert {key[1]}"


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else noun + "s"
