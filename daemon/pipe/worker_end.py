"""The worker's end of the pipe to its daemon, as bytes and messages."""

from __future__ import annotations

import select
import socket

from motley.daemon.pipe.framing import LENGTH
from motley.protocol.worker_pb2 import WorkerCommand, WorkerEvent

CONNECT_S = 10.0
"""The daemon, which is waiting for the worker, takes its connection within so many seconds."""
STALL_S = 120.0
"""A daemon that neither takes the worker's events nor ends for so many seconds hangs. A machine that swaps, or a daemon
that was suspended, may need a while; the mesh has given it up long before."""


class PipeClosed(Exception):
    """The other end of the pipe is gone."""


class PipeStalled(PipeClosed):
    """The other end of the pipe is there, but has stood still for `STALL_S`."""


class WorkerPipe:
    """The worker's end of the pipe: it blocks, and one thread at a time uses it."""

    def __init__(self, port: int, token: bytes) -> None:
        """Connect to the daemon on this machine.

        Args:
            port, token: as `motley.daemon.pipe.settings.WorkerSettings` has them.

        Raises:
            PipeClosed: the daemon is gone.
        """
        try:
            self._socket = socket.create_connection(("127.0.0.1", port), timeout=CONNECT_S)
            self._socket.settimeout(STALL_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(token)
        except OSError as error:
            raise PipeClosed(str(error)) from error

    def fileno(self) -> int:
        """What to wait for, beside others: it can be read when a command is there."""
        return self._socket.fileno()

    def poll(self, timeout_s: float) -> bool:
        """Whether a command is there, waiting for one up to `timeout_s`."""
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def receive(self) -> WorkerCommand:
        """The next command; call after `poll` said yes.

        Raises:
            PipeClosed: the daemon is gone.
            PipeStalled: it has begun a command, and not gone on with it.
        """
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return WorkerCommand.FromString(self._exactly(length))

    def send(self, *events: WorkerEvent) -> None:
        """Hand some events to the daemon, which is woken once for them.

        Raises:
            PipeClosed: the daemon is gone.
            PipeStalled: it has not read for `STALL_S`.
        """
        bodies = [event.SerializeToString() for event in events]
        try:
            self._socket.sendall(b"".join(LENGTH.pack(len(body)) + body for body in bodies))
        except TimeoutError as error:
            raise PipeStalled(f"the daemon has read nothing for {STALL_S:.0f} s") from error
        except OSError as error:
            raise PipeClosed(str(error)) from error

    def close(self) -> None:
        """End the pipe."""
        self._socket.close()

    def _exactly(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            try:
                chunk = self._socket.recv(count - len(received))
            except TimeoutError as error:
                raise PipeStalled(f"the daemon has not gone on with a command for {STALL_S:.0f} s") from error
            except OSError as error:
                raise PipeClosed(str(error)) from error
            if not chunk:
                raise PipeClosed("the daemon closed the pipe")
            received += chunk
        return bytes(received)
