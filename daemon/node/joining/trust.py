"""Trusting an orchestrator by its join token: ``<secret>.<sha256 of its certificate>``.

The token travels by hand, so it can vouch for the certificate: the daemon fetches that over an unverified TLS
connection, compares its fingerprint, and from then on trusts this one certificate and nothing else. The secret is
sent only afterwards, over the verified channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import socket
import ssl
import threading
from dataclasses import dataclass
from typing import NamedTuple

import grpc.aio

from motley.protocol import MESSAGE_BYTES
from motley.protocol.address import JOIN_PORT, join_address

GRPC = "h2"
"""The protocol of TLS that gRPC speaks; an orchestrator's HTTPS port speaks another."""
NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
"""What OpenSSL, by its version, calls an answer that is no TLS."""
CERTIFICATE_NAME = "motley"
"""The name in the orchestrator's certificate; addresses at home change too often to be in it."""
CONNECT_S = 10.0
NAME_S = 5.0
"""A name that has not been looked up after so many seconds will not be."""


class TrustError(Exception):
    """The orchestrator cannot be reached or is not the one that the token was made by."""


@dataclass(frozen=True)
class JoinToken:
    """What lets a node join.

    Attributes:
        secret: proves to the orchestrator that this node may.
        fingerprint: of the orchestrator's certificate, SHA-256 in hex digits.
    """

    secret: str
    fingerprint: str

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Read a token as `motley up` prints it.

        Raises:
            TrustError: it is none.
        """
        secret, _, fingerprint = text.strip().partition(".")
        if not secret or len(fingerprint) != 64 or not all(c in "0123456789abcdef" for c in fingerprint):
            raise TrustError("that is not a join token; copy the whole line that `motley up` printed")
        return cls(secret, fingerprint)


class Trusted(NamedTuple):
    """An orchestrator that is the one that a token was made by.

    Attributes:
        certificate: the mesh's, PEM.
    """

    channel: grpc.aio.Channel
    certificate: str


class NotThere(TrustError):
    """Nobody answers where the orchestrator should be: it may be there later."""


async def check_name(host: str) -> None:
    """Make sure that a host's name is known here; an address always is.

    Raises:
        TrustError: it is not, or nobody says so within `NAME_S`.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()

    def tell(trouble: str) -> None:
        if not answer.done():
            answer.set_result(trouble)

    def look_up() -> None:
        trouble = ""
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            trouble = error.strerror or str(error)
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(tell, trouble)

    # Not in one of the loop's own threads: those are waited for in the end, and a look-up may take half a minute.
    threading.Thread(target=look_up, name=f"look up {host}", daemon=True).start()
    try:
        async with asyncio.timeout(NAME_S):
            trouble = await answer
    except TimeoutError:
        trouble = f"no answer of the name service within {NAME_S:g} s"
    if trouble:
        raise TrustError(
            f"this machine does not know the name {host!r} ({trouble}); write the orchestrator's IP address instead"
        )


async def open_channel(host: str, port: int, token: JoinToken) -> Trusted:
    """An encrypted channel to the orchestrator that made `token`.

    Raises:
        NotThere: nobody answers there within `CONNECT_S`.
        TrustError: its name is not known, or somebody else answers.
    """
    certificate = await fetch_certificate(host, port)
    found = fingerprint_of(certificate)
    if not hmac.compare_digest(found, token.fingerprint):
        raise TrustError(
            f"the orchestrator at {host}:{port} is not the one this join token is from, by its certificate; copy the"
            " line that its `motley up` prints now"
        )
    return Trusted(pinned_channel(host, port, certificate), ssl.DER_cert_to_PEM_cert(certificate))


async def fetch_certificate(host: str, port: int) -> bytes:
    """The certificate (DER) that is shown at an address, by whoever is there: it is still to be checked.

    Raises:
        TrustError: the name is not known, or nobody answers there within `CONNECT_S`.
    """
    await check_name(host)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the fingerprint is checked instead
    context.set_alpn_protocols([GRPC])
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
            try:
                secured = writer.get_extra_info("ssl_object")
                certificate: bytes = secured.getpeercert(binary_form=True)
                protocol = secured.selected_alpn_protocol()
            finally:
                writer.transport.abort()  # to part properly takes as long as the other side likes
    except TimeoutError:
        raise NotThere(
            f"no answer from {host}:{port} within {CONNECT_S:.0f} s; is the machine on, and does its firewall "
            f"let port {port} in?"
        ) from None
    except (ssl.SSLEOFError, ConnectionResetError):
        raise NotThere(
            f"{host}:{port} hung up; if it is a Motley orchestrator, it has more connections than it takes, or is "
            "ending: try again in a moment"
        ) from None
    except ssl.SSLError as error:
        if error.reason in NO_TLS:
            raise _not_where_machines_join(host, port, "does not speak TLS") from error
        raise TrustError(f"{host}:{port} answers, but not as a Motley orchestrator ({error.reason})") from error
    except OSError as error:
        raise NotThere(
            f"cannot reach an orchestrator at {host}:{port} ({error.strerror or error}); is `motley up` running there?"
        ) from error
    if protocol != GRPC:
        raise _not_where_machines_join(host, port, "does not speak gRPC")
    return certificate


def _not_where_machines_join(host: str, port: int, why: str) -> TrustError:
    """The error to raise where somebody else listens than for machines that join; `why` that is known."""
    return TrustError(
        f"{host}:{port} answers, but is not where machines join ({why}): it may be the port of the page and the API."
        f" Machines join at {join_address(host, JOIN_PORT)}, unless `motley up` prints another address (--port)"
    )


def pinned_channel(host: str, port: int, certificate: bytes) -> grpc.aio.Channel:
    """An encrypted channel to whoever has the key of a certificate (DER)."""
    return grpc.aio.secure_channel(
        join_address(host, port),
        grpc.ssl_channel_credentials(ssl.DER_cert_to_PEM_cert(certificate).encode()),
        options=[
            ("grpc.ssl_target_name_override", CERTIFICATE_NAME),
            ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ],
    )


def fingerprint_of(certificate: bytes) -> str:
    """SHA-256 of a certificate (DER), in hex digits."""
    return hashlib.sha256(certificate).hexdigest()
