"""A training worker: a process with torch, which the daemon starts, hears and ends.

It reads one order from its standard input, a line of JSON, and later the leader of a job where the others are; it
writes lines of JSON. One that says nothing for a while is taken for dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import psutil

from motley.daemon.machine.memory import resident_bytes
from motley.daemon.node.child import kill_child, start_child
from motley.protocol import mesh_pb2 as pb

ENTRY = "motley.training.mesh.process"
SILENCE_S = 120.0
"""A worker shows life every few seconds, but importing torch and loading a model on a slow disk take their time."""


class SilentWorker(Exception):
    """A worker has shown no life for `SILENCE_S`."""


class TrainingWorker:
    """A worker's process. Make one with `start`, read what it says with `lines`, and always `stop` it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, order: dict[str, Any], threads: int) -> TrainingWorker:
        """
        Args:
            order: what it is to do, see `motley.training.mesh.order.WorkerOrder`.
            threads: that it computes with.
        """
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        process = await start_child(ENTRY, env=env, stdout=asyncio.subprocess.PIPE)
        worker = cls(process)
        worker._write(order)
        return worker

    @property
    def pid(self) -> int:
        """The process, as the system counts."""
        return self._process.pid

    def tell_peers(self, peers: Sequence[pb.JobPeer]) -> None:
        """Tell the leader of a job where the others are."""
        names = [field.name for field in pb.JobPeer.DESCRIPTOR.fields]
        self._write({"peers": [{name: getattr(peer, name) for name in names} for peer in peers]})

    async def lines(self) -> AsyncIterator[dict[str, Any]]:
        """What it says, until it has ended; of progress, how much memory it has held so far is looked up here.

        Raises:
            SilentWorker: it says nothing any more.
        """
        assert self._process.stdout is not None
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    line = await self._process.stdout.readline()
            except TimeoutError:
                raise SilentWorker(f"its worker has shown no life for {SILENCE_S:.0f} s") from None
            if not line:
                return
            said: dict[str, Any] = json.loads(line)
            if "progress" in said:
                with contextlib.suppress(psutil.Error):
                    said["progress"]["peak_bytes"] = resident_bytes(self.pid).peak
            yield said

    async def exit_status(self) -> int:
        """Wait for its end; a negative status is the signal that killed it."""
        return await self._process.wait()

    async def stop(self) -> None:
        """End it, whatever it does: what it has on its disk is whole at any time."""
        await kill_child(self._process)

    def _write(self, told: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
