"""Sessions that there were before a restart, and that cannot be taken up, are begun anew once their nodes are back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from motley.orchestrator.mesh.nodes import NodeTable
from motley.orchestrator.serving.carrier import Carrier
from motley.orchestrator.serving.errors import ServingError
from motley.orchestrator.serving.kept_sessions import RETURN_S, KeptSessions
from motley.orchestrator.serving.lifecycle import Lifecycle
from motley.orchestrator.sessions.files import Wanted

AGAIN_S = 5.0
"""A session that could not be begun is tried again after so long, ..."""
GIVE_UP_S = 600.0
"""... until so much time has passed since the restart; then at the next one."""

UNWANTED = {"name_in_use", "session_closed"}
"""By these refusals somebody has begun another, or does not want it any more."""

_log = logging.getLogger(__name__)


class Reopening:
    """Begins sessions anew, as clients would."""

    def __init__(
        self,
        nodes: NodeTable,
        lifecycle: Lifecycle,
        kept: KeptSessions,
        carrier: Carrier,
        clock: Callable[[], float],
    ) -> None:
        self._nodes = nodes
        self._lifecycle = lifecycle
        self._kept = kept
        self._carrier = carrier
        self._clock = clock

    async def begin_anew(self, wanted: Mapping[str, Wanted]) -> None:
        """Begin sessions, by the ids that they had."""
        await asyncio.gather(*(self._begin(*each) for each in wanted.items()))

    async def _begin(self, session_id: str, wanted: Wanted) -> None:
        began = self._clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETURN_S):
                await self._carrier.until(lambda: self._are_back(wanted))
        name = wanted.request.name or wanted.request.model
        while True:
            try:
                await self._lifecycle.create(wanted.request, wanted.loads)
            except ServingError as error:
                if self._carrier.stopping:
                    return
                if error.failure.code not in UNWANTED:
                    if self._clock() - began < GIVE_UP_S:
                        await asyncio.sleep(AGAIN_S)
                        continue
                    _log.warning("session %s (%s) is not begun anew before the next start: %s", session_id, name, error)
                    return
                _log.warning("session %s (%s) is not begun anew: %s", session_id, name, error)
            self._kept.forget(session_id)
            return

    def _are_back(self, wanted: Wanted) -> bool:
        return wanted.nodes <= {node.name for node in self._nodes if node.alive}
