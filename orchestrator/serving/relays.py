"""Ranks, and workers of a training, whose nodes cannot reach each other meet by a third node, which forwards bytes.

A rank dials those before it. Where its node cannot, it is told the address of a relay in place of the other's; the
relay is opened when all ranks listen, as it leads to a port.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping

from motley.orchestrator.control import Control
from motley.orchestrator.mesh.links import LinkTable
from motley.orchestrator.mesh.nodes import Node, NodeTable
from motley.orchestrator.serving.node_questions import NodeQuestions, Unanswered
from motley.orchestrator.sessions.session import Command, Session
from motley.orchestrator.workers import Rank
from motley.protocol.address import parse_address
from motley.protocol.mesh_pb2 import OrchestratorMessage, RankCommand, Relay, Relayed

OPEN_S = 10.0
"""A node opens a relay so soon, or is done without."""

_log = logging.getLogger(__name__)


class Relays:
    """Opens relays, and sends ranks on their way."""

    def __init__(self, nodes: NodeTable, links: LinkTable, control: Control) -> None:
        self._nodes = nodes
        self._links = links
        self._control = control
        self._questions = NodeQuestions[Relayed](control)
        self.on_lost = self._questions.on_lost
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, session: Session, command: Command) -> bool:
        """Send a rank its peers once there are the relays that it needs; False: it needs none."""
        node_id, told = command
        if not told.HasField("peers") or not (over := self._needed(session, told)):
            return False
        task = asyncio.create_task(self._send(node_id, told, over))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def on_relayed(self, node: Node, relayed: Relayed) -> None:
        """A node says where its relay listens; ignored if it was not asked."""
        self._questions.on_answer(node, relayed.id, relayed)

    async def finish(self) -> None:
        """Wait until no relay is opened any more."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _needed(self, session: Session, told: RankCommand) -> dict[int, str]:
        """Ids of nodes that are to be relays, by the index of a rank that this one cannot dial."""
        nodes = {node.id: node for node in self._nodes}
        dialler = session.worker(told.rank)
        if not isinstance(dialler, Rank) or dialler.node_id not in nodes:
            return {}
        others = {
            rank.index: (nodes[rank.node_id], told.peers.addresses[rank.index])
            for rank in session.ranks[: dialler.index]
            if rank.node_id in nodes
        }
        return self.needed(nodes[dialler.node_id], others)

    def needed(self, dialler: Node, others: Mapping[int, tuple[Node, str]]) -> dict[int, str]:
        """Ids of nodes that are to be relays, by the number of whom a node cannot dial.

        Args:
            others: by number: the node of whom it is to dial, and the address.
        """
        over = {}
        for number, (node, address) in others.items():
            if self._links.fails(dialler, node):
                if parse_address(address)[0] != node.address:  # a relay leads to ranks, not anywhere
                    _log.warning("what %s is to dial on %s listens elsewhere: %s", dialler.name, node.name, address)
                    continue
                relay = self._links.relay(dialler, node)
                if relay is not None:
                    over[number] = relay
        return over

    async def open(self, over: Mapping[int, str], addresses: Mapping[int, str], who: str) -> dict[int, str]:
        """Open relays; by number, the address at which one leads to whom it is for. One that cannot be opened is left
        out: who dials will say that he does not reach the other.

        Args:
            over: as `needed` tells.
            addresses: by number, of whom the relays are to lead to.
            who: dials, for the log.
        """
        opened = await asyncio.gather(*(self._open(relay, addresses[number]) for number, relay in over.items()))
        for relayed in opened:
            if relayed.failure:
                _log.warning("%s has no relay: %s", who, relayed.failure)
        return {number: told.listening for number, told in zip(over, opened, strict=True) if not told.failure}

    async def _send(self, node_id: str, told: RankCommand, over: dict[int, str]) -> None:
        who = f"rank {told.rank} of session {told.session}"
        opened = await self.open(over, dict(enumerate(told.peers.addresses)), who)
        for rank, address in opened.items():
            told.peers.addresses[rank] = address
        self._control.send(node_id, OrchestratorMessage(rank=told))

    async def _open(self, node_id: str, target: str) -> Relayed:
        number = secrets.token_hex(8)
        message = OrchestratorMessage(relay=Relay(id=number, target=target))
        node = next((node for node in self._nodes if node.id == node_id), None)
        if node is None:
            return Relayed(failure="the node that should be one has left")
        try:
            return await self._questions.ask(node, number, message, OPEN_S)
        except Unanswered as unanswered:
            return Relayed(failure=f"the node that should be one {unanswered}")
