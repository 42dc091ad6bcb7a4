"""Plans sessions anew by itself that nobody asks anything now, when another plan would be much quicker (a node has
joined, say, or links have been measured), or when nodes that a session was asked for with are back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable

from motley.orchestrator.mesh.links import LinkTable
from motley.orchestrator.mesh.nodes import NodeTable
from motley.orchestrator.serving.answering.requests import Requests
from motley.orchestrator.serving.errors import ServingError
from motley.orchestrator.serving.replanning.rearranging import Rearranging
from motley.orchestrator.sessions.facts import State
from motley.orchestrator.sessions.session import Session
from motley.orchestrator.sessions.table import SessionTable

SETTLE_S = 10.0
"""So long must nothing have changed in the mesh, and a session have been ready: somebody may be starting nodes."""

_log = logging.getLogger(__name__)


class Improving:
    """Looks for better plans, once for each session after each change of the mesh."""

    def __init__(
        self,
        nodes: NodeTable,
        links: LinkTable,
        sessions: SessionTable,
        requests: Requests,
        rearranging: Rearranging,
        clock: Callable[[], float],
        gain: float,
    ) -> None:
        """
        Args:
            gain: the part of a token's time that a plan must save; 0: sessions are left as they are.
        """
        self._nodes = nodes
        self._links = links
        self._sessions = sessions
        self._requests = requests
        self._rearranging = rearranging
        self._clock = clock
        self._gain = gain
        self._mesh: Hashable = None
        """What plans depend on, as it was when it was last looked at, ..."""
        self._since = 0.0
        """... and since when it is so."""
        self._looked: dict[str, Hashable] = {}
        """By session: for which mesh a better plan was looked for."""
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Look for a better plan for the next session that may have one now."""
        if not self._gain or (self._task is not None and not self._task.done()):
            return
        now, mesh = self._clock(), self._as_it_is()
        if mesh != self._mesh:
            self._mesh, self._since = mesh, now
        self._looked = {session.id: self._looked.get(session.id) for session in self._sessions}
        if now - self._since < SETTLE_S:
            return
        for session in self._sessions:
            if self._looked[session.id] != mesh and self._may_move(session):
                self._looked[session.id] = mesh
                self._task = asyncio.create_task(self._improve(session))
                return

    async def finish(self) -> None:
        """Wait until no session is planned any more; those that are must have been closed."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def _as_it_is(self) -> Hashable:
        """What plans depend on that does not change all the time, as free memory does."""
        nodes = [node for node in self._nodes if node.alive and not self._nodes.aside_s(node)]
        offers = [
            (node.id, node.capabilities.memory_bytes, node.capabilities.gpu_bytes, *map(node.taken_back, (False, True)))
            for node in nodes
        ]
        return tuple(offers), self._links.all_known(nodes)

    def _may_move(self, session: Session) -> bool:
        """Whether a session can be planned anew, and nobody would notice: its shares are not given by hand, say, unless
        those were lost with a node that is back."""
        request, ready_s = session.request, self._clock() - session.ready_since
        able = session.state is State.READY and session.experts is None and request.recover
        able = able and (not request.shares or bool(self._rearranging.nodes_back(session)))
        return able and ready_s >= SETTLE_S and self._is_idle(session)

    def _is_idle(self, session: Session) -> bool:
        return self._requests.places(session).taken == 0

    async def _improve(self, session: Session) -> None:
        back = self._rearranging.nodes_back(session)
        gain = -1.0 if back else self._gain
        try:
            told = await self._rearranging.rebalance(session, gain, unless=lambda: not self._is_idle(session))
        except ServingError as error:
            _log.info("session %s (%s) stays as it is: %s", session.id, session.name, error)
        except Exception:
            _log.exception("looking for a better plan for session %s (%s)", session.id, session.name)
        else:
            if told.changed:
                what = f"is on {' and '.join(back)} again" if back else "has a plan that is quicker"
                _log.info("session %s (%s) %s", session.id, session.name, what)
