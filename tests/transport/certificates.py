"""Certificates for tests: an authority of its own, and one certificate per rank of a session."""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from motley.transport import Tls

DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates; `pem` is its own."""

    def __init__(self, name: str = "the mesh") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        constraint = x509.BasicConstraints(ca=True, path_length=0)
        builder = _builder(self._name, self._name, self._key).add_extension(constraint, critical=True)
        self.pem = _pem(builder.sign(self._key, hashes.SHA256()))

    def issue(self, *names: str, days: int = 1) -> tuple[bytes, bytes]:
        """A certificate with these DNS names, and its key, in PEM. Negative `days`: it has expired so long ago."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a rank")])
        builder = _builder(subject, self._name, key, days)
        if names:
            alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
            builder = builder.add_extension(alternatives, critical=False)
        certificate = _pem(builder.sign(self._key, hashes.SHA256()))
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return certificate, secret

    def tls(self, rank: int, session: str = "test") -> Tls:
        """What rank `rank` of a session gives to `connect_mesh`."""
        return Tls(*self.issue(f"rank-{rank}.{session}"), self.pem)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int = 1
) -> x509.CertificateBuilder:
    until = datetime.datetime.now(datetime.UTC) + days * DAY
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(until - 2 * DAY)
        .not_valid_after(until)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
