"""Bytes and collectives between ranks over TCP. Knows nothing of models.

Make a `Listener`, tell the others its port, call `connect_mesh` with the same plan on every rank and the certificates
that protect the links (`Tls`, or `Plain` where nothing needs to), and use the `Communicator` it returns.
"""

from .collectives import Communicator, Pending
from .errors import PeerLost, PeerTimeout, ProtocolError, TransportError, UsageError
from .formats import WireFormat
from .group import group_of
from .links.listening import Listener
from .links.security import Plain, Tls
from .links.wire import MAX_MESSAGE, Membership, Op
from .mesh import connect_mesh
from .messages import Connected, Lost, Message, Messenger
from .schedules.schedule import Algorithm
from .stats import Record, Stats, StatsSnapshot

__all__ = [
    "MAX_MESSAGE",
    "Algorithm",
    "Communicator",
    "Connected",
    "Listener",
    "Lost",
    "Membership",
    "Message",
    "Messenger",
    "Op",
    "PeerLost",
    "PeerTimeout",
    "Pending",
    "Plain",
    "ProtocolError",
    "Record",
    "Stats",
    "StatsSnapshot",
    "Tls",
    "TransportError",
    "UsageError",
    "WireFormat",
    "connect_mesh",
    "group_of",
]
