"""What proves who the mesh is: its certificate, kept in the state folder, which signs the certificate of its API.

It is self-signed; a daemon trusts it because the join token it was given carries the certificate's SHA-256 fingerprint:
``<secret>.<fingerprint>``. It compares the certificate the server shows with that, uses it as its only root (for the
name "motley"), and only then sends the secret.
"""

from __future__ import annotations

import datetime
import errno
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from motley.protocol.files import write_private
from motley.transport.certificates import Authority, Papers, self_signed

SERVER_NAME = "motley"
"""The name in the certificate, wherever the server really is."""
LIFETIME = datetime.timedelta(days=3650)
"""How long the certificate is valid; when it is renewed, every node has to be given a new join token."""
RENEW_BEFORE = datetime.timedelta(days=30)
"""A certificate that is valid for less time than this is renewed when the orchestrator starts."""
API_LIFETIME = datetime.timedelta(days=90)
"""How long the API's certificate is valid, of which nobody keeps a copy: it is renewed while the orchestrator runs."""


class IdentityError(Exception):
    """A file of the state folder cannot be used."""


@dataclass(frozen=True)
class Identity:
    """The certificate and private key of the gRPC server, which are those of the mesh's authority, too."""

    certificate_pem: bytes
    key_pem: bytes

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, in 64 hexadecimal digits."""
        return Papers(self.certificate_pem, self.key_pem).fingerprint

    def join_token(self, secret: str) -> str:
        """What a node is given to join: a secret, and how it knows the server's certificate."""
        return f"{secret}.{self.fingerprint}"

    def issue_api(self, addresses: Iterable[str]) -> Papers:
        """A certificate for the API, at these addresses and names, and by the name `SERVER_NAME`."""
        authority = Authority.of(Papers(self.certificate_pem, self.key_pem))
        return authority.issue("motley-api", SERVER_NAME, *addresses, lifetime=API_LIFETIME)


def load_identity(state_dir: Path) -> Identity:
    """The identity kept in `state_dir`; what is missing is created, a certificate near its end is renewed.

    Raises:
        IdentityError: the file is damaged, or the folder cannot be used.
    """
    path = state_dir / "identity.pem"
    try:
        pem = _read(path)
        papers = None if pem is None else Papers.read(pem)
        if papers is None or papers.expires - datetime.datetime.now(datetime.UTC) < RENEW_BEFORE:
            papers = self_signed(SERVER_NAME, LIFETIME)
            write_private(path, papers.certificate + papers.key)
    except ValueError as error:
        raise IdentityError(f"{path} is damaged ({error}); delete it, then let every node join anew") from error
    except OSError as error:
        raise not_kept("the mesh's identity", state_dir, error) from error
    return Identity(certificate_pem=papers.certificate, key_pem=papers.key)


def not_kept(what: str, state_dir: Path, error: OSError) -> IdentityError:
    """That something cannot be kept in the state folder, and what to do."""
    room = "free space there, or " if error.errno == errno.ENOSPC else ""
    why = error.strerror or error
    return IdentityError(f"cannot keep {what} in {state_dir}: {why}; {room}choose another folder with --state")


def _read(path: Path) -> bytes | None:
    """What a file holds; None if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
