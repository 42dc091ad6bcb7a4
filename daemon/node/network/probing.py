"""Measuring the link between two nodes, as their ranks would have it: over the data plane, with its TLS.

The two are the ranks of a mesh that lives for a moment. Connecting such a mesh measures its links.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple

from motley.daemon.node.network.address import listening_host
from motley.protocol import mesh_pb2 as pb
from motley.protocol.address import join_address
from motley.transport import Listener, Membership, PeerLost, PeerTimeout, Tls, TransportError, connect_mesh


class Unreachable(Exception):
    """The other node cannot be reached; the message says at which address, and why."""


class Link(NamedTuple):
    """What a link is like, in each direction: seconds one way, and bytes/s."""

    latency_s: float
    bandwidth: float


def probe_link(
    probe: pb.Probe, address: str, listening: Callable[[str], None], ports: tuple[int, int] = (0, 0)
) -> Link:
    """Connect to the other node of a pair, or be connected to, and measure. Blocks for some seconds at most.

    Args:
        address: under which the other reaches this node.
        ports: the first and the last on which it may be dialled; (0, 0): any.
        listening: told ``host:port`` where the other is to dial, if it is the other that dials.

    Raises:
        Unreachable: the two do not come together.
    """
    dials = bool(probe.address)
    membership = Membership(
        session=probe.id, epoch=0, rank=int(dials), size=2, agreement=bytes(32), secret=probe.secret
    )
    security = Tls(probe.tls.certificate, probe.tls.key, probe.tls.authority)
    try:
        with closing(Listener(listening_host(address), *((0, 0) if dials else ports))) as listener:
            if not dials:
                listening(join_address(address, listener.port))
            addresses = [probe.address, ""]
            mesh = connect_mesh(listener, membership, addresses, probe.seconds, security=security)
            with closing(mesh):
                network = mesh.network
    except PeerTimeout as error:
        if dials:
            raise Unreachable(f"nothing answers at {probe.address} within {probe.seconds:g} s") from error
        raise Unreachable(f"it has not been reached within {probe.seconds:g} s") from error
    except PeerLost as error:
        raise Unreachable(error.why) from error
    except (TransportError, OSError) as error:
        raise Unreachable(f"{probe.address}: {error}" if dials else str(error)) from error
    return Link(network.latency[0][1], network.bandwidth[0][1])
