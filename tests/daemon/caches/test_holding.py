"""A rank's way to its cache holder, and the holder: over real links, each in a thread of its own."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np
import pytest

from motley.daemon.caches.held_elsewhere import HeldElsewhere
from motley.daemon.caches.holder import CacheHolder
from motley.daemon.caches.wire import Head, Kind, block_bytes
from motley.daemon.pipe.daemon import Released
from motley.plugins.block_holder import Asked, HeldLayer
from motley.plugins.native.attention import FORMATS, SIGHT
from motley.plugins.native.matmul import Pool
from motley.plugins.native.summaries import Layer, Summaries
from motley.transport import Listener, Membership, Messenger, PeerLost, Plain

COUNT = 5
LAYERS = (HeldLayer(8, 2, 16, 0, 0.0), HeldLayer(8, 4, 24, 200, 30.0, True))
DEADLINE_S = 30.0
NAMES = {np.float32: "fp32", np.float16: "fp16", np.int8: "int8"}


def member(rank: int) -> Membership:
    return Membership(session="s", epoch=1, rank=rank, size=64, secret=bytes(32), agreement=bytes(32))


class Holder:
    """A holder in a thread, and how it ended."""

    def __init__(self, limit: int) -> None:
        self.listener = Listener("127.0.0.1")
        self.release = threading.Event()
        self.ended: BaseException | None = None
        self.taken: list[int] = []
        self._limit = limit
        self._daemon, self._other = socket.socketpair()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _commands(self, seconds: float) -> list[Any]:
        if self.release.is_set():
            raise Released
        return []

    def _run(self) -> None:
        messenger = Messenger(member(1), Plain(), listener=self.listener, accepts=[0])
        with closing(messenger), closing(Pool(1)) as pool:
            holder = CacheHolder(
                messenger,
                0,
                limit=self._limit,
                pool=pool,
                daemon=self._daemon,
                commands=self._commands,
                ready=self.taken.append,
            )
            try:
                holder.run()
            except (Released, PeerLost) as error:
                self.ended = error

    def join(self) -> BaseException | None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return self.ended

    def close(self) -> None:
        self.release.set()
        self.join()
        for each in (self.listener, self._daemon, self._other):
            each.close()


@contextmanager
def session(cache_format: str = "fp32", limit: int | None = None) -> Iterator[tuple[HeldElsewhere, Holder]]:
    with ExitStack() as stack:
        room = COUNT * block_bytes(LAYERS, cache_format)
        holder = stack.enter_context(closing(Holder(room if limit is None else limit)))
        messenger = Messenger(member(0), Plain(), listener=None)
        elsewhere = HeldElsewhere(messenger, 1, f"127.0.0.1:{holder.listener.port}", COUNT)
        stack.callback(elsewhere.close)
        yield elsewhere, holder


def random_block(random: np.random.Generator, format: Any) -> list[Any]:
    """Keys, values and scales of all layers."""
    parts: list[Any] = []
    for layer in LAYERS:
        shape = layer.kv_heads, SIGHT, layer.size
        for _ in range(2):
            numbers = random.normal(size=shape)
            parts.append((50 * numbers).astype(np.int8) if format is np.int8 else numbers.astype(format))
            parts += [random.uniform(0.01, 0.1, shape[:2]).astype(np.float32)] * (format is np.int8)
    return parts


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_told_is_what_is_computed_here(format: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks that were kept, some parts at a time, of several sequences in one question, and of long
    ones in several messages."""
    monkeypatch.setattr("motley.daemon.caches.held_elsewhere.KEEP_BYTES", 20_000)
    random = np.random.default_rng(0)
    blocks = [random_block(random, format) for _ in range(COUNT)]
    with session(NAMES[format]) as (elsewhere, holder), closing(Pool(1)) as pool:
        elsewhere.begin(LAYERS, NAMES[format])
        assert holder.taken == [COUNT * block_bytes(LAYERS, NAMES[format])]
        for number, block in enumerate(blocks):
            elsewhere.keep(number, block)
        per_layer = len(blocks[0]) // len(LAYERS)
        for place, layer in enumerate(LAYERS):
            own = slice(place * per_layer, (place + 1) * per_layer)
            arrays = [np.stack(parts) for parts in zip(*(block[own] for block in blocks), strict=True)]
            keys, key_scales, values, value_scales = arrays if format is np.int8 else (arrays[0], None, arrays[1], None)
            here = Summaries(Layer(*layer), keys, values, key_scales, value_scales, pool)
            asked = []
            for rows, stretches, numbers in ((1, [0], [3]), (700, [1, 2, 4], [0, 4, 1])):
                asked.append(
                    Asked(
                        700,
                        np.array(stretches, np.int32),
                        np.array(numbers, np.int32),
                        random.normal(size=(rows, layer.heads, layer.size)).astype(np.float32),
                        np.full((len(stretches), rows, layer.heads, layer.size + 2), np.nan, np.float32),
                    )
                )
            elsewhere.ask(place, asked)
            elsewhere.take()
            for each in asked:
                table = np.full(5, -1, np.int32)
                table[each.stretches] = each.blocks
                expected = np.empty_like(each.told)
                here.answer(each.queries, each.position, table, each.stretches, expected)
                np.testing.assert_array_equal(each.told, expected)
        assert not elsewhere.lost


