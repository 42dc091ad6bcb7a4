"""Bytes and collectives between ranks over plain TCP. Knows nothing of models.

Make a `Listener`, tell the others its port, call `connect_mesh` with the same plan on every rank, and use the
`Communicator` it returns.
"""

from .collectives import Communicator, Stats, StatsSnapshot
from .errors import PeerLost, PeerTimeout, ProtocolError, TransportError, UsageError
from .mesh import Listener, connect_mesh
from .schedule import Algorithm
from .wire import MAX_MESSAGE, Membership

__all__ = [
    "MAX_MESSAGE",
    "Algorithm",
    "Communicator",
    "Listener",
    "Membership",
    "PeerLost",
    "PeerTimeout",
    "ProtocolError",
    "Stats",
    "StatsSnapshot",
    "TransportError",
    "UsageError",
    "connect_mesh",
]
