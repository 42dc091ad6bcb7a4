"""Has pairs of nodes measure their links: when they join, and again when they are idle. A node measures one at a time.

One of a pair is asked to listen and, once it says where, the other to connect. They are the ranks of a session of their
own, with certificates of an authority that lives for this one attempt.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from motley.orchestrator.control import Control
from motley.orchestrator.mesh.links import LinkTable, Pair
from motley.orchestrator.mesh.nodes import Node, NodeTable
from motley.orchestrator.sessions.table import SessionTable
from motley.orchestrator.trust.certificates import issue_credentials
from motley.protocol.mesh_pb2 import Credentials, OrchestratorMessage, Probe, Probed

CONNECT_S = 2.5
"""Two nodes have so many seconds to be connected; then they measure for about half a second."""
PATIENCE_S = 8.0
"""A pair that has not said what it found by then is not waited for; its nodes may measure with others."""

_log = logging.getLogger(__name__)


@dataclass
class _Attempt:
    """A pair that measures now."""

    pair: Pair
    secret: bytes
    credentials: list[Credentials]
    until: float


class Probes:
    """Decides who measures with whom next, and takes in what they find."""

    def __init__(
        self, nodes: NodeTable, links: LinkTable, sessions: SessionTable, control: Control, clock: Callable[[], float]
    ) -> None:
        self._nodes = nodes
        self._links = links
        self._sessions = sessions
        self._control = control
        self._clock = clock
        self._attempts: dict[str, _Attempt] = {}
        self._silent: set[Pair] = set()
        """Pairs that never answered: of nodes that cannot measure."""
        self._doubted: set[Pair] = set()
        """Pairs that failed once, which may have been for a busy machine: they are tried again before it counts."""

    def begin(self) -> None:
        """Have the pairs measure whose turn it is, and give up those that say nothing."""
        now = self._clock()
        for number, attempt in list(self._attempts.items()):
            if now > attempt.until:
                del self._attempts[number]
                self._silent.add(attempt.pair)
        busy = {node for attempt in self._attempts.values() for node in attempt.pair}
        free = [node.id for node in self._nodes if node.alive and node.id not in busy]
        if len(free) < 2:
            return
        serving = {worker.node_id for session in self._sessions for worker in session.workers if not worker.gone}
        for pair in self._links.due(free, [node_id for node_id in free if node_id not in serving]):
            if pair not in self._silent and not busy & set(pair):
                busy.update(pair)
                self._begin(pair)

    def on_probed(self, node: Node, probed: Probed) -> None:
        """A node says where it listens, or what it found; ignored if it was not asked."""
        attempt = self._attempts.get(probed.id)
        if attempt is None or node.id not in attempt.pair:
            return
        pair = attempt.pair
        if probed.listening:
            if node.id == pair.listener:
                self._ask(probed.id, attempt, 1, probed.listening)
            return
        if node.id != pair.dialler:
            return  # what both have measured is the same, and why they could not, the dialler knows
        del self._attempts[probed.id]
        if probed.failure and pair not in self._doubted:
            self._doubted.add(pair)
            self.begin()
            return
        self._doubted.discard(pair)
        if probed.failure:
            self._links.failed(pair, probed.failure)
            other = next((one.name for one in self._nodes if one.id == pair.listener), pair.listener)
            _log.warning("node %s cannot reach node %s: %s", node.name, other, probed.failure)
        elif 0 <= probed.latency_s < inf and 0 < probed.bandwidth < inf:
            self._links.measured(pair, probed.latency_s, probed.bandwidth)
        self.begin()

    def on_joined(self, node: Node) -> None:
        """A node is there, perhaps again."""
        self._links.joined(node)

    def on_lost(self, node: Node) -> None:
        """A node is gone, and with it what is known of its links, until it is back."""
        self._attempts = {number: one for number, one in self._attempts.items() if node.id not in one.pair}
        self._silent, self._doubted = (
            {pair for pair in pairs if node.id not in pair} for pairs in (self._silent, self._doubted)
        )
        self._links.left(node)

    def _begin(self, pair: Pair) -> None:
        number = f"probe-{secrets.token_hex(8)}"
        attempt = _Attempt(pair, secrets.token_bytes(32), issue_credentials(number, 2), self._clock() + PATIENCE_S)
        self._attempts[number] = attempt
        self._ask(number, attempt, 0, "")

    def _ask(self, number: str, attempt: _Attempt, rank: int, address: str) -> None:
        node_id = attempt.pair.dialler if rank else attempt.pair.listener
        tls = attempt.credentials[rank]
        probe = Probe(id=number, address=address, secret=attempt.secret, tls=tls, seconds=CONNECT_S)
        self._control.send(node_id, OrchestratorMessage(probe=probe))
