"""Which stages nodes form, and how many layers each has, so that a token takes the least time. Pure.

Stages pay where links are slow: nodes of a stage sum twice in each of its layers, while from stage to stage rows go
once. They also pay where several requests are under way: then all stages compute at a time.

How many layers each stage has follows from what a layer takes there, and how many its nodes have room for: with one
wave the quickest stage gets as many as fit; with several, so many that no stage holds the others up (`spread`, which is
exact for layers that are alike). From there layers are moved between stages as long as the forecast gets better.
Layers that need what a layer before them has chosen stay with it: such a *run* is dealt out, and moved, as one piece
(where no layer needs that, each is a run by itself).

Of up to `EXACT` nodes all ways to put some of them in stages are looked at, in the order of what each takes at the
least, until that is more than the best one takes. Of more, the search begins with nodes that are near to each other
(clusters of links, at every size) and with the fastest ones by themselves, and goes on by moving, adding and leaving
out one node as long as an estimate gets better; the best few are forecast in full.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations, pairwise, permutations
from math import inf

from motley.orchestrator.planning.choosing.arrangement import Choice, Groups, Members, better
from motley.orchestrator.planning.choosing.estimates import Estimates
from motley.orchestrator.planning.choosing.search import Descent
from motley.orchestrator.planning.choosing.stages import can_be_staged, layer_runs, plans_of_stage
from motley.orchestrator.planning.cost import forecast, lead_s
from motley.orchestrator.planning.cutting.quickest import quickest_shares
from motley.orchestrator.planning.cutting.shares import PlanError, RankPlan, consecutive
from motley.protocol import MAX_RANKS

EXACT = 5
"""Of so many nodes the best stages are found for certain, but for what moving layers one by one misses."""
MOST_STAGES = 8
"""The search among more nodes looks at no more stages."""
STARTS = 4
"""It begins with so many arrangements."""
ROUNDS = 12
"""It changes each of them so often, at most."""
FORECAST = 8
"""Arrangements that look best are forecast: so many."""
MOVES = 24
"""Ways to spread layers over the stages of an arrangement that are forecast, at most."""


def spread(
    layers: int, each_s: Sequence[float], besides_s: Sequence[float], most: Sequence[int], waves: int
) -> list[int] | None:
    """How many layers each stage has, so that max(sum of all stages, waves * the slowest stage) is least, where stage s
    takes ``layers_s * each_s + besides_s``. None: there is no room for all layers.

    Args:
        most: that each stage may have; every one has one at least.
    """
    if sum(most) < layers or min(most) < 1 or len(most) > layers:
        return None
    quickest = sorted(range(len(most)), key=lambda stage: each_s[stage])

    def filled(bound: float) -> list[int] | None:
        """The least sum where no stage takes longer than `bound`."""
        own = [
            min(cap, int((bound - other) / one * (1 + 1e-12))) if bound < inf else cap
            for cap, one, other in zip(most, each_s, besides_s, strict=True)
        ]
        if min(own) < 1 or sum(own) < layers:
            return None
        given = [1] * len(own)
        left = layers - len(own)
        for stage in quickest:
            more = min(left, own[stage] - 1)
            given[stage] += more
            left -= more
        return given

    def taken(given: Sequence[int]) -> float:
        stages = [count * one + other for count, one, other in zip(given, each_s, besides_s, strict=True)]
        return max(sum(stages), waves * max(stages))

    ends = [one * count + other for one, other in zip(each_s, besides_s, strict=True) for count in range(1, layers + 1)]
    bounds = sorted({*ends, inf})
    least = bisect_left(bounds, True, key=lambda bound: filled(bound) is not None)
    # A wider bound lets the sum be less, and the slowest stage be slower: the best one is where they cross.
    crossing = bisect_left(
        bounds,
        True,
        lo=least,
        key=lambda bound: waves * bound >= taken(filled(bound) or []),  # there is one from there
    )
    found = [given for bound in bounds[max(least, crossing - 1) : crossing + 1] if (given := filled(bound))]
    return min(found, key=taken)


@dataclass
class Staging:
    """Looks for stages, and remembers what it has forecast.

    Attributes:
        estimates: of the candidates.
        required: numbers of those that take part in any case. Rank 0 is the first candidate's if it is one of them; if
            all are, they have ranks in their order.
        is_apart: whether two of some candidates cannot reach each other.
    """

    estimates: Estimates
    required: Collection[int]
    is_apart: Callable[[Collection[int]], bool]
    _known: dict[Groups, Choice | None] = field(default_factory=dict)
    _by_waves: dict[int, Estimates] = field(default_factory=dict)
    _plans: dict[tuple[Members, range, int], list[RankPlan] | None] = field(default_factory=dict)

    @property
    def known(self) -> list[Choice]:
        """What has been forecast so far, and fits."""
        return [choice for choice in self._known.values() if choice]

    def best(self, usable: Sequence[int], stages: int | tuple[int, ...], least: Choice | None) -> Choice | None:
        """The quickest arrangement in several stages; None: there is none, or none that is quicker than `least`.

        Args:
            usable: numbers of the candidates that may take part.
            stages: how many, 0: any number above one; or how many nodes each has, of those that are required.
        """
        if not can_be_staged(self.estimates.profile):
            return None
        if not isinstance(stages, int):
            given = self._by_hand(stages)
            return self.of(given) if given else None
        if len(usable) <= EXACT:
            return self._exactly(usable, stages, least)
        return self._roughly(usable, stages, least)

    def of(self, groups: Groups) -> Choice | None:
        """What an arrangement comes to; None: the model does not fit, or two of it cannot reach each other."""
        if groups not in self._known:
            members = tuple(number for group in groups for number in group)
            self._known[groups] = None if self.is_apart(members) else self._spread_best(groups)
        return self._known[groups]

    # -- layers --------------------------------------------------------------------------------------------------------

    def _spread_best(self, groups: Groups) -> Choice | None:
        """The best way found to spread the layers over some stages; None: they do not fit."""
        most, waves = self._most_layers(groups), self._waves(groups)
        each_s, besides_s = self._rates(groups, least=False)
        a_run = self._layers / len(self._runs)
        best: Choice | None = None
        while best is None:
            given = spread(len(self._runs), [a_run * one_s for one_s in each_s], besides_s, most, waves)
            if given is None:
                return None
            best = self._forecast(groups, given)
            if best is None:
                each = zip(groups, self._cut(given), strict=True)
                full = [at for at, (group, layers) in enumerate(each) if not self._stage(group, layers, waves)]
                assert full, "some stage did not fit, so that there is ever less room"
                for at in full:
                    most[at] = given[at] - 1
        for _ in range(MOVES):
            moved = [self._forecast(groups, other) for other in _moves(self._counts(best))]
            improved = best
            for other in moved:
                improved = better(improved, other) or best
            if improved is best:
                break
            best = improved
        return best

    def _forecast(self, groups: Groups, counts: Sequence[int]) -> Choice | None:
        """What an arrangement comes to with so many runs of layers in each stage; None: they do not fit."""
        estimates = self.estimates
        plans: list[RankPlan] = []
        for group, layers in zip(groups, self._cut(counts), strict=True):
            own = self._stage(group, layers, self._waves(groups))
            if own is None:
                return None
            plans += own
        members = tuple(number for group in groups for number in group)
        profiles = [estimates.profiles[number] for number in members]
        candidates = [estimates.candidates[number] for number in members]
        there = estimates.network.among(members)
        return Choice(members, plans, forecast(profiles, candidates, plans, there, estimates.work))

    def _cut(self, counts: Sequence[int]) -> list[range]:
        """The layers of stages that have so many runs of them."""
        own = (self._runs[part.start : part.stop] for part in consecutive(counts))
        return [range(runs[0].start, runs[-1].stop) for runs in own]

    def _counts(self, choice: Choice) -> list[int]:
        """How many runs of layers the stages of a choice have."""
        stages = dict.fromkeys(plan.layers or range(0) for plan in choice.plans)
        return [sum(run.start in layers for run in self._runs) for layers in stages]

    def _stage(self, group: Members, layers: range, waves: int) -> list[RankPlan] | None:
        """The shares of a stage's nodes; None: its layers do not fit."""
        if (group, layers, waves) not in self._plans:
            estimates = self._of_waves(waves)
            plan = partial(
                quickest_shares,
                candidates=[estimates.candidates[number] for number in group],
                cache_tokens=estimates.cache_tokens,
                work=estimates.work,
            )
            try:
                found = plans_of_stage([estimates.profiles[number] for number in group], layers, plan)
            except PlanError:
                found = None
            self._plans[group, layers, waves] = found
        return self._plans[group, layers, waves]

    # -- estimates -----------------------------------------------------------------------------------------------------

    @property
    def _layers(self) -> int:
        return self.estimates.profile.layers

    @cached_property
    def _runs(self) -> list[range]:
        return layer_runs(self.estimates.profile)

    def _waves(self, groups: Groups) -> int:
        return min(len(groups), self.estimates.work.rows)

    def _of_waves(self, waves: int) -> Estimates:
        """Estimates for steps of a wave's rows, where the rows under way are in so many waves."""
        if waves not in self._by_waves:
            work = self.estimates.work
            own = replace(work, rows=-(-work.rows // waves))
            whole = self.estimates
            self._by_waves[waves] = Estimates(whole.profiles, whole.candidates, whole.cache_tokens, whole.network, own)
        return self._by_waves[waves]

    def _rates(self, groups: Groups, *, least: bool) -> tuple[list[float], list[float]]:
        """Seconds that a layer takes in each stage, and those that it takes besides: for the head."""
        each, besides, estimates = [], [], self._of_waves(self._waves(groups))
        for at, group in enumerate(groups):
            layers, head, calls = estimates.fluid_parts_s(group)
            one_sum = estimates.least_sum_s(group) if least else estimates.rough_sum_s(group)
            each.append((layers + calls) / self._layers + 2 * one_sum)
            besides.append(head if at == len(groups) - 1 else 0.0)
        return each, besides

    def _most_layers(self, groups: Groups) -> list[int]:
        """Layers that each stage surely has no room for more of."""
        estimates, most = self.estimates, []
        for group in groups:
            part = 0.0
            for number in group:
                profile = estimates.profiles[number]
                head = profile.vocabulary_units * profile.vocabulary_unit_bytes
                spared = sum(costs.layers * costs.fixed_bytes for costs in profile.layer_costs)
                room = max(0, estimates.candidates[number].memory - profile.fixed_bytes + spared)
                part += room / max(1, estimates.whole_bytes(number) - head)
            costs = estimates.profile.layer_costs
            alike = len(costs) == 1  # else some layers are smaller than others: how many fit is seen when they are cut
            most.append(min(self._layers - len(groups) + 1, int(part * self._layers)) if alike else self._layers)
        return most

    def _estimated_s(self, groups: Groups, *, least: bool) -> float:
        """About what an arrangement takes, or surely takes; infinite: it does not fit."""
        each, besides = self._rates(groups, least=least)
        waves = self._waves(groups)
        counts = spread(self._layers, each, besides, self._most_layers(groups), waves)
        if counts is None:
            return inf
        stages = [count * one + other for count, one, other in zip(counts, each, besides, strict=True)]
        latency = self.estimates.network.latency
        hops = [
            (min if least else max)(latency[one][other] for one in before for other in after)
            for before, after in pairwise(groups)
        ]
        members = tuple(number for group in groups for number in group)
        through = sum(stages) + sum(hops) + (0.0 if least else lead_s(self.estimates.network, members))
        return max(through, waves * max(stages))

    # -- searches ------------------------------------------------------------------------------------------------------

    def _by_hand(self, sizes: Sequence[int]) -> Groups | None:
        """The required candidates in stages of so many; None: they are more or fewer."""
        if sum(sizes) != len(self.required):
            return None
        members = iter(sorted(self.required))
        return tuple(tuple(next(members) for _ in range(size)) for size in sizes)

    def _may_be(self, groups: Groups, stages: int) -> bool:
        """Whether an arrangement has what is asked for."""
        members = {number for group in groups for number in group}
        return (
            (len(groups) == stages if stages else len(groups) > 1)
            and len(groups) <= len(self._runs)
            and len(members) <= MAX_RANKS
            and members.issuperset(self.required)
            and (0 not in self.required or groups[0][0] == 0)
            and (not self._in_order or [number for group in groups for number in group] == sorted(members))
            and not self.is_apart(members)
        )

    @property
    def _in_order(self) -> bool:
        return len(self.required) == len(self.estimates.candidates)

    def _exactly(self, usable: Sequence[int], stages: int, least: Choice | None) -> Choice | None:
        arrangements = [groups for groups in _arrangements(usable) if self._may_be(groups, stages)]
        bound = least.forecast.token_s if least else inf
        best: Choice | None = None
        for surely, groups in sorted((self._estimated_s(groups, least=True), groups) for groups in arrangements):
            if surely == inf or surely > bound:
                break
            best = better(best, self.of(groups))
            bound = min(bound, best.forecast.token_s if best else inf)
        return best

    def _roughly(self, usable: Sequence[int], stages: int, least: Choice | None) -> Choice | None:
        def rough_s(groups: Groups) -> float:
            return self._estimated_s(groups, least=False) if self._may_be(groups, stages) else inf

        descent = Descent[Groups](rough_s)
        descent.descend(self._starts(usable, stages), STARTS, lambda groups: _changes(groups, usable), ROUNDS)
        bound = 1.2 * least.forecast.token_s if least else inf  # what looks much slower is not forecast
        return descent.best(self.of, FORECAST, bound)

    def _starts(self, usable: Sequence[int], stages: int) -> Iterator[Groups]:
        """Arrangements to begin with."""
        counts = [stages] if stages else range(2, min(MOST_STAGES, len(self._runs), len(usable)) + 1)
        speeds = {number: self.estimates.candidates[number].speed for number in usable}
        fastest = sorted(usable, key=lambda number: (number not in self.required, -speeds[number]))
        for count in counts if self._in_order else ():
            ends = [len(usable) * at // count for at in range(count + 1)]
            yield tuple(tuple(usable[begin:end]) for begin, end in pairwise(ends))
        for groups in self._clusters(usable):
            if len(groups) in counts:
                yield self._in_a_row(groups)
        for count in counts:
            if count <= len(fastest):
                own = max(count, len(self.required))
                yield (
                    self._in_a_row([(number,) for number in fastest[:own]])
                    if own == count
                    else self._in_a_row([tuple(sorted(fastest[at:own:count])) for at in range(count)])
                )

    def _clusters(self, usable: Sequence[int]) -> Iterator[list[Members]]:
        """All nodes in clusters that are near to each other: in as many as there are nodes, then in ever fewer."""
        latency = self.estimates.network.latency
        groups: list[Members] = [(number,) for number in usable]
        near = {number: number for number in usable}  # of each node, the first one of its cluster
        pairs = sorted((latency[one][other], one, other) for one, other in combinations(usable, 2))
        yield list(groups)
        for _, one, other in pairs:
            if near[one] == near[other]:
                continue
            old, new = sorted((near[one], near[other]), reverse=True)
            near = {number: new if first == old else first for number, first in near.items()}
            groups = [tuple(own for own in usable if near[own] == first) for first in sorted(set(near.values()))]
            yield list(groups)

    def _in_a_row(self, groups: Sequence[Members]) -> Groups:
        """Stages one after another, each followed by the nearest of those that are left; the first has rank 0."""
        latency = self.estimates.network.latency
        speeds = [sum(self.estimates.candidates[number].speed for number in group) for group in groups]
        left = sorted(range(len(groups)), key=lambda at: (0 in self.required and 0 not in groups[at], -speeds[at]))
        row = [left.pop(0)]
        while left:
            before = groups[row[-1]]
            left.sort(key=lambda at: min(latency[one][other] for one in before for other in groups[at]))
            row.append(left.pop(0))
        return tuple(groups[at] for at in row)


def _arrangements(usable: Sequence[int]) -> Iterator[Groups]:
    """Every way to put some of a few candidates into several stages, one after another."""
    for size in range(2, len(usable) + 1):
        for members in combinations(usable, size):
            for groups in _partitions(members):
                if len(groups) > 1:
                    yield from permutations(groups)


def _partitions(members: Members) -> Iterator[Groups]:
    """Every way to put all of some candidates into groups, in no order."""
    if not members:
        yield ()
        return
    first, *rest = members
    for size in range(len(rest) + 1):
        for others in combinations(rest, size):
            left = tuple(number for number in rest if number not in others)
            yield from (((first, *others), *groups) for groups in _partitions(left))


def _changes(groups: Groups, usable: Sequence[int]) -> Iterator[Groups]:
    """Arrangements that differ by one node, which is elsewhere, or takes part or not, and by two stages' order."""
    inside = {number: at for at, group in enumerate(groups) for number in group}
    for number in usable:
        without = [tuple(own for own in group if own != number) for group in groups]
        if number in inside:
            yield tuple(group for group in without if group)
        for at in range(len(groups)):
            if inside.get(number) != at:
                joined = [tuple(sorted((*group, number))) if to == at else group for to, group in enumerate(without)]
                yield tuple(group for group in joined if group)
    for at in range(len(groups) - 1):
        yield (*groups[:at], groups[at + 1], groups[at], *groups[at + 2 :])


def _moves(counts: Sequence[int]) -> Iterator[list[int]]:
    """What one run, moved from a stage to another, makes of so many."""
    for one, count in enumerate(counts):
        for other in range(len(counts)):
            if one != other and count > 1:
                yield [own - (at == one) + (at == other) for at, own in enumerate(counts)]
