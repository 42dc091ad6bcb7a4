"""What memory the nodes have left: what they offer, less what sessions were promised; and of what is free there now, no
more than workers that run already will leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from motley.orchestrator.experts.registry import Free
from motley.orchestrator.mesh.links import LinkTable
from motley.orchestrator.mesh.nodes import Node, NodeTable
from motley.orchestrator.planning.setup import GpuOffer
from motley.orchestrator.sessions.session import Session
from motley.orchestrator.sessions.table import SessionTable
from motley.orchestrator.workers import Rank, Worker

JITTER_BYTES = 64 << 20
"""What is free on a node may become so much less, by its other programs, while a plan is made that is good still."""


class Memory:
    """The memory of all nodes, as of now."""

    def __init__(
        self, nodes: NodeTable, sessions: SessionTable, links: LinkTable, without: Session | None = None
    ) -> None:
        """
        Args:
            without: count the nodes' own memory that this session's workers have as free.
        """
        self._nodes = nodes
        self._sessions = sessions
        self._links = links
        self._without = without

    def but_for(self, session: Session) -> Memory:
        """What there would be if this session had no workers."""
        return Memory(self._nodes, self._sessions, self._links, session)

    def free(self, node: Node, jitter: int = 0) -> int:
        """Bytes that new workers may use on a node.

        Args:
            jitter: so many bytes more are taken to be free there than the node has told.
        """
        workers = self._without.workers if self._without else ()
        back = sum(each.host_bytes for each in workers if each.node_id == node.id and not each.gone)
        offered = node.capabilities.memory_bytes - self._sessions.reserved(node.id) + back
        if not node.memory_available:
            return max(0, offered)
        return max(0, min(offered, node.memory_available + jitter - self._sessions.promised(node.id) + back))

    def on_gpu(self, node: Node, beside: int = 0) -> GpuOffer:
        """What new ranks may take of a node's first GPU.

        Args:
            beside: bytes that something else is to take there.
        """
        gpu = node.gpus[0]
        ranks = self._without.ranks if self._without else ()
        back = sum(rank.gpu_bytes for rank in ranks if rank.node_id == node.id and not rank.gone)
        return GpuOffer(
            gpu,
            promised=self._sessions.promised_gpu(node.id, gpu) + beside - back,
            budget=node.capabilities.gpu_bytes,
            reserved=self._sessions.reserved_gpu(node.id) + beside - back,
        )

    def beside(self, engine: str, planned: Sequence[Worker] = (), reaching: Sequence[Worker] = ()) -> Free:
        """Bytes free on a node, by the node's id, beside workers that are planned but not reserved yet: none on one
        that is unknown, as it has joined anew, say, or that cannot reach all ranks, or be reached.

        Args:
            reaching: workers that are reserved already, whose ranks it must reach, too.
            engine: that is to compute experts there: where it does so on the node's GPU, there must be as many bytes on
                that. Empty: what is planned needs the node's own memory only.
        """
        taken, taken_on_gpu = Counter[str](), Counter[str]()
        for worker in planned:
            taken[worker.node_id] += worker.host_bytes
            if isinstance(worker, Rank):
                taken_on_gpu[worker.node_id] += worker.gpu_bytes
        nodes = {node.id: node for node in self._nodes}

        homes = {worker.node_id for worker in (*planned, *reaching) if isinstance(worker, Rank)}
        trunk = [nodes[node_id] for node_id in homes if node_id in nodes]

        def free(node_id: str) -> int:
            if node_id not in nodes or any(self._links.are_apart(nodes[node_id], other) for other in trunk):
                return 0
            node = nodes[node_id]
            left = self.free(node) - taken[node_id]
            if node.gpus and any(each.name == engine and each.on_gpu for each in node.capabilities.engines):
                left = min(left, self.on_gpu(node).room - taken_on_gpu[node_id])
            return max(0, left)

        return free

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
