"""What a node has yet to send to the orchestrator, bounded in bytes."""

from __future__ import annotations

import asyncio

from motley.protocol import MESSAGE_BYTES
from motley.protocol import mesh_pb2 as pb

LIMIT_BYTES = 2 * MESSAGE_BYTES
"""When so much waits to be sent, nothing more may: an orchestrator that is only slow does not let as much pile up."""
MESSAGE_COST = 512
"""Bytes that a message takes beside its content."""


class Outbox(asyncio.Queue[pb.NodeMessage]):
    """A queue that is full when `LIMIT_BYTES` wait in it, however many messages these are."""

    def __init__(self) -> None:
        self._waiting = 0
        super().__init__()

    def full(self) -> bool:
        return self._waiting >= LIMIT_BYTES

    def _put(self, item: pb.NodeMessage) -> None:
        self._waiting += item.ByteSize() + MESSAGE_COST
        super()._put(item)

    def _get(self) -> pb.NodeMessage:
        item = super()._get()
        self._waiting -= item.ByteSize() + MESSAGE_COST
        return item
