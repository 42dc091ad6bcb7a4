"""What protects a link: mutual TLS 1.3 from given certificates, or nothing, when that is asked for by name.

Either way a peer must then prove that it holds the session's secret (`motley.transport.links.wire.Handshake`). Under
TLS its certificate must also carry the DNS name ``rank-<rank>.<session>`` of the rank that it claims to be.
"""

from __future__ import annotations

import socket
import ssl
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import UsageError

CHUNK = 64 << 10
"""Plain bytes encrypted, and room for those received, at a time: four TLS records, which stay in the cache."""


class Stream(Protocol):
    """What a link talks through: a non-blocking socket, or something that behaves like one.

    A stream that holds bytes back also has ``ready_in() -> float | None``: the seconds until some of them can be read,
    0 if that is now, None if it holds none. The system's poll knows nothing of them.
    """

    def send(self, data: memoryview, /) -> int:
        """Take some of `data`; after BlockingIOError the caller must offer the same bytes again."""
        ...

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """Take up to `size` bytes of what has come; no bytes are the end. BlockingIOError: nothing is there."""
        ...

    def recv_into(self, buffer: memoryview, size: int = 0, /) -> int:
        """Like `recv`, but write to the caller's memory, and return how many bytes were written."""
        ...

    def fileno(self) -> int:
        """The descriptor to wait for."""
        ...

    def shutdown(self, how: int, /) -> None:
        """Shut the stream down as ``socket.shutdown`` does."""
        ...

    def close(self) -> None:
        """Give back what the system holds."""
        ...


@dataclass(frozen=True)
class Plain:
    """Nothing is encrypted: for ranks of one machine, or a network that is protected by other means."""

    def protect(self, connection: socket.socket, *, dials: bool) -> Stream:
        """The stream to use instead of `connection`: itself. `dials`: this rank has dialled."""
        return connection

    def authenticate(self, stream: Stream) -> Collection[str] | None:
        """The DNS names that the peer has proven to own: None, as there is no such proof here."""
        return None


class Tls:
    """Mutual TLS 1.3: both ends show a certificate that `authority` has signed."""

    def __init__(self, certificate: Path | bytes, key: Path | bytes, authority: Path | bytes) -> None:
        """
        Args:
            certificate: the rank's own, in PEM, as a file or as its content; those that have signed it may follow.
            key: the certificate's private key, likewise.
            authority: the certificates of which one must have signed the peers', likewise.

        Raises:
            UsageError: they cannot be read or do not fit each other.
        """
        self._contexts = {dials: ssl.SSLContext(_PROTOCOL[dials]) for dials in (False, True)}
        with tempfile.TemporaryDirectory(prefix="motley-") as private:  # the module ssl reads keys from files only
            try:
                chain, secret, signers = (
                    _as_file(Path(private, name), pem)
                    for name, pem in (("chain", certificate), ("key", key), ("authority", authority))
                )
                for context in self._contexts.values():
                    context.check_hostname = False  # a rank's name is compared once its HELLO has claimed the rank
                    context.verify_mode = ssl.CERT_REQUIRED
                    context.minimum_version = ssl.TLSVersion.TLSv1_3
                    context.load_cert_chain(chain, secret)
                    context.load_verify_locations(signers)
            except OSError as error:
                raise UsageError(f"these certificates cannot be used: {error}") from error
        self._contexts[False].num_tickets = 0  # nothing is ever resumed

    def protect(self, connection: socket.socket, *, dials: bool) -> Stream:
        """The encrypted stream to use instead of `connection`. `dials`: this rank has dialled."""
        return TlsStream(connection, self._contexts[dials], dials=dials)

    def authenticate(self, stream: Stream) -> Collection[str] | None:
        """Go on with the TLS handshake; the DNS names in the peer's certificate when it is done.

        Raises:
            BlockingIOError: the peer has to say more.
            ssl.SSLError: the peer is refused, or has refused us.
        """
        assert isinstance(stream, TlsStream)
        return stream.handshake()


