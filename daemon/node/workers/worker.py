"""A worker process, for the daemon that owns it: starting it, talking to it, stopping it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from motley.daemon.machine.memory import resident_bytes
from motley.daemon.node.child import Child, kill_child, start_child
from motley.daemon.pipe.framing import LENGTH, MAX_MESSAGE, TOKEN_BYTES
from motley.daemon.pipe.settings import WorkerSettings
from motley.daemon.weights.cache import ShareCache
from motley.protocol.mesh_pb2 import Release
from motley.protocol.worker_pb2 import WorkerCommand, WorkerEvent

if sys.platform == "linux":
    from motley.daemon.node.workers.forked import end_fork_server, fork_worker, start_fork_server

ENTRY = ("motley.daemon.worker.process",)
"""The module that a worker process runs, with its arguments."""
START_S = 60.0
"""A worker has so many seconds to import its packages and connect."""
STOP_S = 5.0
"""A worker that was asked to stop is killed after so many seconds."""

HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""The setting that has glibc ask for huge pages, weights in which take 4 % off a token's time."""


class WorkerError(Exception):
    """The worker process did not start or is gone."""


class RankWorker:
    """One worker process, of a rank or an expert host. Make one with `start`, read what it says with `events`, and
    always `stop` it."""

    def __init__(self, process: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(
        cls,
        *,
        cache: ShareCache,
        models: Path | None = None,
        host: str = "0.0.0.0",
        ports: tuple[int, int] = (0, 0),
        threads: int = 1,
        core: int | None = None,
        entry: Sequence[str] = ENTRY,
    ) -> RankWorker:
        """Start a worker process and wait until it has connected.

        Args:
            cache: where its share is kept.
            models: folder in which model names are looked up.
            host: where its data plane listens.
            ports: the first and the last on which it may; (0, 0): any.
            threads: compute threads, where the assignment does not say.
            core: pin it to this one of the usable cores.
            entry: the module that is run, which calls `motley.daemon.worker.process.main`, and its arguments.

        Raises:
            WorkerError: the process did not come up in `START_S`.
        """
        token = secrets.token_bytes(TOKEN_BYTES)
        connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.get_running_loop().create_future()
        )

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.IncompleteReadError, TimeoutError):
                async with asyncio.timeout(10):
                    offered = await reader.readexactly(TOKEN_BYTES)
                if hmac.compare_digest(offered, token) and not connected.done():
                    connected.set_result((reader, writer))
                    return
            writer.close()

        server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=MAX_MESSAGE)
        process = None
        try:
            settings = WorkerSettings(
                port=server.sockets[0].getsockname()[1],
                token=token.hex(),
                cache=str(cache.folder),
                cache_limit=cache.limit,
                models=str(models) if models else None,
                host=host,
                threads=threads,
                core=core,
                ports=ports,
            )
            process = await _start(entry, settings.to_line())
            dead = asyncio.create_task(process.wait())
            either: set[asyncio.Future[Any]] = {connected, dead}
            await asyncio.wait(either, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            dead.cancel()
            if not connected.done():
                raise WorkerError(
                    f"the rank worker exited with status {process.returncode} before it said hello"
                    if process.returncode is not None
                    else f"the rank worker did not come up within {START_S:.0f} s"
                )
        except BaseException:
            if process is not None:
                await kill_child(process)
            raise
        finally:
            server.close()
        return cls(process, *connected.result())

    @property
    def pid(self) -> int:
        """The process, as the system counts."""
        return self._process.pid

    def send(self, command: WorkerCommand) -> None:
        """Hand a command to the worker; lost silently if it is gone (its end shows in `events`)."""
        body = command.SerializeToString()
        if not self._writer.is_closing():
            self._writer.write(LENGTH.pack(len(body)) + body)

    async def events(self) -> AsyncIterator[WorkerEvent]:
        """What the worker says, until it is gone. How much memory it holds is looked up here: it has steps to do."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                event = WorkerEvent.FromString(await self._reader.readexactly(length))
                if event.HasField("timing"):
                    with contextlib.suppress(psutil.Error):
                        event.timing.peak_rss_bytes = resident_bytes(self.pid).peak
                yield event

    async def exit_status(self) -> int:
        """Wait for the process to end; a negative status is the signal that killed it."""
        return await self._process.wait()

    async def stop(self) -> None:
        """Ask the worker to end, and kill it if it does not within `STOP_S`."""
        if self._process.returncode is None:
            self.send(WorkerCommand(release=Release()))
            try:
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
            except TimeoutError:
                await kill_child(self._process)
        self._writer.close()


def prepare_workers() -> None:
    """Have a worker begin the sooner that is wanted next."""
    if sys.platform == "linux":
        start_fork_server(_environment())


async def end_start_of_workers() -> None:
    """End what starts workers, at the end of a daemon."""
    if sys.platform == "linux":
        await asyncio.to_thread(end_fork_server)


async def _start(entry: Sequence[str], line: bytes) -> Child:
    """Start a process, which reads a line: fork it, where that is possible, which takes no time for imports."""
    environment = _environment()
    if sys.platform == "linux" and tuple(entry) == ENTRY and (forked := await fork_worker(environment)) is not None:
        forked.write(line)
        return forked
    process = await start_child(*entry, env=environment)
    assert process.stdin is not None
    process.stdin.write(line)
    return process


def _environment() -> dict[str, str]:
    """The worker's environment: this process's, and a setting that one C library reads, and no other."""
    given = os.environ.get("GLIBC_TUNABLES")
    return {**os.environ, "GLIBC_TUNABLES": f"{given}:{HUGE_PAGES}" if given else HUGE_PAGES}
