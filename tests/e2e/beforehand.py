"""What a node of tests starts as programs is forked instead: each would import again what its command has imported.

That they are programs, too, see `tests/daemon/node`: `test_forked` and `test_describe`.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import select
import signal
import socket
import subprocess
from pathlib import Path

from motley.daemon.node.survey import describe
from motley.daemon.node.workers import forked
from motley.daemon.node.workers.forked import ForkedWorker, fork_worker
from motley.daemon.worker import fork_server, process
from tests.e2e.forks import FORKS, NO_WORKER

MODULE = "FORKED_MODULE"
"""The environment variable with the module that a forked process runs; none: a worker's."""


class Forks:
    """The process that forks, as `subprocess.Popen` has the one of a node that nobody has changed."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if ended else None
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        if self._status is None:
            file = os.pidfd_open(self._pid)
            ended = select.select([file], [], [], timeout)[0]
            os.close(file)
            if not ended:
                raise subprocess.TimeoutExpired(FORKS, timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)


class Child:
    """A process that was forked, as `asyncio.subprocess.Process` has one of `motley.daemon.node.child.start_child`."""

    def __init__(self, worker: ForkedWorker, stdout: asyncio.StreamReader) -> None:
        self.stdin, self.stdout = worker, stdout
        self.wait, self.kill = worker.wait, worker.kill

    @property
    def returncode(self) -> int | None:
        return self.stdin.returncode


def fork_beforehand() -> None:
    """Have this process, which becomes a node and has no threads yet, fork what it will need."""
    orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        orders.close()
        os.setsid()
        os.dup2(theirs.fileno(), 0)
        theirs.close()
        Path("/proc/self/comm").write_text(FORKS)
        fork_server.main(_become)
        fork_server.end_process()
    theirs.close()
    orders.setblocking(False)
    server = forked._server
    server._orders, server._process = orders, Forks(pid)  # type: ignore[assignment]
    describe.start_child = _start_child  # type: ignore[assignment]


def _become() -> int:
    module = os.environ.pop(MODULE, "")
    if not module:
        return process.main()
    Path("/proc/self/comm").write_text(NO_WORKER)
    importlib.import_module(module).main()
    return 0


async def _start_child(module: str, *, stdout: int) -> Child:
    assert stdout == subprocess.PIPE
    read, write = os.pipe()
    try:
        worker = await fork_worker({**os.environ, MODULE: module}, output=write)
    finally:
        os.close(write)
    assert worker is not None, "nothing can be forked"
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(read, "rb", buffering=0))
    return Child(worker, reader)