def question(told: Any = None) -> Asked:
    layer = LAYERS[0]
    shape = 1, 1, layer.heads, layer.size + 2
    return Asked(
        200,
        np.array([0], np.int32),
        np.array([0], np.int32),
        np.ones((1, layer.heads, layer.size), np.float32),
        np.full(shape, np.nan, np.float32) if told is None else told,
    )


def test_what_asking_for_a_block_costs_is_measured() -> None:
    """In all layers, whatever they see; a lost holder is the last choice."""
    with session() as (elsewhere, holder):
        elsewhere.begin(LAYERS, "fp32")
        assert 0 < elsewhere.block_s(COUNT) < 1
        assert not elsewhere.lost
        holder.close()
        elsewhere.attend()
        assert elsewhere.block_s(COUNT) == math.inf


def test_a_lost_holder_tells_zeros_and_is_told_nothing_more() -> None:
    with session() as (elsewhere, holder):
        elsewhere.begin(LAYERS, "fp32")
        holder.close()
        asked = question()
        elsewhere.ask(0, [asked])
        elsewhere.take()
        assert elsewhere.lost
        assert not asked.told.any()
        elsewhere.keep(0, random_block(np.random.default_rng(0), np.float32))
        elsewhere.ask(0, [asked])
        elsewhere.take()


def test_a_holder_whose_rank_goes_ends() -> None:
    with session() as (elsewhere, holder):
        elsewhere.begin(LAYERS, "fp32")
        elsewhere.close()
        assert isinstance(holder.join(), PeerLost)


def test_a_silent_holder_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheHolder, "_do", lambda *_: None)
    with session() as (elsewhere, _):
        monkeypatch.setattr("motley.daemon.caches.held_elsewhere.ROOM_S", 0.2)
        with pytest.raises(PeerLost, match="has said nothing"):
            elsewhere.begin(LAYERS, "fp32")


def test_a_holder_takes_no_more_than_was_planned() -> None:
    with session(limit=100) as (elsewhere, holder):
        with pytest.raises(PeerLost, match="100 bytes were planned here"):
            elsewhere.begin(LAYERS, "fp32")
        assert isinstance(holder.join(), PeerLost)
        assert not holder.taken


@pytest.mark.parametrize(
    ("head", "body", "why"),
    [
        (Head(Kind.KEEP, COUNT, 0, 1), b"", "block 5 of 5"),
        (Head(Kind.KEEP, 0, 3, 2), b"", "2 parts from 3 on, of 4"),
        (Head(Kind.KEEP, 0, 1, 2), b"abc", "parts of a block in 3 bytes, which have 65536"),
        (Head(Kind.ASK, 1, 2, 1), b"", "layer 2 of 2"),
        (Head(Kind.ASK, 1, 0, 0), b"", "0 questions"),
        (Head(Kind.ASK, 1, 0, 1), bytes(16), "a question of 0 rows"),
        (Head(Kind.ASK, 1, 0, 1), b"\xff" * 16, "a question of 4294967295 rows"),
        (Head(Kind.BEGIN, 1, 0, 0), bytes(21), "a layer with numbers out of range"),
        (Head(Kind.TELL), b"", "a TELL from a rank"),
    ],
)
def test_what_makes_no_sense_ends_the_link_with_the_reason(head: Head, body: bytes, why: str) -> None:
    with session() as (elsewhere, holder):
        elsewhere.begin(LAYERS, "fp32")
        elsewhere._send(head, body)
        asked = question()
        elsewhere.ask(0, [asked])
        elsewhere.take()
        assert why in elsewhere.lost
        assert isinstance(holder.join(), PeerLost)


def test_stretches_that_are_not_kept_are_no_answer() -> None:
    """Of a block that there is not, or after the rows."""
    for changed in (question()._replace(blocks=np.array([COUNT], np.int32)), question()._replace(position=100)):
        with session() as (elsewhere, _):
            elsewhere.begin(LAYERS, "fp32")
            elsewhere.ask(0, [changed])
            elsewhere.take()
            assert "stretches [0]" in elsewhere.lost
            assert not changed.told.any()
