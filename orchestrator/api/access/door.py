"""Where clients come in: so many connections at a time, so many of one address, and none that says nothing for long.

aiohttp's own way in has neither limit, and asyncio's accepts over and over when the process has no file left.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from asyncio.sslproto import SSLProtocol

from aiohttp import web

IDLE_S = 30.0
"""A connection is closed on which no request has come whole for so long, since it was made or since the last answer."""
PAUSE_S = 0.5
"""After a connection that could not be accepted, the next is waited for so long."""
HANDSHAKE_S = 10.0
"""A connection that has not agreed on TLS by then is closed."""
WAITING = 128
"""Connections that wait in the system to be accepted, at most."""

# A connection with TLS reads a record at a time. asyncio has each hold 256 kB for that, also one that never says a
# word, and offers no other way to change it.
SSLProtocol.max_size = 16 << 10

_log = logging.getLogger(__name__)


class Door:
    """Listens for clients and hands their connections to aiohttp; those beyond the limits are closed at once.

    It may be opened several times, at other addresses.
    """

    def __init__(self, server: web.Server, connections: int, of_one_address: int) -> None:
        """
        Args:
            server: of a runner whose `keepalive_timeout` is `IDLE_S`, and that is set up.
            connections: that may be open at a time.
            of_one_address: how many of them may come from one.
        """
        self._server = server
        self._connections = connections
        self._of_one_address = of_one_address
        self._open: list[tuple[str, asyncio.BaseTransport]] = []
        """By the client's address; closed ones are taken out when the next client comes."""
        self._entering: dict[asyncio.Task[None], str] = {}
        """Connections that agree on TLS, with their clients' addresses."""
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []

    async def open(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen on all addresses of `host`; the port, which is any free one for 0.

        Raises:
            OSError: the port is taken, or the host is none of this machine.
        """
        fresh: list[socket.socket] = []
        try:
            for family, address in await _resolve(host):
                listener = socket.create_server((address, port), family=family, backlog=WAITING)
                listener.setblocking(False)
                fresh.append(listener)
                port = listener.getsockname()[1]
        except BaseException:
            for listener in fresh:
                listener.close()
            raise
        self._listeners += fresh
        self._accepting += [asyncio.create_task(self._accept(listener, tls)) for listener in fresh]
        return port

    async def close(self) -> None:
        """Let nobody in any more; connections that are open stay."""
        tasks = [*self._accepting, *self._entering]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    async def _accept(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, (address, *_) = await loop.sock_accept(listener)
                if self._is_full(address):
                    client.close()
                    continue
                if tls is not None:  # which takes as long as the client likes
                    task = asyncio.create_task(self._agree(client, address, tls))
                    self._entering[task] = address
                    task.add_done_callback(self._entering.pop)
                    continue
                transport, _ = await loop.connect_accepted_socket(self._handler, client)
                self._open.append((address, transport))
            except Exception as error:  # it has gone already, or this process can have no more files
                _log.warning("a client could not be let in: %s", error)
                await asyncio.sleep(PAUSE_S)

    async def _agree(self, client: socket.socket, address: str, tls: ssl.SSLContext) -> None:
        """Let a client in once TLS is agreed on; one that does not agree is no news."""
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.connect_accepted_socket(
                self._handler, client, ssl=tls, ssl_handshake_timeout=HANDSHAKE_S, ssl_shutdown_timeout=HANDSHAKE_S
            )
            self._open.append((address, transport))
        except OSError as error:
            _log.debug("%s did not agree on TLS: %s", address, error)

    def _is_full(self, address: str) -> bool:
        self._open = [one for one in self._open if not one[1].is_closing()]
        holders = [*(one for one, _ in self._open), *self._entering.values()]
        own = holders.count(address)
        if own >= self._of_one_address:
            _log.warning("%s has %d connections to the API; further ones are closed", address, own)
        elif len(holders) >= self._connections:
            _log.warning("clients have %d connections to the API; further ones are closed", len(holders))
        else:
            return False
        return True

    def _handler(self) -> asyncio.BaseProtocol:
        handler = self._server()
        handler.keep_alive(True)  # without this, aiohttp closes idle connections from their first answer on only
        return handler


async def _resolve(host: str) -> list[tuple[socket.AddressFamily, str]]:
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, str(where[0])) for family, _, _, _, where in found))
