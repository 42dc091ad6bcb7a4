"""What proves who is who: the mesh's certificate, its join token, the API key. Kept in the state folder.

The certificate is self-signed; a daemon trusts it because the join token it was given carries the certificate's
SHA-256 fingerprint: ``<secret>.<fingerprint>``. It compares the certificate the server shows with that, uses it as
its only root (for the name "motley"), and only then sends the secret.
"""

from __future__ import annotations

import datetime
import hmac
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from motley.orchestrator.files import write_private
from motley.transport.certificates import Papers, self_signed

SERVER_NAME = "motley"
"""The name in the certificate, wherever the server really is."""
LIFETIME = datetime.timedelta(days=3650)
"""How long the certificate is valid; when it is renewed, every node has to be given a new join token."""
RENEW_BEFORE = datetime.timedelta(days=30)
"""A certificate that is valid for less time than this is renewed when the orchestrator starts."""
_SECRET = re.compile(r"[A-Za-z0-9_-]{8,}")


class IdentityError(Exception):
    """A file of the state folder, or a secret that was given, cannot be used."""


@dataclass(frozen=True)
class Identity:
    """The certificate and private key of the gRPC server, and the secret that lets a node join."""

    certificate_pem: bytes
    key_pem: bytes
    secret: str

    @property
    def join_token(self) -> str:
        """What a node is given to join: the secret, and how it knows the server's certificate."""
        return f"{self.secret}.{Papers(self.certificate_pem, self.key_pem).fingerprint}"

    def admits(self, token: str) -> bool:
        """Whether a node that shows `token` (the secret, or the whole join token) may join. In constant time."""
        secret, _, _ = token.partition(".")
        return hmac.compare_digest(secret.encode(), self.secret.encode())


def load_identity(state_dir: Path, secret: str | None = None) -> Identity:
    """The identity kept in `state_dir`; what is missing is created, a certificate near its end is renewed.

    Args:
        secret: lets nodes join, instead of the one that is kept; at least 8 letters, digits, "_" or "-".

    Raises:
        IdentityError: a file is damaged, the folder cannot be used, or the secret is not usable.
    """
    path = state_dir / "identity.pem"
    try:
        pem = _read(path)
        papers = None if pem is None else Papers.read(pem)
        if papers is None or papers.expires - datetime.datetime.now(datetime.UTC) < RENEW_BEFORE:
            papers = self_signed(SERVER_NAME, LIFETIME)
            write_private(path, papers.certificate + papers.key)
        join_secret = _secret(state_dir / "join_secret", secret)
    except ValueError as error:
        raise IdentityError(f"{path} is damaged ({error}); delete it, then let every node join anew") from error
    except OSError as error:
        raise IdentityError(
            f"cannot keep the mesh's identity in {state_dir} ({error}); choose another folder"
        ) from error
    return Identity(certificate_pem=papers.certificate, key_pem=papers.key, secret=join_secret)


def load_api_key(state_dir: Path) -> str:
    """The API key kept in `state_dir`, created on the first call.

    Raises:
        IdentityError: the file that keeps it holds no usable key.
    """
    return _secret(state_dir / "api_key", None)


def _secret(path: Path, given: str | None) -> str:
    """The secret that is `given`, or else that of the file `path`, which is created if need be.

    Raises:
        IdentityError: it is too short, or has other characters than it may have.
    """
    kept = None if given is not None else _read(path)
    if given is None and kept is None:
        given = secrets.token_hex(16)
        write_private(path, given.encode())
    secret = given if given is not None else (kept or b"").decode(errors="replace").strip()
    if not _SECRET.fullmatch(secret):
        source = "the token given" if kept is None else str(path)
        raise IdentityError(f'{source} must be at least 8 letters, digits, "_" or "-"')
    return secret


def _read(path: Path) -> bytes | None:
    """What a file holds; None if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
