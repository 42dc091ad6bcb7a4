"""How much strangers may hold of an orchestrator: who has no token or key yet, or only sends what makes no sense."""

from __future__ import annotations

import sys
from dataclasses import dataclass

NODE_CONNECTIONS = 256
"""Connections to the port where nodes join; each node has one, and a second one while it joins."""
CLIENT_CONNECTIONS = 512
"""Connections to the API."""
SHAKE_HANDS_S = 10
"""A connection to the port where nodes join has so many seconds for TLS, and as many for showing a join token."""
HELLO_BYTES = 1 << 16
"""A Hello is no longer than this; one of a machine with eight GPUs has about two thousand bytes."""


@dataclass(frozen=True)
class Limits:
    """Connections that may be open at a time.

    Attributes:
        nodes: to the port where nodes join.
        clients: to the API.
        of_one_client: to the API, from one address.
    """

    nodes: int
    clients: int
    of_one_client: int


def limits() -> Limits:
    """What leaves a quarter of the files that this process may open for its own."""
    files = _files()
    clients = min(CLIENT_CONNECTIONS, files // 2)
    return Limits(nodes=min(NODE_CONNECTIONS, files // 4), clients=clients, of_one_client=clients * 3 // 4)


def _files() -> int:
    """How many files this process may have open; on Windows, sockets do not count."""
    if sys.platform != "win32":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            return soft
    return sys.maxsize
