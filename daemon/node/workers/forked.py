"""Worker processes that are forked from one which has imported all that they need, where the system can do that."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping

from motley.daemon.pipe.forking import NUMBER

assert sys.platform == "linux", "elsewhere nothing is forked"


BEGIN_S = 30.0
"""Who forks has so many seconds to import everything, and to fork."""
END_S = 5.0
"""Who forks ends so soon once nobody can ask for workers any more."""


class ForkedWorker:
    """A worker process. Make one with `fork_worker`; it is used as an `asyncio.subprocess.Process` is."""

    def __init__(self, stdin: int, told: int) -> None:
        """
        Args:
            stdin: a pipe to its standard input, which is closed when it has ended.
            told: a pipe on which its number and its status are told; likewise.
        """
        self._loop = asyncio.get_running_loop()
        self._stdin, self._told = stdin, told
        self._begun: asyncio.Future[int] = self._loop.create_future()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(told, self._on_told)

    @property
    def pid(self) -> int:
        """Its number, as the system counts."""
        return self._begun.result()

    @property
    def returncode(self) -> int | None:
        """Its status; a negative one is the signal that killed it; None: it has not ended."""
        return self._ended.result() if self._ended.done() else None

    async def begun(self) -> bool:
        """Wait until it has been forked; False: it could not be.

        Raises:
            TimeoutError: that takes longer than `BEGIN_S`.
        """
        async with asyncio.timeout(BEGIN_S):
            return await asyncio.shield(self._begun) > 0

    def end_input(self) -> None:
        """End its standard input, and with that a worker, now or as soon as it begins."""
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    async def wait(self) -> int:
        """Wait for its end."""
        return await asyncio.shield(self._ended)

    def write(self, line: bytes) -> None:
        """Write a line to its standard input; for its first one there is surely room."""
        if self._stdin >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._stdin, line)

    def kill(self) -> None:
        """End it at once."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and nobody has been told yet
                os.kill(self.pid, signal.SIGKILL)

    def _on_told(self) -> None:
        told = os.read(self._told, NUMBER.size)
        if told and not self._begun.done():
            self._begun.set_result(NUMBER.unpack(told)[0])
            return
        self._loop.remove_reader(self._told)
        os.close(self._told)
        self.end_input()
        if not self._begun.done():
            self._begun.set_result(0)
        elif not told:  # who forked it has been killed
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._ended.set_result(NUMBER.unpack(told)[0] if told else -signal.SIGKILL)


class ForkServer:
    """The process that workers are forked from, which begins with the first of them."""

    def __init__(
        self, module: str = "motley.daemon.worker.fork_server", environment: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            module: what the process runs.
            environment: its own environment variables; None: those of the first worker.
        """
        self._module = module
        self._environment = environment
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None

    def fork(self, environment: Mapping[str, str], output: int, errors: int) -> tuple[int, int]:
        """Have a worker forked: pipes to its standard input, and on which it is told of."""
        its_stdin, stdin = os.pipe()
        told, to_tell = os.pipe()
        order = json.dumps(dict(environment)).encode()
        try:
            with self._lock:
                self._begin(environment)
                assert self._orders is not None
                socket.send_fds(self._orders, [order], [its_stdin, output, errors, to_tell])
        except BaseException:
            os.close(stdin)
            os.close(told)
            raise
        finally:
            os.close(its_stdin)
            os.close(to_tell)
        return stdin, told

    def begin(self, environment: Mapping[str, str]) -> None:
        """Begin, unless that is done, so that the first worker need not wait for imports."""
        with self._lock, contextlib.suppress(OSError):  # which the first worker is told
            self._begin(environment)

    def _begin(self, environment: Mapping[str, str]) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setblocking(False)  # what does not fit its buffer is not sent: nobody reads it
        with theirs:
            command = [sys.executable, "-P", "-m", self._module]
            own = self._environment or environment
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=own, start_new_session=True)

    def end(self) -> None:
        """End it, and with it what workers it has left."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._orders is not None and self._process is not None:
            self._orders.close()
            self._orders = None
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


_server = ForkServer()
start_fork_server, end_fork_server = _server.begin, _server.end
"""Starts and ends the process that workers are forked from; it begins by itself when a worker is wanted."""
atexit.register(end_fork_server)


async def fork_worker(
    environment: Mapping[str, str], server: ForkServer = _server, output: int = 1, errors: int = 2
) -> ForkedWorker | None:
    """Fork a worker process; None: that is not possible now.

    Args:
        environment: its environment variables.
        output, errors: files that become its standard output and error.
    """
    try:
        worker = ForkedWorker(*server.fork(environment, output, errors))
    except OSError:  # who forks has just been killed, say
        return None
    try:
        return worker if await worker.begun() else None
    except TimeoutError:
        worker.end_input()
        await asyncio.to_thread(server.end)
        return None
    except asyncio.CancelledError:
        worker.end_input()
        raise
