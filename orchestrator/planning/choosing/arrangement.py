"""What the search for nodes compares: who takes part, in which stages, and how long a token takes so. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from motley.orchestrator.planning.choosing.stages import ranks_by_stage
from motley.orchestrator.planning.cost import Forecast
from motley.orchestrator.planning.cutting.shares import RankPlan

Members = tuple[int, ...]
"""Numbers of candidates, by rank: some of them take part."""
Groups = tuple[Members, ...]
"""The members of each stage, in order."""

WORTH = 1e-9
"""A choice is better if it takes less time by more than this part."""


class NoPart(NamedTuple):
    """A node that was to take part, and would have nothing of the model, and why."""

    node: str
    why: str


@dataclass(frozen=True)
class Choice:
    """Nodes that take part, and what they do.

    Attributes:
        members: numbers of the candidates that take part, by rank.
        plans: the share of each, by rank.
        idle: by number of a candidate that was to take part, and would have nothing of the model: why.
    """

    members: Members
    plans: Sequence[RankPlan]
    forecast: Forecast
    idle: Mapping[int, str] = field(default_factory=dict)

    @property
    def arrangement(self) -> Groups:
        """The members of each stage."""
        return tuple(self.members[ranks.start : ranks.stop] for ranks in ranks_by_stage(self.plans))

    @property
    def kind(self) -> str:
        """How the model is cut: ``tensor``, every layer over all ranks; ``pipeline``, in stages of one rank each; or
        ``mixed``, in stages of which some are of several ranks."""
        return kind_of(self.plans)


def kind_of(plans: Sequence[RankPlan]) -> str:
    """How ranks with such shares have a model, see `Choice.kind`."""
    stages = len(ranks_by_stage(plans))
    if stages == 1:
        return "tensor"
    return "pipeline" if stages == len(plans) else "mixed"


def better(one: Choice | None, other: Choice | None) -> Choice | None:
    """The quicker of two choices; the first, or that of fewer nodes, if they take as long."""
    if one is None or other is None:
        return one or other
    gain = one.forecast.token_s - other.forecast.token_s
    if abs(gain) <= WORTH * one.forecast.token_s:
        return min(one, other, key=lambda choice: len(choice.members))
    return other if gain > 0 else one
