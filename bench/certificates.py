"""Certificates for the ranks of a benchmark: they live as long as it does."""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from motley.transport.wire import certified_name

DAY = datetime.timedelta(days=1)


def issue(session: str, ranks: int) -> list[tuple[bytes, bytes, bytes]]:
    """For each rank the arguments of `motley.transport.Tls`: its certificate, its key and the authority, in PEM."""
    signer = ec.generate_private_key(ec.SECP256R1())
    authority = _sign("authority", signer, signer, x509.BasicConstraints(ca=True, path_length=0))
    issued = []
    for rank in range(ranks):
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.DNSName(certified_name(rank, session))])
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        issued.append((_sign(f"rank {rank}", key, signer, names), secret, authority))
    return issued


def _sign(
    subject: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType
) -> bytes:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name("authority"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
        .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
    )
    return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
