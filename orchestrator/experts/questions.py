"""What the planner is asked about the experts of a session, and what it answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from motley.orchestrator.planning.placement.place import place_experts
from motley.orchestrator.planning.placement.terms import Expert, ExpertKey, Host, Placement, PlacementError


@dataclass(frozen=True)
class Question:
    """Everything that the planner needs to know: the session goes on changing while it thinks."""

    revision: int
    """The number of the session's hosts as they were then: an answer about others comes too late."""
    experts: tuple[Expert, ...]
    hosts: tuple[Host, ...]
    replicas: int
    least: int
    """Replicas that will do where there is no room for all."""
    row_bytes: int
    previous: Mapping[str, frozenset[ExpertKey]] | None = None
    """See `place_experts`."""
    moves: int | None = None
    """See `place_experts`."""
    worth: float = 0.0
    """The answer is taken if the cost now exceeds its cost by this factor; 0: in any case."""

    def answer(self) -> Answer:
        """Ask the planner. Takes a second for thousands of experts.

        Raises:
            PlacementError: there is no room for the least that will do.
        """
        now = self._place(1, 0).seconds_per_token if self.worth else 0.0
        short = ""
        for replicas in range(self.replicas, self.least - 1, -1):
            try:
                return Answer(self, self._place(replicas, self.moves), now, short)
            except PlacementError as error:
                short = short or str(error)
        raise PlacementError(short)

    def _place(self, replicas: int, moves: int | None) -> Placement:
        return place_experts(
            self.experts,
            self.hosts,
            replicas=replicas,
            most=self.replicas,
            row_bytes=self.row_bytes,
            previous=self.previous,
            moves=moves,
        )


@dataclass(frozen=True)
class Answer:
    """Where the planner puts the experts that it was asked about."""

    question: Question
    placement: Placement
    cost_now: float
    """Seconds per token as experts are placed now; 0: not asked."""
    short: str
    """What is missing, where there is no room for all replicas that are wanted; empty: nothing."""

    @property
    def fetches(self) -> int:
        """Replicas that hosts must fetch."""
        return sum(move.action == "fetch" for move in self.placement.moves)

    @property
    def worthwhile(self) -> bool:
        """Whether it is better by as much as was asked for."""
        worth = self.question.worth
        return not worth or self.cost_now > worth * self.placement.seconds_per_token
