"""Plans sessions anew that run well, because somebody wants it: a node is to leave, or another plan would be quicker.

Their answers go on, as after a loss: they wait for a moment, and go on from the tokens that they have.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from motley.orchestrator.control import Control
from motley.orchestrator.mesh.links import LinkTable
from motley.orchestrator.mesh.nodes import Node, NodeTable
from motley.orchestrator.planning.cutting.shares import PlanError
from motley.orchestrator.serving.carrier import Carrier
from motley.orchestrator.serving.errors import refusal, unknown_node
from motley.orchestrator.serving.plans.forecasts import Forecasts, forecast_of
from motley.orchestrator.serving.plans.participants import taken_back
from motley.orchestrator.serving.replanning.recovery import Recovery
from motley.orchestrator.sessions.facts import State
from motley.orchestrator.sessions.missed_nodes import missed_nodes
from motley.orchestrator.sessions.session import Session
from motley.orchestrator.sessions.table import SessionTable
from motley.protocol.mesh_pb2 import Empty, OrchestratorMessage

GAIN = 0.05
"""A plan that saves a smaller part of a token's time is not worth the interruption."""
LEAVE_S = 10.0
"""A node that nothing is left to do for leaves so soon."""
MOVE_S = 600.0
"""A session has so long to be ready by its new plan: ranks may have to read much."""


@dataclass(frozen=True)
class Rebalanced:
    """What became of a wish for a better plan.

    Attributes:
        changed: whether the session was planned anew.
        before_ms, after_ms: forecast of a token, by the plan that there was and the best; None: not known.
    """

    changed: bool
    before_ms: float | None
    after_ms: float | None


class Rearranging:
    """Carries out such wishes."""

    def __init__(
        self,
        nodes: NodeTable,
        links: LinkTable,
        sessions: SessionTable,
        forecasts: Forecasts,
        recovery: Recovery,
        carrier: Carrier,
        control: Control,
        clock: Callable[[], float],
    ) -> None:
        self._nodes = nodes
        self._links = links
        self._sessions = sessions
        self._forecasts = forecasts
        self._recovery = recovery
        self._carrier = carrier
        self._control = control
        self._clock = clock

    async def leave(self, name: str) -> list[str]:
        """Have a node leave the mesh: its sessions go on without it first, while they answer; their names.

        Raises:
            ServingError: there is no such node, a session is not ready, or cannot do without the node, or the node does
                not leave.
        """
        node = self._nodes.named(name)
        if node is None:
            raise unknown_node(name, self._nodes, "node")
        concerned = [session for session in self._sessions if session.alive and _is_on(session, node)]
        for session in concerned:
            _check_movable(session)
        for session in concerned:
            await self._replan(session, f"node {name!r} is to leave", {node.id})
            if session.state is not State.READY or _is_on(session, node):
                why = "needs this node: nothing fits without it" if session.alive else "has failed"
                message = f"session {session.id} ({session.name}) {why}. Close it first, or add a node"
                raise refusal("cannot_move", message, "node")
        self._control.send(node.id, OrchestratorMessage(leave=Empty()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._carrier.until(lambda: not node.alive)
        if node.alive:
            raise refusal("timed_out", f"node {name!r} does not leave: it has not answered for {LEAVE_S:.0f} s")
        return [session.name for session in concerned]

    async def rebalance(
        self, session: Session, gain: float = GAIN, *, unless: Callable[[], bool] = lambda: False
    ) -> Rebalanced:
        """Plan a session anew, if that saves a part of a token's time.

        Args:
            gain: that part; below 0: whatever it saves, also if that is not known.
            unless: leave it as it is if this is so once a better plan is found.

        Raises:
            ServingError: the session is not ready, has experts on hosts, or must not be interrupted.
        """
        _check_movable(session)
        assert session.known is not None
        own = forecast_of(session.ranks, session.known.profiles, session.request, self._nodes, self._links)
        before = own.token_s if own else None
        try:
            after = (await self._forecasts.anew(session)).forecast.token_s
        except PlanError as error:
            raise refusal("insufficient_memory", str(error)) from error
        better = gain < 0 or (before is not None and after < (1 - gain) * before)
        if better := better and not unless():
            self._carrier.check_running()
            back = self.nodes_back(session)
            why = f"{' and '.join(back)} can take part again, as was asked for" if back else "another plan is quicker"
            await self._replan(session, why, set())
        return Rebalanced(better, None if before is None else 1e3 * before, 1e3 * after)

    def nodes_back(self, session: Session) -> list[str]:
        """Names of the nodes that a session was asked for with and goes on without, where all of these are there again,
        are nobody else's, and do not come and go; empty: they are not all, or it goes on without none."""
        missed = missed_nodes(session)
        there = {node.name for node in self._nodes if node.alive and not self._nodes.aside_s(node)}
        there -= {node.name for node in self._nodes if node.alive and taken_back(session.request, node)}
        return missed if there.issuperset(missed) else []

    async def _replan(self, session: Session, why: str, avoid: set[str]) -> None:
        """Plan a session anew and wait until it is ready, or has failed."""
        if session.state is not State.READY:
            return
        self._carrier.carry_out(session, session.replan(why, avoid, self._clock()))
        self._recovery.look_after(session)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOVE_S):
                await self._carrier.until(lambda: session.state in (State.READY, State.PAUSED) or not session.alive)


def _check_movable(session: Session) -> None:
    """
    Raises:
        ServingError: the session cannot be planned anew while it answers.
    """
    if session.state is not State.READY:
        why = f"is {session.state}"
    elif session.experts:
        why = "has experts on hosts, which move by themselves"
    elif not session.request.recover:
        why = "was started without recovery"
    else:
        return
    message = f"session {session.id} ({session.name}) {why}: it cannot be planned anew now. Close it, or try later"
    raise refusal("cannot_move", message)


def _is_on(session: Session, node: Node) -> bool:
    return any(worker.node_id == node.id and not worker.gone for worker in session.workers)
