"""What a node's heartbeats tell, and that nothing keeps them from being sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from motley.daemon.lease.file import LeaseFile
from motley.daemon.node.joining.control import Control, OrchestratorLost
from motley.daemon.node.joining.outbox import AT_ONCE_BYTES
from motley.daemon.node.network.relaying import Relays
from motley.daemon.node.settings import NodeSettings
from motley.daemon.node.workers.leasing import Leasing
from motley.daemon.node.workers.ranks import Ranks
from motley.daemon.node.workers.training import Trainings
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


def control_of(folder: Path) -> Control:
    settings = NodeSettings("pc", "127.0.0.1", pb.Capabilities(), None, ShareCache(folder), 1)
    ranks = Ranks(settings, lambda role, event: None)
    leasing = Leasing("pc", ranks, LeaseFile(folder / "lease.json"))
    return Control(settings, ranks, leasing, Relays(), Trainings(settings, leasing, folder / "tickets"))


async def test_they_tell_what_is_free_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = count(1)
    there = "motley.daemon.node.joining.control.gpus"
    monkeypatch.setattr(there, lambda: [pb.Gpu(name="RTX 9", free_bytes=next(looks))])
    control = control_of(tmp_path)
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


async def test_they_do_not_wait_for_all_else_that_is_to_be_said(tmp_path: Path) -> None:
    control, beats = control_of(tmp_path), 0
    over = asyncio.Event()

    class Busy:
        async def write(self, message: pb.NodeMessage) -> None:
            nonlocal beats
            control.say(delta=pb.Delta(text="there is always more to say"))
            beats += message.HasField("heartbeat")
            if beats == 3:
                over.set()
            await asyncio.sleep(0)

    control.say(delta=pb.Delta(text="something"))
    sender = asyncio.create_task(control._send(Busy(), 0.001))
    try:
        async with asyncio.timeout(5):
            await over.wait()
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)


@pytest.mark.parametrize("several", [True, False])
async def test_what_waits_goes_as_one_message_where_that_is_understood(several: bool, tmp_path: Path) -> None:
    control, said, over = control_of(tmp_path), list[pb.NodeMessage](), asyncio.Event()
    texts = ["one", "two", "x" * AT_ONCE_BYTES, "four", "five"]

    class Whole:
        async def write(self, message: pb.NodeMessage) -> None:
            if message.WhichOneof("body") == "heartbeat":
                return
            said.append(message)
            if control._outbox.empty():
                over.set()

    for text in texts:
        control.say(delta=pb.Delta(text=text))
    sender = asyncio.create_task(control._send(Whole(), 60.0, several))
    try:
        async with asyncio.timeout(20):
            await over.wait()
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
    parts = [[each.delta.text for each in message.several.messages or [message]] for message in said]
    assert parts == ([texts[:2], texts[2:3], texts[3:]] if several else [[text] for text in texts])


class Call:
    """An orchestrator that welcomes the node and then listens for as long as `reads` lasts."""

    def __init__(self, reads: Callable[[pb.NodeMessage], Awaitable[None]]) -> None:
        self.write = reads
        self._said: asyncio.Queue[pb.OrchestratorMessage] = asyncio.Queue()
        welcome = pb.Welcome(node_id="1", heartbeat_s=0.001, silence_s=60)
        self._said.put_nowait(pb.OrchestratorMessage(welcome=welcome))

    async def initial_metadata(self) -> list[tuple[str, str]]:
        return [("motley-address", "")]

    async def read(self) -> pb.OrchestratorMessage:
        return await self._said.get()

    def cancel(self) -> None:
        pass


async def stay(control: Control, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a node talk to an orchestrator until it gives up."""

    class Stub:
        def __init__(self, channel: object) -> None:
            pass

        def Join(self, metadata: object) -> Call:
            return call

    monkeypatch.setattr("motley.daemon.node.joining.control.MeshStub", Stub)
    channel: Any = None
    async with asyncio.timeout(20):
        await control.stay(channel, "secret", lambda node_id, settings: None)


async def test_what_keeps_a_node_from_sending_is_told_and_is_no_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read(message: pb.NodeMessage) -> None:
        pass

    def broken() -> int:
        raise OSError("no /proc here")

    monkeypatch.setattr("motley.daemon.node.joining.control.available_memory", broken)
    with pytest.raises(OrchestratorLost, match="sending to the orchestrator failed: OSError: no /proc here"):
        await stay(control_of(tmp_path), Call(read), monkeypatch)


async def test_a_node_does_not_grow_for_an_orchestrator_that_reads_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.daemon.node.joining.outbox.LIMIT_BYTES", 1 << 20)
    monkeypatch.setattr("motley.daemon.node.joining.control.LIMIT_BYTES", 1 << 20)
    control = control_of(tmp_path)

    async def read_slowly(message: pb.NodeMessage) -> None:
        """A message now and then, while there is more to say than that."""
        for _ in range(100):
            control.say(delta=pb.Delta(text="x" * 1000))
        await asyncio.sleep(0.001)

    with pytest.raises(OrchestratorLost, match=r"too slow: 1\.05 MB wait to be sent"):
        await stay(control, Call(read_slowly), monkeypatch)
    kept = 0
    while not control._outbox.empty():
        kept += control._outbox.get_nowait().ByteSize()
    assert 0.5e6 < kept < 1.1e6
    assert not control._outbox.full()
