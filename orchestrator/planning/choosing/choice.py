"""Which nodes take part, so that a token takes the least time: more nodes read faster, and wait for more links. Pure.

Of up to `EXACT` nodes all sets are looked at, in the order of what each takes at the least: units taken for fluid,
a sum for no longer than its rows need to reach anybody. The search ends where that is more than the best set found
takes, so nothing is missed. Of more nodes, sets are grown, shrunk and changed by one node as long as a rough forecast
gets better, from the fastest nodes and from neighbours; of the sets that were met the best of each size are forecast in
full, and the best of these is changed by one node as long as that gets better too.

Nodes may also form stages, of some layers each (`motley.orchestrator.planning.choosing.staging`): what is best of both
is taken.

Two nodes that cannot reach each other are in no set together. Some may be required; then they are in every set, but for
those that get no piece of the model there: they would only hold up the others' sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from math import inf
from typing import NamedTuple

from motley.orchestrator.planning.choosing.arrangement import Choice, Members, better
from motley.orchestrator.planning.choosing.estimates import Estimates
from motley.orchestrator.planning.choosing.search import Descent
from motley.orchestrator.planning.choosing.staging import Staging
from motley.orchestrator.planning.cost import Workload, forecast
from motley.orchestrator.planning.cutting.quickest import quickest_shares
from motley.orchestrator.planning.cutting.shares import Candidate, PlanError, RankPlan
from motley.protocol import MAX_RANKS
from motley.protocol.mesh_pb2 import ModelProfile
from motley.protocol.wording import human_bytes
from motley.transport.schedules.forecast import Network

EXACT = 8
"""Of so many nodes the best set is found for certain."""
STARTS = 6
"""Of more nodes, the search begins with so many sets."""
FORECAST = 10
"""Of more nodes, so many sets that look best, of each size, are forecast."""
NEIGHBOURS = 10
"""Of more nodes, so many sets that differ from the best by a node are forecast, again and again while one is better."""


@dataclass
class Chooser:
    """Looks for sets of nodes, and remembers what it has forecast.

    Attributes:
        profiles: of the model as each candidate would hold it; their units are the same.
        candidates: in the order of ranks, of those that take part.
        network: of the links between them.
        required: numbers of candidates that take part in any case.
        drafting: the number of a candidate that has something else to do, and takes part without any of the model, too.
        apart: pairs of candidates that cannot reach each other.
        stages: how many stages there are to be, 1: every layer is shared by all; 0: as many as are best. Or how many of
            those that are required each stage has, in their order; all are required then.
    """

    profiles: Sequence[ModelProfile]
    candidates: Sequence[Candidate]
    cache_tokens: int
    network: Network
    work: Workload = field(default_factory=Workload)
    required: Collection[int] = ()
    drafting: int | None = None
    apart: Collection[frozenset[int]] = ()
    stages: int | tuple[int, ...] = 0
    _known: dict[Members, Choice | None] = field(default_factory=dict, init=False)
    """By set whose members all have shares of all layers: what it comes to; None: the model does not fit."""

    @cached_property
    def _staging(self) -> Staging:
        return Staging(self._estimates, self.required, self._is_apart)

    @cached_property
    def _estimates(self) -> Estimates:
        return Estimates(self.profiles, self.candidates, self.cache_tokens, self.network, self.work)

    def best(self, without: int | None = None) -> Choice:
        """What takes the least time.

        Args:
            without: the number of a candidate that takes no part.

        Raises:
            PlanError: the model fits on none, or nodes that are required cannot reach each other.
        """
        self._check_required()
        usable = [number for number in range(len(self.candidates)) if number != without]
        found = None
        if self.stages in (0, 1):
            found = self._exactly(usable) if len(usable) <= EXACT else self._roughly(usable)
        if self.stages != 1:
            found = better(found, self._staging.best(usable, self.stages, found))
        if found is None:
            everybody = [number for number in usable if not self._is_apart((*self.required, number))]
            self._plans(tuple(sorted({*everybody, *self.required})))  # raises: it says what is missing where
            raise PlanError(self._torn(usable) if self.apart else self._unstaged())
        return self._without_idle(found)

    def others(self, best: Choice, count: int) -> list[Choice]:
        """The next best of the sets that have been forecast."""
        forecast_so_far = [*self._known.values(), *self._staging.known]
        known = [
            choice
            for choice in forecast_so_far
            if choice and choice.arrangement != best.arrangement and best.idle.keys().isdisjoint(choice.members)
        ]
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
        return self._forecast(members, quickest_shares(profiles, candidates, self.cache_tokens, self.work))

    def _forecast(self, members: Members, plans: Sequence[RankPlan]) -> Choice:
        profiles = [self.profiles[number] for number in members]
        candidates = [self.candidates[number] for number in members]
        return Choice(members, plans, forecast(profiles, candidates, plans, self.network.among(members), self.work))

    def _without_idle(self, choice: Choice) -> Choice:
        """A choice without nodes that are required, and have no piece of the model; the others keep what they have.
        They stay where a token takes longer without: one that leads and is near to all others is worth its place."""
        busy = {
            number: plan
            for number, plan in zip(choice.members, choice.plans, strict=True)
            if plan.attention or plan.mlp or plan.vocabulary or number not in self.required or number == self.drafting
        }
        idle = {number: self._why_idle(number) for number in choice.members if number not in busy}
        if not idle:
            return choice
        without = self._forecast(tuple(busy), [*busy.values()])
        return choice if choice.forecast.token_s < without.forecast.token_s else replace(without, idle=idle)

    def _why_idle(self, number: int) -> str:
        """Why a node has no piece of the model."""
        profile, memory = self.profiles[number], self.candidates[number].memory
        least = min(profile.mlp_unit_bytes, profile.vocabulary_unit_bytes)
        if memory - profile.fixed_bytes < least:
            needed = human_bytes(profile.fixed_bytes + least)
            return f"a rank needs {needed} at least, and {human_bytes(memory)} are free there"
        return "the others are sooner done with every piece of the model"

    def _exactly(self, usable: Sequence[int]) -> Choice | None:
        best: Choice | None = None
        sets = [
            members
            for size in range(1, len(usable) + 1)
            for members in combinations(usable, size)
            if set(self.required) <= set(members) and not self._is_apart(members)
        ]
        for least, members in sorted((self._estimates.least_s(members), members) for members in sets):
            if best is not None and least > best.forecast.token_s:
                break
            best = better(best, self.of(members))
        return best

    def _roughly(self, usable: Sequence[int]) -> Choice | None:
        def rough_s(members: Members) -> float:
            possible = (
                0 < len(members) <= MAX_RANKS and self._estimates.has_room(members) and not self._is_apart(members)
            )
            return self._estimates.rough_s(members) if possible else inf

        descent = Descent[Members](rough_s)
        descent.descend(self._starts(usable), STARTS, lambda members: _changes(members, usable, set(self.required)))
        best = descent.best(self.of, FORECAST)
        return best and self._climbed(best, usable, descent.rough_s)

    def _climbed(self, best: Choice, usable: Sequence[int], rough: Callable[[Members], float]) -> Choice:
        """From a set to better ones that differ by one node, as long as there are any by the full forecast.

        Args:
            rough: about what a token takes on a set; infinite where it is not possible.
        """
        while True:
            near = [each for each in _changes(best.members, usable, set(self.required)) if rough(each) < inf]
            near.sort(key=rough)
            found: Choice | None = best
            for members in near[:NEIGHBOURS]:
                found = better(found, self.of(members))
            if found is best or found is None:
                return best
            best = found

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

    def _unstaged(self) -> str:
        """Why there is no plan although the model fits where all have shares of all layers."""
        asked = self.stages if isinstance(self.stages, int) else len(self.stages)
        return (
            f"{self.profiles[0].name} does not fit in {asked} stages on these nodes: a stage has whole layers, which"
            " its nodes must have room for, one for each node at least. Ask for other stages, or leave them out"
        )

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
        without: by number of a candidate that may be left out, seconds of a token where it takes no part; None: the
            model does not fit then.
    """

    others: list[Choice]
    without: dict[int, float | None]


def runners_up(chooser: Chooser, best: Choice, count: int = 3) -> RunnersUp:
    """What else there is beside the best choice of a chooser.

    Args:
        count: of the next best sets, at most.
    """
    without: dict[int, float | None] = {}
    stages = chooser.stages if isinstance(chooser.stages, int) else len(chooser.stages)
    dispensable = [number for number in range(len(chooser.candidates)) if number not in chooser.required]
    for number in dispensable if len(chooser.candidates) > max(1, stages) else ():
        try:
            left_out = best if number not in best.members else chooser.best(without=number)
            without[number] = left_out.forecast.token_s
        except PlanError:
            without[number] = None
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
