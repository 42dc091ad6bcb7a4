"""What tests of several ranks have in common."""

from __future__ import annotations

import socket
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import numpy as np
import numpy.typing as npt

from motley.transport import Communicator

Run = Callable[..., list[Any]]
Array = npt.NDArray[Any]
LIMIT_S = 30.0
"""How long a test waits for what has to come, before it fails."""


def until(condition: Callable[[], Any]) -> None:
    """Wait for what another rank does."""
    deadline = monotonic() + LIMIT_S
    while not condition():
        assert monotonic() < deadline
        sleep(1e-3)


def values(rank: int, elements: int, dtype: npt.DTypeLike = np.float32) -> Array:
    """Numbers of very different size, so that another order of summing gives other bits."""
    random = np.random.default_rng([rank, elements])
    return (random.standard_normal(elements) * 10.0 ** random.integers(-4, 5, elements)).astype(dtype)


def shrink_buffers(communicator: Communicator) -> None:
    """Let the system take little at a time from this rank, and bring little."""
    for link in communicator._links.values():
        link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        # Less than a segment of the loopback device would make TCP crawl.
        link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
