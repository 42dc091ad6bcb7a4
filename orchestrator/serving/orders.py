"""Orders to nodes, which answer when they are carried out: to take a lease, or to let ranks have other memory."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from motley.orchestrator.control import Control
from motley.orchestrator.mesh.nodes import Node, NodeTable, what_became
from motley.orchestrator.serving.errors import refusal
from motley.protocol.mesh_pb2 import BudgetOrder, Done, LeaseOrder, OrchestratorMessage

ANSWER_S = 15.0
"""A node answers an order this soon: it waits for a lock at most."""


@dataclass
class _Order:
    node_id: str
    done: asyncio.Future[str]
    """Why it was not carried out; empty: it was."""


class Orders:
    """Sends orders, and knows which are not answered yet."""

    def __init__(self, nodes: NodeTable, control: Control) -> None:
        self._nodes = nodes
        self._control = control
        self._orders: dict[str, _Order] = {}

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
        order = self._orders.get(done.id)
        if order is not None and order.node_id == node.id and not order.done.done():
            order.done.set_result(done.failure)

    def on_lost(self, node: Node) -> None:
        """A node will answer no more."""
        for order in self._orders.values():
            if order.node_id == node.id and not order.done.done():
                order.done.set_result(f"node {node.name!r} {what_became(node.lost)}")

    async def _send(self, name: str, number: str, message: OrchestratorMessage) -> Node:
        node = self._nodes.named(name)
        if node is None:
            there = ", ".join(sorted(node.name for node in self._nodes if node.alive)) or "none"
            raise refusal("unknown_node", f"no live node is named {name!r}; live nodes: {there}", "node")
        order = self._orders[number] = _Order(node.id, asyncio.get_running_loop().create_future())
        try:
            self._control.send(node.id, message)
            async with asyncio.timeout(ANSWER_S):
                failure = await order.done
        except TimeoutError:
            raise refusal("timed_out", f"node {name!r} has not answered for {ANSWER_S:.0f} s") from None
        finally:
            del self._orders[number]
        if failure:
            raise refusal("lease_refused", failure, "node")
        return node
