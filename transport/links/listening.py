"""Where ranks reach each other: the socket on which one listens, and its address in words."""

from __future__ import annotations

import socket

from ..errors import UsageError


class Listener:
    """The socket where other ranks reach this one. It outlives meshes: the next epoch uses it again."""

    def __init__(self, host: str = "0.0.0.0", port: int = 0) -> None:
        """`port` 0 lets the system choose. An IPv6 `host` such as "::" is possible; "::" takes IPv4 too.

        Raises:
            UsageError: the port is taken, or the host is none of this machine's.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # on Windows SO_REUSEADDR would let others take the port
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
            else:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self.socket.bind((host, port))
            self.socket.listen(128)
        except (OSError, OverflowError) as error:
            self.socket.close()
            raise UsageError(f"cannot listen on {host} port {port}: {error}; choose another port or host") from error
        self.socket.setblocking(False)

    @property
    def port(self) -> int:
        """The TCP port, also if the system chose it."""
        port: int = self.socket.getsockname()[1]
        return port

    def duplicate(self) -> Listener:
        """The same socket once more: the port is given back when both are closed."""
        copy = object.__new__(Listener)
        copy.socket = self.socket.dup()
        return copy

    def close(self) -> None:
        """Give back the port, once the meshes that were made here have ended; links that were accepted here stay."""
        self.socket.close()


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[IPv6 host]:port".

    Raises:
        UsageError: it is neither.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"{address!r} is no address: write host:port or [IPv6 host]:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """What `split_address` reads: "host:port", or "[host]:port" for an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
