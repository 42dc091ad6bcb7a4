"""What ranks may have of this machine's memory, and of its GPU's, which its owner may change while they run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil

from motley.daemon.machine.memory import available_memory, resident_bytes
from motley.protocol import mesh_pb2 as pb


def set_budget(order: pb.BudgetOrder, capabilities: pb.Capabilities, workers: Iterable[int]) -> pb.Budget:
    """Change what a node offers, as somebody wants it; what it offers then.

    Args:
        capabilities: of the node; changed.
        workers: numbers of the processes of its ranks, whose memory may be theirs again.
    """
    if order.HasField("memory_bytes"):
        there = available_memory() + sum(map(_resident, workers))
        capabilities.memory_bytes = min(order.memory_bytes or there, there)
    if order.HasField("gpu_bytes"):
        capabilities.gpu_bytes = order.gpu_bytes
    return pb.Budget(memory_bytes=capabilities.memory_bytes, gpu_bytes=capabilities.gpu_bytes)


def _resident(pid: int) -> int:
    with contextlib.suppress(psutil.Error):
        return resident_bytes(pid).now
    return 0
