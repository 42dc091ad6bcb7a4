"""A rank's way to the holder of its far cache blocks: `motley.plugins.block_holder.BlockHolder` over a link."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from motley.daemon.caches.wire import (
    HEAD,
    KEEP_BYTES,
    CacheWireError,
    Head,
    Kind,
    block_bytes,
    read,
    write_layers,
    write_questions,
)
from motley.plugins.block_holder import F32, Array, Asked, HeldLayer
from motley.plugins.engine import CACHE_FORMATS
from motley.plugins.native.attention import SIGHT
from motley.protocol.wording import human_bytes
from motley.transport import Connected, Lost, Message, Messenger, PeerLost

MEET_S = 60.0
"""A holder has so many seconds to be reached when a session begins."""
ROOM_S = 300.0
"""It has so many seconds to take its memory, all pages of which it writes to."""
SILENT_S = 10.0
"""A holder that owes something and says nothing for so many seconds is lost. It says something for every megabyte."""
TRIES = 3
"""How often it is measured what asking it takes; the quickest time counts."""
LOOK_S = 0.1
"""Seconds between two looks whether it is silent for too long."""


class HeldElsewhere:
    """The far blocks of a rank, which a holder keeps. One thread owns it.

    Attributes:
        lost: why the holder is gone; empty while it is there. It does not come back.
        waited_s: seconds for which the rank has had nothing to do but wait for it.
    """

    def __init__(self, messenger: Messenger, peer: int, address: str, count: int) -> None:
        """
        Args:
            messenger: becomes this object's, which closes it.
            peer: the holder's number.
            address: ``host:port`` of it.
            count: blocks that it is to have room for.
        """
        self.lost = ""
        self.waited_s = 0.0
        self.count = count
        self._messenger = messenger
        self._peer = peer
        self._address = address
        self._layers: Sequence[HeldLayer] = ()
        self._heard = 0.0
        self._call = 0
        self._asked: Sequence[Asked] = ()
        self._told: list[int] = []
        """Of each question under way, how many of its stretches have been told."""
        self._kept: tuple[int, int] | None = None
        """The block, and the first part of it, that it has confirmed last."""
        self._begun = False

    # See `motley.plugins.block_holder.BlockHolder`.

    def verify(self, new: object, used: object) -> None:
        """Nothing: what is in a node's memory is relied upon, as everywhere."""

    def begin(self, layers: Sequence[HeldLayer], cache_format: str) -> None:
        self._layers = layers
        self._messenger.connect(self._peer, self._address, MEET_S)
        self._wait(lambda: self._peer in self._messenger.connected, MEET_S)
        self._send(Head(Kind.BEGIN, self.count, 0, CACHE_FORMATS.index(cache_format)), write_layers(layers))
        self._wait(lambda: self._begun, ROOM_S)
        if self.lost:
            needed = human_bytes(self.count * block_bytes(layers, cache_format))
            raise PeerLost(self._peer, f"the node that is to keep {needed} of cache blocks: {self.lost}")

    def keep(self, block: int, parts: Sequence[Array]) -> None:
        first = 0
        while first < len(parts):
            end, size = first + 1, parts[first].nbytes
            while end < len(parts) and size + parts[end].nbytes <= KEEP_BYTES:
                size += parts[end].nbytes
                end += 1
            self._kept = None
            self._send(Head(Kind.KEEP, block, first, end - first), *parts[first:end])
            self._wait(partial(self._has_kept, block, first))
            first = end

    def ask(self, layer: int, asked: Sequence[Asked]) -> None:
        self._call = (self._call + 1) % (1 << 32)
        self._asked, self._told = asked, [0] * len(asked)
        if asked:
            self._send(Head(Kind.ASK, self._call, layer, len(asked)), *write_questions(asked))

    def take(self) -> None:
        self._wait(lambda: all(done == len(own.stretches) for done, own in zip(self._told, self._asked, strict=True)))
        if self.lost:
            for own in self._asked:
                own.told.fill(0)
        self._asked, self._told = (), []

    # What it does.

    def block_s(self, blocks: int) -> float:
        """Measure what a step of a row that uses so many blocks waits for each of them, in seconds: in all layers, one
        after the other. Infinite: the holder is lost."""
        numbers = np.arange(blocks, dtype=np.int32)
        best = math.inf
        for _ in range(TRIES):
            began = time.perf_counter()
            for place, layer in enumerate(self._layers):
                seen = numbers[layer.first_seen(blocks * SIGHT) // SIGHT :]
                queries = np.zeros((1, layer.heads, layer.size), np.float32)
                told = np.empty((len(seen), 1, layer.heads, layer.size + 2), np.float32)
                self.ask(place, [Asked(blocks * SIGHT, seen, seen, queries, told)] if len(seen) else [])
                self.take()
            best = min(best, time.perf_counter() - began)
        return math.inf if self.lost else best / blocks

    def attend(self) -> None:
        """Take note of whether the holder is still there, while nothing is expected of it."""
        self._move(0.0)

    def close(self) -> None:
        """End the link to the holder, which ends it."""
        self._messenger.close()

    def _has_kept(self, block: int, first: int) -> bool:
        return self._kept == (block, first)

    def _send(self, head: Head, *parts: Array | bytes | memoryview) -> None:
        self._heard = time.monotonic()
        if not self.lost and self._peer in self._messenger.connected:
            self._messenger.send(self._peer, [head.pack(), *parts])

    def _wait(self, done: Callable[[], bool], silent_s: float = SILENT_S) -> None:
        """Wait until it is done, or the holder is lost."""
        began = self._heard = time.monotonic()
        while not done() and not self.lost:
            self._move(LOOK_S)
            if time.monotonic() - self._heard > silent_s:
                self._lose(f"it has said nothing for {silent_s:.0f} s")
        self.waited_s += time.monotonic() - began

    def _move(self, seconds: float) -> None:
        for event in self._messenger.receive(seconds):
            match event:
                case Message(data=data):
                    self._heard = time.monotonic()
                    try:
                        self._on_message(*read(data))
                    except CacheWireError as error:
                        self._lose(f"it sends what makes no sense: {error}")
                case Lost(reason=reason):
                    self.lost = self.lost or reason
                case Connected():
                    self._heard = time.monotonic()

    def _on_message(self, head: Head, body: memoryview) -> None:
        """
        Raises:
            CacheWireError: it is nothing that was asked for.
        """
        match head.kind:
            case Kind.BEGUN:
                self._begun = True
            case Kind.KEPT:
                self._kept = head.first, head.second
            case Kind.TELL if head.first == self._call and head.second < len(self._asked):
                self._put(self._asked[head.second].told, head.second, head.third, body)
            case Kind.REFUSE:
                self._lose(bytes(body[:1024]).decode(errors="replace"))
            case _:
                raise CacheWireError(f"a {head.kind.name} of {HEAD.size + len(body)} bytes")

    def _put(self, told: F32, question: int, first: int, body: memoryview) -> None:
        """Take the summaries of some stretches of a question.

        Raises:
            CacheWireError: they are not the next ones, or too many.
        """
        each = told[0].nbytes
        count = len(body) // each
        if first != self._told[question] or not count or len(body) % each or first + count > len(told):
            raise CacheWireError(f"{len(body)} bytes of summaries from stretch {first} on")
        told[first : first + count] = np.frombuffer(body, "<f4").reshape(count, *told.shape[1:])
        self._told[question] = first + count

    def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        self._messenger.drop(self._peer, reason)
