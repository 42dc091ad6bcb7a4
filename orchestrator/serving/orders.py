"""Orders to nodes, which answer when they are carried out: to take a lease, or to let ranks have other memory."""

from __future__ import annotations

import secrets

from motley.orchestrator.control import Control
from motley.orchestrator.mesh.nodes import Node, NodeTable
from motley.orchestrator.serving.errors import refusal, unknown_node
from motley.orchestrator.serving.node_questions import NodeQuestions, Unanswered
from motley.protocol.mesh_pb2 import BudgetOrder, Done, LeaseOrder, OrchestratorMessage

ANSWER_S = 15.0
"""A node answers an order this soon: it waits for a lock at most."""


class Orders:
    """Sends orders, and knows which are not answered yet."""

    def __init__(self, nodes: NodeTable, control: Control) -> None:
        self._nodes = nodes
        self._questions = NodeQuestions[Done](control)
        self.on_lost = self._questions.on_lost

    async def lease(self, name: str, order: LeaseOrder) -> Node:
        """Have a node take or end a lease of its machine; the node.

        Raises:
            ServingError: there is no such node, it refuses, or it does not answer.
        """
        order.id = secrets.token_hex(8)
        return await self._send(name, order.id, OrchestratorMessage(lease_order=order))

    async def budget(self, name: str, order: BudgetOrder) -> Node:
        """Have a node let ranks have so much memory from now on; errors as `lease`."""
        order.id = secrets.token_hex(8)
        return await self._send(name, order.id, OrchestratorMessage(budget_order=order))

    def on_done(self, node: Node, done: Done) -> None:
        """A node answers; ignored if it was not asked."""
        self._questions.on_answer(node, done.id, done)

    async def _send(self, name: str, number: str, message: OrchestratorMessage) -> Node:
        node = self._nodes.named(name)
        if node is None:
            raise unknown_node(name, self._nodes, "node")
        try:
            done = await self._questions.ask(node, number, message, ANSWER_S)
        except Unanswered as unanswered:
            raise refusal("timed_out" if node.alive else "node_lost", f"node {name!r} {unanswered}", "node") from None
        if done.failure:
            raise refusal("order_refused", done.failure, "node")
        return node
