"""Orders of jobs on their way to daemons: with the model that the owner's node lends, and over relays where nodes are
apart."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from motley.orchestrator.control import Control
from motley.orchestrator.jobs.job import Job, Mode, Order
from motley.orchestrator.mesh.nodes import Node, NodeTable
from motley.orchestrator.serving.lending import Lending
from motley.orchestrator.serving.relays import Relays
from motley.protocol.mesh_pb2 import JobOrder, JobPeers, Lent, OrchestratorMessage


class Deliveries:
    """Hands orders over: most of them at once, others when there is a lender or a relay."""

    def __init__(self, nodes: NodeTable, control: Control, lending: Lending, relays: Relays) -> None:
        self._nodes, self._control, self._lending, self._relays = nodes, control, lending, relays
        self._under_way: set[asyncio.Task[None]] = set()
        self._latest: dict[tuple[str, int], JobOrder] = {}
        """By job and member, the order that counts of those under way."""

    def send(self, job: Job, orders: Sequence[Order]) -> None:
        """Hand over what a job has decided."""
        borrowing = []
        for name, order in orders:
            node = self._nodes.named(name)
            if node is None:
                continue
            kind, key = order.WhichOneof("body"), (job.id, order.member)
            self._latest.pop(key, None)
            if kind == "start" and name != job.request.owner:
                borrowing.append((node, order))
            elif kind == "peers" and (over := self._apart(job, node, order)):
                self._later(order, self._with_relays(job, node, order, over))
            else:
                self.tell(node, order)
        if borrowing:
            owner = self._nodes.named(job.request.owner)
            for _, order in borrowing:
                self._latest[job.id, order.member] = order
            self._spawn(self._with_loans(job, owner, borrowing))

    def tell(self, node: Node, order: JobOrder) -> None:
        """Send a node an order as it is."""
        self._control.send(node.id, OrchestratorMessage(job=order))

    async def finish(self) -> None:
        """Give up what is under way, as the orchestrator stops: a job that is taken up begins anew where it must."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    def _later(self, order: JobOrder, work: Coroutine[Any, Any, None]) -> None:
        self._latest[order.job, order.member] = order
        self._spawn(work)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def _tell_late(self, job: Job, node: Node, order: JobOrder) -> None:
        """Send an order, unless another one has taken its place, or the job has ended."""
        if self._latest.get((job.id, order.member)) is order:
            del self._latest[job.id, order.member]
            if job.runs and job.epoch == order.epoch and node.alive:
                self.tell(node, order)

    async def _with_loans(self, job: Job, owner: Node | None, orders: Sequence[tuple[Node, JobOrder]]) -> None:
        """Tell workers where to read the model, in case their nodes have none; where nobody lends it, they need one."""
        if owner is not None:
            told = await self._lending.ask(owner, job.request.model, "", max(order.member for _, order in orders))
            if isinstance(told, Lent):
                job.say(f"{owner.name} does not lend the model: {told.failure}")
            else:
                lent, credentials = told
                for _, order in orders:
                    order.start.loan.CopyFrom(lent)
                    order.start.loan.member = order.member
                    order.start.loan.tls.CopyFrom(credentials[order.member])
        for node, order in orders:
            self._tell_late(job, node, order)

    def _apart(self, job: Job, node: Node, order: JobOrder) -> dict[int, str]:
        """Relays that a worker needs, see `Relays.needed`. In a chain, each dials those before it."""
        chained = job.request.mode is Mode.CHAIN
        others = {}
        for peer in order.peers.peers:
            there = self._nodes.named(peer.node)
            if there is not None and peer.address and (peer.member < order.member or not chained):
                others[peer.member] = (there, peer.address)
        return self._relays.needed(node, others)

    async def _with_relays(self, job: Job, node: Node, order: JobOrder, over: dict[int, str]) -> None:
        peers: JobPeers = order.peers
        addresses = {peer.member: peer.address for peer in peers.peers}
        opened = await self._relays.open(over, addresses, f"a worker of job {job.id} on {node.name}")
        for peer in peers.peers:
            peer.address = opened.get(peer.member, peer.address)
        self._tell_late(job, node, order)
