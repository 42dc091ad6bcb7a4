"""What a node brings to the mesh, as it was started: its name, address, abilities, folders, threads and ports."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
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
        process: by which the orchestrator knows this daemon from another of the same machine.
        ports: the first and the last of those that rank workers listen on; (0, 0): any that are free.
    """

    name: str
    address: str
    capabilities: pb.Capabilities
    models: Path | None
    cache: ShareCache
    threads: int
    ports: tuple[int, int] = (0, 0)
    process: str = field(default_factory=lambda: secrets.token_hex(8))
