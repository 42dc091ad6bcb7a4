"""Addresses of nodes: ``host:port`` in writing, with brackets where the host is an IPv6 one; who can reach which."""

from __future__ import annotations

import ipaddress


def parse_address(text: str) -> tuple[str, int]:
    """Split ``host:port`` (IPv6 hosts in brackets).

    Raises:
        ValueError: it is not of that form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not an address of the form HOST:PORT")
    return host.strip("[]"), int(port)


def join_address(host: str, port: str | int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether it is an address at which a machine reaches only itself. (A name may be one; nobody is asked.)"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listening_host(address: str) -> str:
    """Where a node listens whom others reach at `address`: on loopback only if nobody else could reach it anyway."""
    if is_loopback(address):
        return address
    return "::" if ":" in address else "0.0.0.0"
