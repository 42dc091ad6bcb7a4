"""``host:port`` in writing, with brackets where the host is an IPv6 address."""

from __future__ import annotations


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
