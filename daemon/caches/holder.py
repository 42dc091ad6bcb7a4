"""The cache holder: a worker that keeps cache blocks for one rank of a session, and attends to them for it.

Its one thread does what the rank asks, message after message. It loads no part of the model: the rank tells what its
layers are. When the rank's link ends, so does the holder: nobody could ask for what it keeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from motley.daemon.caches.held_blocks import HeldBlocks
from motley.daemon.caches.wire import (
    Buffer,
    CacheWireError,
    Head,
    Kind,
    block_bytes,
    read,
    read_layers,
    read_questions,
)
from motley.daemon.pipe.daemon import Commands
from motley.plugins.engine import CACHE_FORMATS
from motley.plugins.native.matmul import Pool
from motley.protocol.wording import human_bytes
from motley.transport import Lost, Message, Messenger, PeerLost
from motley.transport.links.link import Waitable
from motley.transport.messages import Event

LOOK_S = 0.5
"""Seconds between two looks for what the daemon wants, while the rank is silent."""


class CacheHolder:
    """A cache holder at work."""

    def __init__(
        self,
        messenger: Messenger,
        rank: int,
        *,
        limit: int,
        pool: Pool,
        daemon: Waitable,
        commands: Commands,
        ready: Callable[[int], None],
    ) -> None:
        """
        Args:
            messenger: accepts the rank.
            rank: whose blocks are kept here.
            limit: bytes that they may take.
            pool: computes.
            daemon: can be read when there are `commands`.
            ready: told of the bytes that blocks take, once there is room for them.
        """
        self._messenger = messenger
        self._rank = rank
        self._limit = limit
        self._pool = pool
        self._daemon = daemon
        self._commands = commands
        self._ready = ready
        self._blocks: HeldBlocks | None = None
        self._events = deque[Event]()
        """What has happened and was not looked at yet."""

    def run(self) -> None:
        """Serve the rank until the end.

        Raises:
            PeerLost: the rank has gone.
            Exception: what `commands` raises.
        """
        while True:
            self._messenger.wait([self._daemon], LOOK_S)
            self._events.extend(self._messenger.receive(0.0))
            while self._events:
                match self._events.popleft():
                    case Message(data=data):
                        self._on_message(data)
                    case Lost(reason=reason):
                        raise PeerLost(self._rank, reason)
            for _ in self._commands(0.0):
                pass

    def _on_message(self, data: memoryview) -> None:
        try:
            self._do(*read(data))
        except (CacheWireError, MemoryError) as error:
            reason = str(error) or "out of memory"
            self._send(Head(Kind.REFUSE), reason.encode())
            self._messenger.drop(self._rank, reason)
            raise PeerLost(self._rank, f"it was refused: {reason}") from error

    def _do(self, head: Head, body: memoryview) -> None:
        """
        Raises:
            CacheWireError: what is asked makes no sense.
            MemoryError: there is no room for it.
        """
        blocks = self._blocks
        if head.kind is Kind.BEGIN:
            self._begin(head, body)
        elif blocks is None:
            raise CacheWireError(f"a {head.kind.name} before a BEGIN")
        elif head.kind is Kind.KEEP:
            blocks.keep(head.first, head.second, head.third, body)
            self._send(Head(Kind.KEPT, head.first, head.second))
        elif head.kind is Kind.ASK:
            layer = blocks.layer(head.second)
            for place, question in enumerate(read_questions(body, head.third, layer)):
                for first, told in blocks.answer(head.second, question):
                    self._send(Head(Kind.TELL, head.first, place, first), told)
                    self._events.extend(self._messenger.receive(0.0))  # what is unsent leaves meanwhile
        else:
            raise CacheWireError(f"a {head.kind.name} from a rank")

    def _begin(self, head: Head, body: memoryview) -> None:
        count, number = head.first, head.third
        layers = read_layers(body)
        if self._blocks is not None or not count or number >= len(CACHE_FORMATS):
            raise CacheWireError(f"room is asked for {count} blocks in format {number}")
        needed = count * block_bytes(layers, CACHE_FORMATS[number])
        if needed > self._limit:
            raise CacheWireError(f"blocks take {human_bytes(needed)}; {human_bytes(self._limit)} were planned here")
        self._blocks = HeldBlocks(layers, count, CACHE_FORMATS[number], self._pool)
        self._ready(needed)
        self._send(Head(Kind.BEGUN))

    def _send(self, head: Head, *parts: Buffer) -> None:
        if self._rank in self._messenger.connected:
            self._messenger.send(self._rank, [head.pack(), *parts])
