"""How foreign ranks, which share nothing but a unique id, become a Motley mesh.

The id (``ncclUniqueId``, 128 bytes) holds a random secret and the address of the process that made it. That process
listens there (as NCCL's bootstrap does): every rank tells it where its own listener is, and when all have, every rank
gets the list and calls `connect_mesh`. Both ways are authenticated with an HMAC under the secret, so that a stranger
can neither join nor misdirect; what is said is no secret.

The links are mutual TLS 1.3 unless the id says plain. Whoever has the id is trusted to be a rank, so the secret itself
makes the authority that certifies them: all ranks derive the same signing key from it, sign a certificate of their own,
and accept no other signer's. **The id is to be kept as secret as a password**: hand it over in a protected way.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Self

from motley.transport import Communicator, Listener, Membership, Plain, Tls, connect_mesh
from motley.transport.certificates import Authority
from motley.transport.links.listening import join_address

from .codes import NcclError, Result

SESSION = "nccl"
RENDEZVOUS_S = 300.0
"""How long the ranks of an id may take from its making until all are there, as models may load meanwhile."""
CONNECT_S = 60.0
"""The same for the links among ranks that all have come."""
STRANGER_S = 5.0
"""How long a connection to the rendezvous may take to say who it is."""
LIFETIME = datetime.timedelta(days=2)
"""Of the links' certificates: the unique id is forgotten sooner."""
MAX_LINE = 16 << 10
"""Longest line in bytes that is read of a rendezvous."""
_ID = struct.Struct("<8s32sBH64s21x")
_MAGIC = b"MotleyN1"


@dataclass(frozen=True)
class UniqueId:
    """What ``ncclUniqueId`` holds."""

    secret: bytes
    plain: bool
    """Links are not encrypted."""
    host: str
    port: int

    def pack(self) -> bytes:
        """The 128 bytes."""
        return _ID.pack(_MAGIC, self.secret, self.plain, self.port, self.host.encode())

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Read the 128 bytes.

        Raises:
            NcclError: another library made them.
        """
        magic, secret, plain, port, host = _ID.unpack(data)
        if magic != _MAGIC:
            why = "this unique id is not Motley's: its maker runs another NCCL"
            raise NcclError(Result.INVALID_ARGUMENT, f"{why}; call motley.plugins.nccl.install() there too")
        return cls(secret, bool(plain), host.rstrip(b"\0").decode(), port)


def default_host() -> str:
    """This machine's address on the interface that leads outside (nothing is sent), or loopback if none does."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def make_id(host: str, *, plain: bool) -> UniqueId:
    """Make an id, and begin to wait for its ranks at `host`, an address of this machine; returns at once.

    Raises:
        NcclError: `host` is too long or none of this machine's.
    """
    if len(host.encode()) > 64:
        raise NcclError(Result.INVALID_USAGE, f"{host} is too long for a unique id; give an address instead of a name")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, 0), family=family, backlog=128)
    except OSError as error:
        raise NcclError(
            Result.SYSTEM_ERROR, f"cannot listen on {host}: {error}; give install() another host"
        ) from error
    unique = UniqueId(secrets.token_bytes(32), plain, host, server.getsockname()[1])
    threading.Thread(
        target=_Rendezvous(unique.secret).serve, args=(server,), name="nccl-rendezvous", daemon=True
    ).start()
    return unique


def join(unique: UniqueId, rank: int, size: int) -> tuple[Communicator, str]:
    """Connect with the other ranks of an id, as rank `rank` of `size`; also tells the address they know this one by.

    Raises:
        NcclError: nobody waits at the id's address, or the ranks do not agree, or do not all come.
        TransportError: as `connect_mesh`.
    """
    where = f"the rendezvous of the unique id at {unique.host} port {unique.port}"
    try:
        connection = socket.create_connection((unique.host, unique.port), timeout=STRANGER_S)
    except OSError as error:
        why = f"{where} cannot be reached ({error}); the process that made the id must still run"
        raise NcclError(Result.REMOTE_ERROR, why) from error
    with connection:
        host = connection.getsockname()[0]
        with closing(Listener(host)) as listener:
            address = join_address(host, listener.port)
            try:
                connection.sendall(_seal({"rank": rank, "size": size, "address": address}, unique.secret))
                connection.settimeout(RENDEZVOUS_S + STRANGER_S)  # it says itself who did not come
                answer = _unseal(_read_line(connection), unique.secret)
            except (OSError, ValueError) as error:
                raise NcclError(Result.REMOTE_ERROR, f"{where} gave no answer: {error}") from error
            if "addresses" not in answer:
                raise NcclError(Result.REMOTE_ERROR, f"rank {rank} of {size} cannot join: {answer.get('error')}")
            return connect(listener, unique.secret, rank, answer["addresses"], plain=unique.plain), host


