"""What memory the nodes have left: what they offer, less what sessions were promised; and of what is free there now, no
more than workers that run already will leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from motley.orchestrator.experts.registry import Free
from motley.orchestrator.nodes import Node, NodeTable
from motley.orchestrator.session_table import SessionTable
from motley.orchestrator.workers import Worker
from motley.protocol.mesh_pb2 import Gpu

JITTER_BYTES = 64 << 20
"""What is free on a node may become so much less, by its other programs, while a plan is made that is good still."""


class Memory:
    """The memory of all nodes, as of now."""

    def __init__(self, nodes: NodeTable, sessions: SessionTable) -> None:
        self._nodes = nodes
        self._sessions = sessions

    def free(self, node: Node, jitter: int = 0) -> int:
        """Bytes that new workers may use on a node.

        Args:
            jitter: so many bytes more are taken to be free there than the node has told.
        """
        offered = node.capabilities.memory_bytes - self._sessions.reserved(node.id)
        if not node.memory_available:
            return max(0, offered)
        return max(0, min(offered, node.memory_available + jitter - self._sessions.promised(node.id)))

    def promised_gpu(self, node: Node, gpu: Gpu) -> int:
        """Bytes of a node's GPU that ranks were promised and have not taken yet."""
        return self._sessions.promised_gpu(node.id, gpu)

    def beside(self, planned: Sequence[Worker] = ()) -> Free:
        """Bytes free on a node, by its id, beside workers that are planned but not reserved yet: none on one that is
        unknown, as it has joined anew, say."""
        taken = Counter[str]()
        for worker in planned:
            taken[worker.node_id] += worker.host_bytes
        nodes = {node.id: node for node in self._nodes}
        return lambda node_id: max(0, self.free(nodes[node_id]) - taken[node_id]) if node_id in nodes else 0

    def has(self, claims: Iterable[tuple[str, int]]) -> bool:
        """Whether nodes still have memory that was planned with: others may have been promised it meanwhile. If they
        have, the caller must reserve it before it awaits anything.

        Args:
            claims: ids of nodes, and bytes there.
        """
        claimed = Counter[str]()
        for node_id, more in claims:
            claimed[node_id] += more
        nodes = {node.id: node for node in self._nodes}
        return all(
            more <= (self.free(nodes[node_id], JITTER_BYTES) if node_id in nodes else 0)
            for node_id, more in claimed.items()
        )
