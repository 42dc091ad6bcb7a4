"""Questions to nodes that have one answer each, which comes in time, or the node is lost, or silent."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from motley.orchestrator.control import Control
from motley.orchestrator.mesh.nodes import Node, what_became
from motley.protocol.mesh_pb2 import OrchestratorMessage

T = TypeVar("T")


class Unanswered(Exception):
    """A node has given no answer; the message says why, to follow the node's name."""


class NodeQuestions(Generic[T]):
    """Asks nodes, and knows who has not answered yet."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._asked: dict[str, tuple[Node, asyncio.Future[T]]] = {}
        """By the numbers of the questions."""

    async def ask(self, node: Node, number: str, message: OrchestratorMessage, seconds: float) -> T:
        """What a node answers.

        Args:
            number: of the question, which the message has, too.

        Raises:
            Unanswered: it is lost, or silent for so many seconds.
        """
        if not node.alive:
            raise Unanswered(what_became(node.lost))
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._asked[number] = node, answer
        self._control.send(node.id, message)
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            raise Unanswered(f"has not answered within {seconds:.0f} s") from None
        finally:
            del self._asked[number]

    def on_answer(self, node: Node, number: str, answer: T) -> None:
        """A node answers; ignored if it was not asked."""
        asked = self._asked.get(number)
        if asked is not None and asked[0] is node and not asked[1].done():
            asked[1].set_result(answer)

    def on_lost(self, node: Node) -> None:
        """A node will answer no more."""
        for asked, answer in self._asked.values():
            if asked is node and not answer.done():
                answer.set_exception(Unanswered(what_became(node.lost)))
