"""What a node's heartbeats tell."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from motley.daemon.node.control import Control, NodeSettings
from motley.daemon.weights.cache import ShareCache
from motley.protocol import mesh_pb2 as pb


class Stream:
    """Takes messages until one meets a condition."""

    def __init__(self, seen: Any) -> None:
        self._seen = seen
        self.over = asyncio.Event()

    async def write(self, message: pb.NodeMessage) -> None:
        if self._seen(message.heartbeat):
            self.over.set()


async def test_they_tell_what_is_free_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = count(1)
    monkeypatch.setattr("motley.daemon.node.control.gpus", lambda: [pb.Gpu(name="RTX 9", free_bytes=next(looks))])
    settings = NodeSettings("pc", "127.0.0.1", pb.Capabilities(), None, ShareCache(tmp_path), 1)
    control = Control(settings, lambda event: None)
    stream = Stream(
        lambda beat: beat.memory_available_bytes > 0 and [gpu.free_bytes > 3 for gpu in beat.gpus] == [True]
    )
    tasks = [asyncio.create_task(work) for work in (control._watch_gpus(0.001), control._send(stream, 0.001))]
    try:
        async with asyncio.timeout(20):
            await stream.over.wait()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
