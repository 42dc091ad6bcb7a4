"""Forwarding bytes between two nodes that cannot reach each other, and both reach this one.

Blindly: what passes is the TLS of their ranks, whose certificates this node has not. A relay leads to one address, and
ends by itself when it has been of no use for a while: whose session it is, it does not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from motley.daemon.node.network.address import listening_host
from motley.protocol import mesh_pb2 as pb
from motley.protocol.address import is_loopback, join_address, parse_address

CHUNK = 1 << 16
"""Bytes that are read at once; about so many wait at most, in each direction, for the other side to take them."""
CONNECTIONS = 16
"""A relay has so many connections at most: two ranks have one, and try anew when it breaks."""
RELAYS = 64
"""So many relays are open at most."""
UNUSED_S = 90.0
"""A relay that has had no connection for so long ends: ranks that load may be slow to connect."""
CONNECT_S = 10.0
"""The other node answers within so long."""

logger = logging.getLogger(__name__)


class Relays:
    """The relays of this node, for as long as its daemon lives."""

    def __init__(self) -> None:
        self._relays: set[asyncio.Task[None]] = set()

    async def open(self, order: pb.Relay, address: str, ports: tuple[int, int] = (0, 0)) -> pb.Relayed:
        """Begin to forward to where an order says, unless that is this machine's loopback, which is nobody else's.

        Args:
            address: under which others reach this node.
            ports: the first and the last at which it may; (0, 0): any.
        """
        try:
            if len(self._relays) >= RELAYS:
                raise ValueError(f"{RELAYS} relays are open here already")
            relay = _Relay(*parse_address(order.target), to_loopback=is_loopback(address))
            port = await relay.listen(listening_host(address), range(ports[0], ports[1] + 1))
        except (OSError, ValueError) as error:
            return pb.Relayed(id=order.id, failure=str(error))
        task = asyncio.create_task(relay.until_unused())
        self._relays.add(task)
        task.add_done_callback(self._relays.discard)
        return pb.Relayed(id=order.id, listening=join_address(address, port))

    async def end(self) -> None:
        """End all relays."""
        for task in self._relays:
            task.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)


class _Relay:
    """What comes to one port goes to one address, and back."""

    def __init__(self, host: str, port: int, *, to_loopback: bool) -> None:
        """`to_loopback`: whether the address may be one of this machine's alone."""
        self._target = host, port
        self._to_loopback = to_loopback
        self._connections: set[asyncio.Task[None]] = set()
        self._used = asyncio.Event()

    async def listen(self, host: str, ports: Iterable[int]) -> int:
        """Take connections from now on, at one of these ports, 0 being any; at which.

        Raises:
            OSError: none of them is free.
        """
        failure: OSError | None = None
        for each in ports:
            try:
                self._server = await asyncio.start_server(self._take, host, each, limit=CHUNK)
            except OSError as error:
                failure = error
            else:
                port: int = self._server.sockets[0].getsockname()[1]
                return port
        raise failure or OSError("there is no port to listen at")

    async def until_unused(self) -> None:
        """Forward until there has been no connection for `UNUSED_S`."""
        try:
            while True:
                self._used.clear()
                if self._connections:
                    await asyncio.wait(self._connections)
                    continue
                async with asyncio.timeout(UNUSED_S):
                    await self._used.wait()
        except TimeoutError:
            pass
        finally:
            self._server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        with contextlib.closing(writer):
            if len(self._connections) >= CONNECTIONS:
                return
            self._connections.add(task)
            self._used.set()
            try:
                await self._forward(reader, writer)
            except (OSError, TimeoutError) as error:
                logger.info("relaying to %s: %s", join_address(*self._target), error or type(error).__name__)
            except asyncio.CancelledError:  # else asyncio's server tells of it as if it were an error
                pass
            finally:
                self._connections.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward in both directions until both have ended.

        Raises:
            OSError, TimeoutError: a side cannot be reached, or has broken off.
        """
        async with asyncio.timeout(CONNECT_S):
            back, forth = await asyncio.open_connection(*self._target, limit=CHUNK)
        with contextlib.closing(forth):
            if not self._to_loopback and is_loopback(forth.get_extra_info("peername")[0]):
                raise OSError("that is a program of this machine, not a rank")
            for stream in (writer, forth):
                stream.transport.set_write_buffer_limits(CHUNK)
            both = [asyncio.create_task(_pump(*ends)) for ends in ((reader, forth), (back, writer))]
            try:
                await asyncio.gather(*both)
            finally:
                for pump in both:
                    pump.cancel()
                await asyncio.gather(*both, return_exceptions=True)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Forward what comes until it ends, and then the end.

    Raises:
        OSError: a side has broken off.
    """
    while chunk := await source.read(CHUNK):
        sink.write(chunk)
        await sink.drain()
    if sink.can_write_eof():
        sink.write_eof()
