"""Who is in the mesh: a table of registered nodes. Pure: the clock is given, nothing is awaited or sent.

A node is *alive* from its Hello until its stream ends or it stops showing life; then it is *lost* for good. The
same machine that returns is a new node, which takes the place of the lost one of that name.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from motley.protocol.mesh_pb2 import Capabilities, Hello

HEARTBEAT_S = 1.0
"""How often a node shows life."""
SILENCE_S = 5.0
"""A node that has been silent for this long is lost."""


class HelloError(Exception):
    """A Hello that cannot be accepted; the message says why."""


class NameTakenError(Exception):
    """A live node has this name already."""


@dataclass
class Node:
    id: str
    name: str
    address: str
    version: str
    capabilities: Capabilities
    last_heartbeat: float
    memory_available: int = 0
    """Bytes free on the machine by its last heartbeat; 0: not told yet."""
    lost: str = ""
    """Why the node is lost; empty while it is alive."""

    @property
    def alive(self) -> bool:
        return not self.lost


class NodeTable:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._nodes: dict[str, Node] = {}

    def __iter__(self) -> Iterator[Node]:
        """All nodes, lost ones too, in the order they joined."""
        return iter(self._nodes.values())

    def join(self, hello: Hello) -> Node:
        """Register a node.

        Raises:
            HelloError: a field is missing or makes no sense.
            NameTakenError: a live node has the name.
        """
        bandwidth = hello.capabilities.memory_bandwidth
        if not hello.name or not hello.name.isprintable() or len(hello.name) > 64:
            raise HelloError(f"a node's name has 1 to 64 printable characters, not {hello.name!r}; use --name")
        if not hello.address:
            raise HelloError("the Hello has no address under which other nodes reach this one")
        if not (math.isfinite(bandwidth) and bandwidth > 0):
            raise HelloError(f"the measured memory bandwidth must be above 0 bytes/s, not {bandwidth}")
        namesake = next((node for node in self if node.name == hello.name), None)
        if namesake is not None and namesake.alive:
            raise NameTakenError(
                f"a node named {hello.name!r} is in the mesh already (at {namesake.address}); choose another name"
                f" with --name. If it is this machine coming back, its name is free in at most {SILENCE_S:.0f} s"
            )
        if namesake is not None:
            del self._nodes[namesake.id]
        node = Node(
            id=secrets.token_hex(4),
            name=hello.name,
            address=hello.address,
            version=hello.version,
            capabilities=hello.capabilities,
            last_heartbeat=self._clock(),
        )
        self._nodes[node.id] = node
        return node

    def heartbeat(self, node_id: str, memory_available: int) -> None:
        node = self._nodes[node_id]
        node.last_heartbeat = self._clock()
        node.memory_available = memory_available

    def overdue(self) -> list[Node]:
        """Live nodes that have been silent for `SILENCE_S`."""
        latest = self._clock() - SILENCE_S
        return [node for node in self if node.alive and node.last_heartbeat < latest]

    def excuse(self, seconds: float) -> None:
        """This process itself stood still (a laptop asleep, say): that is not the nodes' silence."""
        for node in self:
            node.last_heartbeat += seconds

    def lose(self, node_id: str, reason: str) -> None:
        self._nodes[node_id].lost = reason

    def silence_s(self, node: Node) -> float:
        """Seconds since the node's last heartbeat."""
        return max(0.0, self._clock() - node.last_heartbeat)
