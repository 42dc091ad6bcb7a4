"""Which nodes take part, so that a token takes the least time: more nodes read faster, and wait for more links. Pure.

Of up to `EXACT` nodes all sets are looked at, in the order of what each takes at the least: units taken for fluid,
a sum for no longer than its rows need to reach anybody. The search ends where that is more than the best set found
takes, so nothing is missed. Of more nodes, sets are grown, shrunk and changed by one node as long as a rough forecast
gets better, from the fastest nodes and from neighbours; the best few of the sets that were met are forecast in full,
and the best of these is changed by one node as long as that gets better too.

Two nodes that cannot reach each other are in no set together. Some may be required; then they are in every set.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import inf
from typing import NamedTuple

from motley.orchestrator.planning.cost import (
    WIRE_BYTES,
    Forecast,
    Pace,
    Workload,
    forecast,
    lead_s,
    part_of,
)
from motley.orchestrator.planning.quickest import quickest_shares
from motley.orchestrator.planning.shares import Candidate, PlanError, RankPlan, pour
from motley.protocol import MAX_RANKS
from motley.protocol.mesh_pb2 import ModelProfile
from motley.transport.schedules.forecast import SUM_S, Network

EXACT = 8
"""Of so many nodes the best set is found for certain."""
STARTS = 6
"""Of more nodes, the search begins with so many sets."""
FORECAST = 6
"""Of more nodes, so many sets that look best are forecast."""
NEIGHBOURS = 10
"""Of more nodes, so many sets that differ from the best by a node are forecast, again and again while one is better."""
WORTH = 1e-9
"""A set is better if it takes less time by more than this part."""

Members = tuple[int, ...]
"""Numbers of candidates, ascending: some of them take part."""


@dataclass(frozen=True)
class Choice:
    """Nodes that take part, and what they do.

    Attributes:
        members: numbers of the candidates that take part, by rank.
        plans: the share of each, by rank.
    """

    members: Members
    plans: list[RankPlan]
    forecast: Forecast


@dataclass
class Chooser:
    """Looks for sets of nodes, and remembers what it has forecast.

    Attributes:
        profiles: of the model as each candidate would hold it; their units are the same.
        candidates: in the order of ranks, of those that take part.
        network: of the links between them.
        required: numbers of candidates that take part in any case.
        apart: pairs of candidates that cannot reach each other.
    """

    profiles: Sequence[ModelProfile]
    candidates: Sequence[Candidate]
    cache_tokens: int
    network: Network
    work: Workload = field(default_factory=Workload)
    required: Collection[int] = ()
    apart: Collection[frozenset[int]] = ()
    _known: dict[Members, Choice | None] = field(default_factory=dict)
    """By set: what it comes to; None: the model does not fit."""
    _alone: dict[int, tuple[float, float, float, float]] = field(default_factory=dict)
    """By candidate: what each part of the model takes on it alone, see `_alone_s`."""

    def best(self, without: int | None = None) -> Choice:
        """The set that takes the least time.

        Args:
            without: the number of a candidate that takes no part.

        Raises:
            PlanError: the model fits on none, or nodes that are required cannot reach each other.
        """
        self._check_required()
        usable = [number for number in range(len(self.candidates)) if number != without]
        found = self._exactly(usable) if len(usable) <= EXACT else self._roughly(usable)
        if found is None:
            everybody = [number for number in usable if not self._is_apart((*self.required, number))]
            self._plans(tuple(sorted({*everybody, *self.required})))  # raises: it says what is missing where
            raise PlanError(self._torn(usable))
        return found

    def others(self, best: Choice, count: int) -> list[Choice]:
        """The next best of the sets that have been forecast."""
        known = [choice for choice in self._known.values() if choice and choice.members != best.members]
        return sorted(known, key=lambda choice: choice.forecast.token_s)[:count]

    def of(self, members: Members) -> Choice | None:
        """What a set comes to; None: the model does not fit, or two of it cannot reach each other."""
        if members not in self._known:
            try:
                self._known[members] = None if self._is_apart(members) else self._plans(members)
            except PlanError:
                self._known[members] = None
        return self._known[members]

    def _plans(self, members: Members) -> Choice:
        """
        Raises:
            PlanError: the model does not fit.
        """
        profiles = [self.profiles[number] for number in members]
        candidates = [self.candidates[number] for number in members]
        plans = quickest_shares(profiles, candidates, self.cache_tokens, self.work)
        network = part_of(self.network, members)
        return Choice(members, plans, forecast(profiles, candidates, plans, network, self.work))

    def _exactly(self, usable: Sequence[int]) -> Choice | None:
        best: Choice | None = None
        sets = [
            members
            for size in range(1, len(usable) + 1)
            for members in combinations(usable, size)
            if set(self.required) <= set(members) and not self._is_apart(members)
        ]
        for least, members in sorted((self._least_s(members), members) for members in sets):
            if best is not None and least > best.forecast.token_s:
                break
            best = _better(best, self.of(members))
        return best

    def _roughly(self, usable: Sequence[int]) -> Choice | None:
        met: dict[Members, float] = {}

        def rough(members: Members) -> float:
            if members not in met:
                possible = 0 < len(members) <= MAX_RANKS and self._has_room(members) and not self._is_apart(members)
                met[members] = self._rough_s(members) if possible else inf
            return met[members]

        for start in sorted(set(self._starts(usable)), key=lambda members: (rough(members), members))[:STARTS]:
            now = start
            while True:
                changed = min(_changes(now, usable, set(self.required)), key=rough, default=now)
                if rough(changed) >= rough(now):
                    break
                now = changed
        best: Choice | None = None
        promising = sorted((members for members in met if met[members] < inf), key=lambda members: met[members])
        for tried, members in enumerate(promising[: 4 * FORECAST]):
            if tried >= FORECAST and best is not None:
                break
            best = _better(best, self.of(members))
        return best and self._climbed(best, usable, rough)

    def _climbed(self, best: Choice, usable: Sequence[int], rough: Callable[[Members], float]) -> Choice:
        """From a set to better ones that differ by one node, as long as there are any by the full forecast.

        Args:
            rough: about what a token takes on a set; infinite where it is not possible.
        """
        while True:
            near = [each for each in _changes(best.members, usable, set(self.required)) if rough(each) < inf]
            near.sort(key=rough)
            better: Choice | None = best
            for members in near[:NEIGHBOURS]:
                better = _better(better, self.of(members))
            if better is best or better is None:
                return best
            best = better

    def _starts(self, usable: Sequence[int]) -> Iterator[Members]:
        """Sets to begin with: the fastest nodes, and those with the shortest ways to each of them, ever more."""
        speeds = {number: self.candidates[number].speed for number in usable}
        orders = [sorted(usable, key=lambda number: -speeds[number])]
        for seed in orders[0]:
            ways = self.network.latency[seed]
            orders.append(sorted(usable, key=lambda number: (number != seed, ways[number], -speeds[number])))
        for order in orders:
            members = list(self.required)
            sizes = {2**power for power in range(7)} | {len(order)}
            for number in order:
                if number not in members and not self._is_apart((*members, number)) and len(members) < MAX_RANKS:
                    members.append(number)
                    if len(members) in sizes or len(order) <= 2 * EXACT:
                        yield tuple(sorted(members))
            yield tuple(sorted(members))

    def _has_room(self, members: Members) -> bool:
        """Whether the model could fit, were its units fluid."""
        left = 1.0
        for number in members:
            profile = self.profiles[number]
            room = self.candidates[number].memory - profile.fixed_bytes
            if room < 0:
                return False
            left -= room / self._whole_bytes(number)
        return left <= 0

    def _whole_bytes(self, number: int) -> int:
        """Bytes of all of the model, its caches among them, as a candidate would hold it."""
        profile = self.profiles[number]
        group = profile.attention_query_bytes + profile.attention_kv_bytes
        group += profile.cache_bytes_per_token * self.cache_tokens
        fill = profile.mlp_units * profile.mlp_unit_bytes + profile.vocabulary_units * profile.vocabulary_unit_bytes
        return max(1, profile.kv_groups * group + fill)

    def _least_s(self, members: Members) -> float:
        """Seconds that a token surely takes on a set."""
        if len(members) == 1:
            return self._fluid_s(members)
        latency, bandwidth = self.network.latency, self.network.bandwidth
        nearest = max(min(latency[one][other] for other in members if other != one) for one in members)
        profile = self.profiles[0]
        nbytes = profile.hidden * self.work.rows * WIRE_BYTES[self.work.wire]
        widest = max(bandwidth[one][other] for one in members for other in members if other != one)
        least = nearest + 2 * self.network.frame_s + nbytes / widest
        return self._fluid_s(members) + 2 * profile.layers * least

    def _rough_s(self, members: Members) -> float:
        """About what a token takes on a set, by one-shot or two-shot sums."""
        count = len(members)
        computing = self._poured_s(members)
        if count == 1:
            return computing
        latency, bandwidth = self.network.latency, self.network.bandwidth
        pairs = [(one, other) for one in members for other in members if one < other]
        farthest = max(latency[one][other] for one, other in pairs)
        narrowest = min(bandwidth[one][other] for one, other in pairs)
        profile = self.profiles[0]
        nbytes = profile.hidden * self.work.rows * WIRE_BYTES[self.work.wire]
        frame, summed = self.network.frame_s, nbytes * SUM_S
        one_shot = farthest + (count - 1) * (2 * frame + nbytes / narrowest + summed)
        two_shot = 2 * farthest + (count - 1) * (4 * frame + 2 * nbytes / count / narrowest) + summed
        return computing + 2 * profile.layers * min(one_shot, two_shot) + lead_s(self.network, members)

    def _poured_s(self, members: Members) -> float:
        """About what a set takes to compute a token within its memory, were its units fluid."""
        alone = [self._alone_s(number) for number in members]
        rooms = (self.candidates[number].memory - self.profiles[number].fixed_bytes for number in members)
        caps = [room / self._whole_bytes(number) for room, number in zip(rooms, members, strict=True)]
        seconds = [sum(own[:3]) for own in alone]
        parts = pour(1.0, [1 / own for own in seconds], caps)
        return max(part * own for part, own in zip(parts, seconds, strict=True)) + min(own[3] for own in alone)

    def _fluid_s(self, members: Members) -> float:
        """Seconds in which a set computes a token, were its units fluid, and its memory no matter."""
        alone = [self._alone_s(number) for number in members]
        together = sum(1 / sum(1 / own[part] for own in alone) for part in range(3))
        return together + min(own[3] for own in alone)

    def _alone_s(self, number: int) -> tuple[float, float, float, float]:
        """Seconds in which a candidate would compute all attention, all MLPs and all of the head for a token, and those
        of its calls, which more ranks make no fewer."""
        if number not in self._alone:
            profile, work = self.profiles[number], self.work
            pace = Pace(profile, self.candidates[number], 1, work.rows, work.position)
            calls = sum(pace.calls_s)
            attention = pace.attention_s(range(profile.kv_groups)) - pace.calls_s[0]
            mlp, head = profile.mlp_units * pace.mlp_s, profile.vocabulary_units * pace.head_s
            self._alone[number] = (max(attention, 1e-12), max(mlp, 1e-12), max(head, 1e-12), calls)
        return self._alone[number]

    def _is_apart(self, members: Collection[int]) -> bool:
        return any(pair <= set(members) for pair in self.apart)

    def _check_required(self) -> None:
        """
        Raises:
            PlanError: nodes that are required cannot reach each other.
        """
        for pair in self.apart:
            if pair <= set(self.required):
                one, other = (self.candidates[number].name for number in sorted(pair))
                raise PlanError(f"{one} and {other} cannot reach each other, so they cannot have ranks of one session")

    def _torn(self, usable: Sequence[int]) -> str:
        """Why there is no plan although all together have the memory."""
        pairs = [sorted(pair) for pair in self.apart if pair <= set(usable)]
        lines = [f"  {self.candidates[one].name} and {self.candidates[other].name}" for one, other in sorted(pairs)]
        told = "\n".join(lines)
        return f"{self.profiles[0].name} fits on no nodes that can all reach each other. These cannot:\n{told}"


class RunnersUp(NamedTuple):
    """What else there is beside the best choice.

    Attributes:
        others: the next best sets of nodes, the best first.
        without: by number of a candidate, seconds of a token where it takes no part; None: the model does not fit then.
    """

    others: list[Choice]
    without: list[float | None]


def runners_up(chooser: Chooser, best: Choice, count: int = 3) -> RunnersUp:
    """What else there is beside the best choice of a chooser.

    Args:
        count: of the next best sets, at most.
    """
    without: list[float | None] = []
    for number in range(len(chooser.candidates)):
        if number not in best.members:
            without.append(best.forecast.token_s)
            continue
        try:
            alone = number in chooser.required or len(chooser.candidates) == 1
            without.append(None if alone else chooser.best(without=number).forecast.token_s)
        except PlanError:
            without.append(None)
    for number in range(len(chooser.candidates)):  # people want to know what a node would bring that is left out
        if number not in best.members and len(best.members) < MAX_RANKS:
            chooser.of(tuple(sorted((*best.members, number))))
    return RunnersUp(chooser.others(best, count), without)


def _changes(members: Members, usable: Sequence[int], required: set[int]) -> Iterator[Members]:
    """Sets that differ from one by a node more, a node less, or another node."""
    own = set(members)
    outside = [number for number in usable if number not in own]
    inside = [number for number in members if number not in required]
    for number in outside:
        yield tuple(sorted(own | {number}))
    for number in inside:
        yield tuple(sorted(own - {number}))
    for one in inside if len(inside) * len(outside) <= 256 else ():
        for other in outside:
            yield tuple(sorted(own - {one} | {other}))


def _better(one: Choice | None, other: Choice | None) -> Choice | None:
    """The quicker of two choices; the first, or that of fewer nodes, if they take as long."""
    if one is None or other is None:
        return one or other
    gain = one.forecast.token_s - other.forecast.token_s
    if abs(gain) <= WORTH * one.forecast.token_s:
        return min(one, other, key=lambda choice: len(choice.members))
    return other if gain > 0 else one
