"""What a node has yet to send to the orchestrator, bounded in bytes."""

from __future__ import annotations

import asyncio
from collections import deque

from motley.protocol import MESSAGE_BYTES
from motley.protocol import mesh_pb2 as pb

LIMIT_BYTES = 2 * MESSAGE_BYTES
"""When so much waits to be sent, nothing more may: an orchestrator that is only slow does not let as much pile up."""
MESSAGE_COST = 512
"""Bytes that a message takes beside its content."""
AT_ONCE_BYTES = 1 << 16
"""Messages that go as one have no more bytes than this together."""


class Outbox(asyncio.Queue[pb.NodeMessage]):
    """A queue that is full when `LIMIT_BYTES` wait in it, however many messages these are."""

    def __init__(self) -> None:
        self._waiting = 0
        super().__init__()

    def _init(self, maxsize: int) -> None:
        self._queue = deque[pb.NodeMessage]()

    def full(self) -> bool:
        return self._waiting >= LIMIT_BYTES

    def _put(self, item: pb.NodeMessage) -> None:
        self._waiting += item.ByteSize() + MESSAGE_COST
        super()._put(item)

    def _get(self) -> pb.NodeMessage:
        item = super()._get()
        self._waiting -= item.ByteSize() + MESSAGE_COST
        return item

    def with_more(self, first: pb.NodeMessage) -> pb.NodeMessage:
        """A message that was taken, with those that wait behind it, as one."""
        messages, size = [first], first.ByteSize()
        while self._queue and (size := size + self._queue[0].ByteSize()) <= AT_ONCE_BYTES:
            messages.append(self.get_nowait())
        return pb.NodeMessage(several=pb.Several(messages=messages)) if len(messages) > 1 else first