def connect(listener: Listener, secret: bytes, rank: int, addresses: list[str], *, plain: bool) -> Communicator:
    """Make the mesh of the ranks that share `secret`.

    Raises:
        TransportError: as `connect_mesh`.
    """
    agreement = hashlib.sha256(json.dumps(addresses).encode()).digest()
    member = Membership(SESSION, 0, rank, len(addresses), secret, agreement)
    security = Plain() if plain else certified(secret, rank)
    return connect_mesh(listener, member, addresses, CONNECT_S, security=security)


def certified(secret: bytes, rank: int) -> Tls:
    """A certificate for a rank by the authority that all who know `secret` have in common."""
    authority = Authority("the ranks of a unique id", secret=secret, lifetime=LIFETIME)
    return Tls(*authority.issue_rank(rank, SESSION, LIFETIME), authority.pem)


def split(parent: Communicator, host: str, color: int | None, key: int, *, plain: bool) -> Communicator | None:
    """Make one mesh of the ranks of each color, a collective of `parent`; None for the rank that gives no color.

    A mesh of its own has links of its own: its ranks' calls are in no order with those of the parent. Its secret is
    that of its first rank, which travels over the links of the parent.

    Args:
        host: the address that the others reach this rank at.
        key: ranks are numbered by key, then by their rank in the parent.

    Raises:
        TransportError: as `connect_mesh`.
    """
    with closing(Listener(host)) as listener:
        mine = {
            "color": color,
            "key": key,
            "address": join_address(host, listener.port),
            "secret": secrets.token_hex(32),
        }
        rows = _gather(parent, mine)
        if color is None:
            return None
        members = [rank for rank, row in enumerate(rows) if row["color"] == color]
        members.sort(key=lambda rank: (rows[rank]["key"], rank))
        secret = bytes.fromhex(rows[members[0]]["secret"])
        addresses = [rows[member]["address"] for member in members]
        return connect(listener, secret, members.index(parent.rank), addresses, plain=plain)


def _gather(parent: Communicator, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Everyone's row, by rank."""
    text = json.dumps(mine).encode()
    for rank in range(parent.size):
        if rank != parent.rank:
            parent.send(text, rank)
    return [
        json.loads(text if rank == parent.rank else parent.recv(rank, parent.deadline_s)) for rank in range(parent.size)
    ]


class _Rendezvous:
    """Where the ranks of one id meet: collects their addresses and tells all to all."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._changed = threading.Condition()
        self._addresses: dict[int, str] = {}
        self._size = 0
        self._error = ""
        self._ends = time.monotonic() + RENDEZVOUS_S

    def serve(self, server: socket.socket) -> None:
        """Answer everyone who comes until all ranks have met, or it is too late; a silent stranger delays nobody."""
        with server:
            server.settimeout(0.2)
            while not self._is_over():
                with suppress(TimeoutError, OSError):
                    connection, _ = server.accept()
                    threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _is_over(self) -> bool:
        met = len(self._addresses) == self._size > 0
        return met or bool(self._error) or time.monotonic() > self._ends

    def _receive(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError):  # a stranger gets no answer
            connection.settimeout(STRANGER_S)
            told = _unseal(_read_line(connection), self._secret)
            answer = self._meet(told["rank"], told["size"], told["address"])
            connection.sendall(_seal(answer, self._secret))

    def _meet(self, rank: int, size: int, address: str) -> dict[str, Any]:
        """Note a rank, and wait until all are there."""
        with self._changed:
            if self._size not in (0, size):
                self._error = f"it was told that there are {size} ranks, another one {self._size}"
            elif rank in self._addresses:
                self._error = f"two processes say that they are rank {rank}"
            else:
                self._size = size
                self._addresses[rank] = address
            self._changed.notify_all()
            self._changed.wait_for(self._is_over, max(0.0, self._ends - time.monotonic()))
            if self._error:
                return {"error": self._error}
            missing = [str(each) for each in range(size) if each not in self._addresses]
            if missing:
                return {"error": f"rank {', '.join(missing)} did not come within {RENDEZVOUS_S:g} s"}
            return {"addresses": [self._addresses[each] for each in range(size)]}


def _seal(content: dict[str, Any], secret: bytes) -> bytes:
    """A line that only those can make who know the secret: HMAC, JSON."""
    text = json.dumps(content).encode()
    return hmac.digest(secret, text, "sha256").hex().encode() + text + b"\n"


def _unseal(line: bytes, secret: bytes) -> dict[str, Any]:
    """Read such a line.

    Raises:
        ValueError: somebody else made it.
    """
    seal, text = line[:64], line[64:].rstrip(b"\n")
    if not hmac.compare_digest(hmac.digest(secret, text, "sha256").hex().encode(), seal):
        raise ValueError("it does not know the secret of the unique id")
    content: dict[str, Any] = json.loads(text)
    return content


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        if len(line) > MAX_LINE or not (data := connection.recv(4096)):
            raise ValueError("the connection ended, or said too much")
        line += data
    return line
