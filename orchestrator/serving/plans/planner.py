"""Asking the planner beside the event loop: of thousands of experts, or dozens of ranks, an answer takes a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from motley.orchestrator.experts.questions import Answer, Question
from motley.orchestrator.planning.choosing.arrangement import Choice
from motley.orchestrator.planning.choosing.choice import Chooser, RunnersUp, runners_up
from motley.orchestrator.planning.cutting.by_hand import keep_shares
from motley.orchestrator.planning.cutting.shares import Candidate, RankPlan, plan_shares
from motley.orchestrator.serving.errors import SHUTTING_DOWN, refusal
from motley.protocol.mesh_pb2 import ModelProfile

PLANNERS = 4
"""Questions that are answered at a time: of one new session, and of sessions that lose or get hosts."""

_Found = TypeVar("_Found")


class Planner:
    """A few threads that answer questions about shares and experts."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(PLANNERS, "planner")
        self._stopped = False

    async def answer(self, question: Question) -> Answer:
        """Where experts should be.

        Raises:
            PlacementError: there is no room for the least that will do.
            ServingError: the orchestrator shuts down.
        """
        return await self._run(question.answer)

    async def shares(
        self, profiles: Sequence[ModelProfile], candidates: Sequence[Candidate], cache_tokens: int
    ) -> list[RankPlan]:
        """The share of every rank: as it was given by hand (`keep_shares`), else as is best (`plan_shares`).

        Raises:
            PlanError: the model does not fit, or not in these shares.
            ServingError: the orchestrator shuts down.
        """
        plan = plan_shares if candidates[0].share is None else keep_shares
        return await self._run(partial(plan, profiles, candidates, cache_tokens))

    async def choose(self, chooser: Chooser) -> Choice:
        """The nodes that take part, and their shares.

        Raises:
            PlanError: the model does not fit, or nodes that must take part cannot reach each other.
            ServingError: the orchestrator shuts down.
        """
        return await self._run(chooser.best)

    async def runners_up(self, chooser: Chooser, best: Choice) -> RunnersUp:
        """What else there is beside the best choice of a chooser, for people.

        Raises:
            ServingError: the orchestrator shuts down.
        """
        return await self._run(partial(runners_up, chooser, best))

    async def _run(self, work: Callable[[], _Found]) -> _Found:
        if self._stopped:
            raise refusal("session_closed", SHUTTING_DOWN)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def stop(self) -> None:
        """Ask nothing after this."""
        self._stopped = True
        self._threads.shutdown(wait=False)
