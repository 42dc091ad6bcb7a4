"""Sessions make way where a machine's owner takes a device back, or lets ranks have less memory; and grow again after.

What a node says of that counts until it says otherwise, so it is looked at again and again rather than once: whatever a
session was doing when it was said, it makes way as soon as it can. One that cannot (without recovery) is left to the
node, which ends the ranks that have had their time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from motley.orchestrator.experts.hosts import Holder
from motley.orchestrator.mesh.nodes import Node, NodeTable
from motley.orchestrator.planning.cutting.shares import PlanError
from motley.orchestrator.serving.carrier import Carrier
from motley.orchestrator.serving.errors import ServingError
from motley.orchestrator.serving.plans.forecasts import Forecasts
from motley.orchestrator.serving.replanning.recovery import Recovery
from motley.orchestrator.sessions.facts import State
from motley.orchestrator.sessions.session import Session
from motley.orchestrator.sessions.table import SessionTable
from motley.orchestrator.workers import Rank, Worker
from motley.protocol.wording import human_bytes

GROW_S = 10.0
"""So long a session tries to be where it was again: what a node tells of its free memory is some seconds old."""
AGAIN_S = 1.0
"""How often it tries."""

_log = logging.getLogger(__name__)


class MakingWay:
    """Has sessions do without what they may not have any more, and use it again once they may."""

    def __init__(
        self,
        nodes: NodeTable,
        sessions: SessionTable,
        forecasts: Forecasts,
        recovery: Recovery,
        carrier: Carrier,
        clock: Callable[[], float],
    ) -> None:
        self._nodes = nodes
        self._sessions = sessions
        self._forecasts = forecasts
        self._recovery = recovery
        self._carrier = carrier
        self._clock = clock
        self._growing: dict[str, asyncio.Task[None]] = {}
        """By session."""

    def look_after(self, session: Session) -> None:
        """Have a session make way if it must, or grow if it may."""
        if not session.has_plan or self._carrier.stopping:
            return
        for node in [node for node in self._nodes if node.alive]:
            there = [worker for worker in session.workers if worker.node_id == node.id and not worker.gone]
            if there and self._make_way(session, node, there):
                return
        if session.state is State.READY and session.id not in self._growing and self._given_back(session):
            task = self._growing[session.id] = asyncio.create_task(self._grow(session))
            task.add_done_callback(lambda done: self._grown(session, done))

    async def finish(self) -> None:
        """Wait until no session is planned any more; those that are must have been closed."""
        await asyncio.gather(*self._growing.values(), return_exceptions=True)

    def _make_way(self, session: Session, node: Node, there: list[Worker]) -> bool:
        """Have a session do without what it has on a node, if it may not have it any more and can do without.

        Args:
            there: its workers on the node.
        """
        taken = [(worker, why) for worker in there if (why := self._taken_back(session, node, worker))]
        if taken and session.state is State.READY and not any(isinstance(worker, Rank) for worker in there):
            commands = session.do_without(node.id, f"node {node.name!r} {taken[0][1]}", self._clock())
            self._carrier.carry_out(session, commands)
            return True
        if not taken and not (short := self._short(node)):
            return False
        if not session.request.recover or (session.experts is not None and not taken):
            return False
        why = taken[0][1] if taken else short
        if taken:
            session.without.add(node.name)
        _log.info("session %s (%s) makes way: node %s %s", session.id, session.name, node.name, why)
        avoid = {node.id} if taken else set[str]()
        self._carrier.carry_out(session, session.replan(f"node {node.name!r} {why}", avoid, self._clock()))
        self._recovery.look_after(session)
        return True

    def _taken_back(self, session: Session, node: Node, worker: Worker) -> str:
        """Why a worker may not compute any more where it does; empty: it may."""
        places = {False}
        if isinstance(worker, Rank):
            places = {worker.setup.on_gpu, *([worker.draft.setup.on_gpu] if worker.draft else [])}
        elif isinstance(worker, Holder):
            engine = session.request.expert_engine
            places = {any(each.name == engine and each.on_gpu for each in node.capabilities.engines)}
        return next((why for on_gpu in places if (why := node.taken_back(on_gpu))), "")

    def _short(self, node: Node) -> str:
        """Why sessions must take less memory of a node, if no other makes way there already; empty: they need not."""
        others = (other for other in self._sessions if other.state is State.RECOVERING)
        if any(worker.node_id == node.id and not worker.gone for other in others for worker in other.workers):
            return ""
        budget = node.capabilities
        for reserved, offered, of_what in (
            (self._sessions.reserved(node.id), budget.memory_bytes, "memory"),
            (self._sessions.reserved_gpu(node.id), budget.gpu_bytes or None, "its GPU's memory"),
        ):
            if offered is not None and reserved > offered:
                return (
                    f"lets ranks have {human_bytes(offered)} of {of_what}, of which {human_bytes(reserved)} are taken"
                )
        return ""

    def _given_back(self, session: Session) -> set[str]:
        """Names of the nodes that a session has done without, and of which nothing is somebody else's now."""
        there = [node for node in self._nodes if node.alive and node.name in session.without]
        return {node.name for node in there if not any(map(node.taken_back, (False, True)))}

    def _grown(self, session: Session, task: asyncio.Task[None]) -> None:
        del self._growing[session.id]
        if not task.cancelled() and (error := task.exception()):
            session.without.clear()  # so that it does not fail again and again
            _log.error("planning session %s (%s) with more nodes", session.id, session.name, exc_info=error)

    async def _grow(self, session: Session) -> None:
        """Plan a session anew if it would be on nodes again that it has done without; look for a while."""
        if session.experts is not None:
            session.without -= self._given_back(session)  # lost hosts begin again by themselves
            return
        until = self._clock() + GROW_S
        while back := self._given_back(session):
            wanted, hindrance = set[str](), f"it is as quick without {' and '.join(sorted(back))}"
            try:
                wanted = back & await self._forecasts.members_anew(session)
            except (PlanError, ServingError) as error:
                hindrance = str(error)
            if session.state is not State.READY or self._carrier.stopping:
                return
            if wanted:
                session.without -= back
                why = f"there is room again on {' and '.join(sorted(wanted))}"
                self._carrier.carry_out(session, session.replan(why, (), self._clock()))
                self._recovery.look_after(session)
                return
            if self._clock() >= until:
                session.without -= back
                _log.info("session %s (%s) stays as it is: %s", session.id, session.name, hindrance)
                return
            await asyncio.sleep(AGAIN_S)
