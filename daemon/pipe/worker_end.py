"""The local pipe between a daemon and a rank worker: length-prefixed protobufs over a loopback connection.

A socket rather than an anonymous pipe, because both ends can wait for it with a deadline on every platform. The
daemon listens on an ephemeral loopback port; the worker proves itself with a token it was given on its stdin.
"""

from __future__ import annotations

import select
import socket
import struct

from motley.protocol import mesh_pb2 as pb

LENGTH = struct.Struct("<I")
TOKEN_BYTES = 32
MAX_MESSAGE = 64 << 20


class PipeClosed(Exception):
    """The other end of the pipe is gone."""


class WorkerPipe:
    """The worker's end: blocking, used by one thread at a time."""

    def __init__(self, port: int, token: bytes) -> None:
        """
        Raises:
            PipeClosed: the daemon is gone.
        """
        try:
            self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
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

    def receive(self) -> pb.RankCommand:
        """The next command; call after `poll` said yes.

        Raises:
            PipeClosed: the daemon is gone.
        """
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return pb.RankCommand.FromString(self._exactly(length))

    def send(self, event: pb.RankEvent) -> None:
        """Hand an event to the daemon.

        Raises:
            PipeClosed: the daemon is gone, or has not read for 10 s.
        """
        body = event.SerializeToString()
        try:
            self._socket.sendall(LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise PipeClosed(str(error)) from error

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            try:
                chunk = self._socket.recv(count - len(received))
            except OSError as error:
                raise PipeClosed(str(error)) from error
            if not chunk:
                raise PipeClosed("the daemon closed the pipe")
            received += chunk
        return bytes(received)
