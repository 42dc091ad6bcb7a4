"""The address on which a node's workers listen, given the one under which others reach the node."""

from __future__ import annotations

from motley.protocol.address import is_loopback


def listening_host(address: str) -> str:
    """Where a node listens whom others reach at `address`: on loopback only if nobody else could reach it anyway."""
    if is_loopback(address):
        return address
    return "::" if ":" in address else "0.0.0.0"
