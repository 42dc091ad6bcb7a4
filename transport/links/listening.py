"""Where ranks reach each other: the socket on which one listens, and its address in words."""

from __future__ import annotations

import socket

from ..errors import UsageError


class Listener:
    """The socket where other ranks reach this one. It outlives meshes: the next epoch uses it again."""

    def __init__(self, host: str = "0.0.0.0", port: int = 0, last: int | None = None) -> None:
        """
        Args:
            host: an IPv6 one such as "::" is possible; "::" takes IPv4 too.
            port: 0 lets the system choose.
            last: the first port is taken that is free from `port` to this one; None: only `port` will do.

        Raises:
            UsageError: the ports are taken, or the host is none of this machine's.
        """
        trouble: OSError | OverflowError | None = None
        for each in range(port, (port if last is None else last) + 1):
            try:
                self.socket = _listen(host, each)
            except (OSError, OverflowError) as error:
                trouble = error
            else:
                return
        ports = f"port {port}" if last in (None, port) else f"any of the ports {port} to {last}"
        raise UsageError(f"cannot listen on {host} {ports}: {trouble}; choose another port or host") from trouble

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


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        OSError, OverflowError: the port is taken, or none; or the host is none of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # on Windows SO_REUSEADDR would let others take the port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind((host, port))
        made.listen(128)
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


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
