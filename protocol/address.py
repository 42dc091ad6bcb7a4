"""Addresses: ``host:port`` in writing, with brackets where the host is an IPv6 one; which hosts are one's own only."""

from __future__ import annotations

import ipaddress

JOIN_PORT = 7337
"""Where nodes join, unless `motley up` is told another port."""


def parse_address(text: str) -> tuple[str, int]:
    """Split ``host:port`` (IPv6 hosts in brackets).

    Raises:
        ValueError: it is not of that form.
    """
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not an address of the form HOST:PORT, such as 192.168.1.20:7337")
    return host.strip("[]"), int(port)


def with_port(typed: str) -> str:
    """An address to join at as people type it: where that is a host alone, with `JOIN_PORT`."""
    alone = bool(typed) and (":" not in typed or typed.endswith("]"))
    return f"{typed}:{JOIN_PORT}" if alone else typed


def join_address(host: str, port: str | int) -> str:
    """The inverse of `parse_address`; port 0 and names of services too."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a machine reaches only itself at this address (an IPv4 one may be written as IPv6), or by this name:
    ``localhost``, as that is promised to be one (RFC 6761); other names may be, but nobody is asked.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().removesuffix(".") == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
