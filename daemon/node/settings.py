"""What a node brings to the mesh."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from motley.daemon.weights.cache import ShareCache
from motley.protocol import mesh_pb2 as pb


@dataclass(frozen=True)
class NodeSettings:
    """What a node brings to the mesh.

    Attributes:
        address: address under which other nodes reach this one's rank workers; a loopback one only where no other
            machine takes part, or none is known.
        threads: compute threads of each rank.
        ports: the first and the last of those that rank workers listen on; (0, 0): any that are free.
    """

    name: str
    address: str
    capabilities: pb.Capabilities
    models: Path | None
    cache: ShareCache
    threads: int
    ports: tuple[int, int] = (0, 0)