def explain(error: ssl.SSLError) -> str:
    """Why TLS failed, in words for people and for the peer."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    return f"TLS failed: {(error.reason or str(error)).lower().replace('_', ' ')}"


_PROTOCOL = {False: ssl.PROTOCOL_TLS_SERVER, True: ssl.PROTOCOL_TLS_CLIENT}


def _as_file(path: Path, pem: Path | bytes) -> Path:
    if isinstance(pem, Path):
        return pem
    path.write_bytes(pem)
    return path


class TlsStream:
    """A connection whose bytes are encrypted.

    OpenSSL works in memory here, so that one system call moves all the records of a frame; an `ssl.SSLSocket` makes one
    per record to send and two to receive (16 KiB both ways between two spinning processes: 25 us against 32 us).
    OpenSSL's order of ciphers is kept: the module ssl cannot change it for TLS 1.3 before Python 3.15, and where AES is
    in the processor the first one, AES-256-GCM, takes only 0.4 us more than AES-128-GCM for 16 KiB.

    An end of the connection is an end of the stream, close_notify or not: the frames inside say whether it was meant.
    """

    __slots__ = (
        "_arriving",
        "_connection",
        "_leaving",
        "_owed",
        "_peeked",
        "_read",
        "_received",
        "_tls",
        "_unsent",
        "progress",
    )

    def __init__(self, connection: Stream, context: ssl.SSLContext, *, dials: bool) -> None:
        self.progress = 0
        """Encrypted bytes that have come."""
        self._connection = connection
        self._arriving, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arriving, self._leaving, server_side=not dials)
        self._read: Callable[[int, memoryview], int] = self._tls.read  # type: ignore[assignment]  # counts, so used
        self._received = memoryview(bytearray(CHUNK + 1024))
        self._unsent = memoryview(b"")
        self._owed = 0  # plain bytes that are encrypted in `_unsent` and not yet reported as sent
        self._peeked = b""

    def handshake(self) -> list[str]:
        """Go on with the TLS handshake; the DNS names in the peer's certificate when it is done.

        Raises:
            BlockingIOError: the peer has to say more.
            ssl.SSLError: the peer is refused, or has refused us.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                if not self._fill():
                    raise ConnectionResetError("it closed the connection during the TLS handshake") from None
            except ssl.SSLError:
                self._flush()  # the alert that tells the peer
                raise
            else:
                self._flush()
                certificate: dict[str, Any] = dict(self._tls.getpeercert() or {})
                return [name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS"]

    def send(self, data: memoryview | bytes, /) -> int:
        """Take some of `data`, and report it when all of its records have left.

        Raises:
            BlockingIOError: they have not; the caller must offer the same bytes again.
        """
        if not self._owed:
            self._owed = self._tls.write(memoryview(data)[:CHUNK])
        self._flush()
        sent, self._owed = self._owed, 0
        return sent

    def recv_into(self, buffer: memoryview, size: int = 0, /) -> int:
        """Fill `buffer` (or its first `size` bytes) as far as what is there reaches; 0 at the end of the stream.

        Raises:
            BlockingIOError: nothing is there.
            ssl.SSLError: the peer is refused, has refused us, or sends broken records.
        """
        if size:
            buffer = buffer[:size]
        if self._peeked:
            count = min(len(buffer), len(self._peeked))
            buffer[:count] = self._peeked[:count]
            self._peeked = self._peeked[count:]
            return count
        if not self._holds_bytes() and not self._fill():
            return 0
        count = 0
        while count < len(buffer):
            try:
                got = self._read(len(buffer) - count, buffer[count:])  # at most the rest of one record
            except ssl.SSLWantReadError:
                if count or not self._fill():
                    break
            else:
                if not got:
                    break
                count += got
        return count

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """Read up to `size` bytes; with MSG_PEEK they stay."""
        if len(self._peeked) < size:
            room = memoryview(bytearray(size - len(self._peeked)))
            kept, self._peeked = self._peeked, b""
            try:
                kept += bytes(room[: self.recv_into(room)])
            except BlockingIOError:
                if not kept:
                    raise
            finally:
                self._peeked = kept
        data = self._peeked[:size]
        if not flags & socket.MSG_PEEK:
            self._peeked = self._peeked[size:]
        return data

    def ready_in(self) -> float | None:
        """See `Stream`."""
        return 0.0 if self._peeked or self._holds_bytes() else None

    def fileno(self) -> int:
        """See `Stream`."""
        return self._connection.fileno()

    def shutdown(self, how: int, /) -> None:
        """See `Stream`; the records that the peer gets before are whole."""
        self._connection.shutdown(how)

    def close(self) -> None:
        """See `Stream`."""
        self._connection.close()

    def _holds_bytes(self) -> bool:
        return bool(self._arriving.pending or self._tls.pending())

    def _fill(self) -> bool:
        """Read from the connection once; False at its end."""
        count = self._connection.recv_into(self._received)
        self._arriving.write(self._received[:count])
        self.progress += count
        return bool(count)

    def _flush(self) -> None:
        """Send all that is encrypted.

        Raises:
            BlockingIOError: there is no room.
        """
        if self._leaving.pending:
            self._unsent = memoryview(bytes(self._unsent) + self._leaving.read())
        while self._unsent:
            self._unsent = self._unsent[self._connection.send(self._unsent) :]
