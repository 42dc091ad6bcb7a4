"""How much strangers may hold of an orchestrator: who has no token or key yet, or only sends what makes no sense."""

from __future__ import annotations

import sys
from dataclasses import dataclass

NODE_CONNECTIONS = 256
"""Connections to the port where nodes join; each node has one, and a second one while it joins."""
CLIENT_CONNECTIONS = 1024
"""Connections to the API. A quarter of them is left when one address has all that it may have."""
FILES = 1 << 16
"""That this process asks to be allowed to open, where the system lets it have more than it gives unasked."""
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
    """How many files this process may have open, after it has asked for as many as it may have; on Windows, sockets do
    not count."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
            if soft < most:
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            return max(soft, most)
    return sys.maxsize
