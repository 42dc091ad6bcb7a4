"""What proves who is who: the mesh's certificate, its join token, the API key. Kept in the state folder.

The certificate is self-signed; a daemon trusts it because the join token it was given carries the certificate's
SHA-256 fingerprint: ``<secret>.<fingerprint>``. It compares the certificate the server shows with that, uses it as
its only root (for the name "motley"), and only then sends the secret.
"""

from __future__ import annotations

import contextlib
import datetime
import hmac
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

SERVER_NAME = "motley"
"""The name in the certificate, wherever the server really is."""
LIFETIME = datetime.timedelta(days=3650)
RENEW_BEFORE = datetime.timedelta(days=30)
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
        certificate = x509.load_pem_x509_certificate(self.certificate_pem)
        return f"{self.secret}.{certificate.fingerprint(hashes.SHA256()).hex()}"

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
        if pem is None or _expires_soon(x509.load_pem_x509_certificate(pem)):
            pem = _create_certificate()
            _write_private(path, pem)
        certificate = x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.PEM)
        key = serialization.load_pem_private_key(pem, password=None)
        join_secret = _secret(state_dir / "join_secret", secret)
    except ValueError as error:
        raise IdentityError(f"{path} is damaged ({error}); delete it, then let every node join anew") from error
    except OSError as error:
        raise IdentityError(
            f"cannot keep the mesh's identity in {state_dir} ({error}); choose another folder"
        ) from error
    return Identity(
        certificate_pem=certificate,
        key_pem=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        secret=join_secret,
    )


def load_api_key(state_dir: Path) -> str:
    """The API key kept in `state_dir`, created on the first call."""
    return _secret(state_dir / "api_key", None)


def _secret(path: Path, given: str | None) -> str:
    kept = None if given is not None else _read(path)
    if given is None and kept is None:
        given = secrets.token_hex(16)
        _write_private(path, given.encode())
    secret = given if given is not None else (kept or b"").decode(errors="replace").strip()
    if not _SECRET.fullmatch(secret):
        source = "the token given" if kept is None else str(path)
        raise IdentityError(f'{source} must be at least 8 letters, digits, "_" or "-"')
    return secret


def _expires_soon(certificate: x509.Certificate) -> bool:
    return certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC) < RENEW_BEFORE


def _create_certificate() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # other machines' clocks differ
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read (on Windows: as the folder allows), whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
