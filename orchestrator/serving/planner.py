"""Asking the planner beside the event loop: an answer about thousands of experts takes a second."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from motley.orchestrator.experts.questions import Answer, Question

PLANNERS = 4
"""Questions that are answered at a time: of one new session, and of sessions that lose or get hosts."""


class Planner:
    """A few threads that answer questions about experts."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(PLANNERS, "planner")

    async def answer(self, question: Question) -> Answer:
        """What the planner says.

        Raises:
            PlacementError: there is no room for the least that will do.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, question.answer)

    def stop(self) -> None:
        """Ask nothing after this."""
        self._threads.shutdown(wait=False)
