"""The certificates with which a session's ranks know each other: an authority that lives for one plan only.

Each rank gets a certificate for the DNS name ``rank-<rank>.<session>``; the authority's key is forgotten at once, so
that there will never be others. A session that may grow has certificates of as many ranks as there may be; what is not
in use is kept by the orchestrator alone, in memory, as long as the session lives.
"""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from motley.protocol.mesh_pb2 import Credentials

LIFETIME = datetime.timedelta(days=3650)
CLOCK_SKEW = datetime.timedelta(days=1)
"""By which the clocks of nodes may differ."""
_USES = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])


def issue_credentials(session: str, size: int) -> list[Credentials]:
    """A new authority's certificates for all ranks of a session, by rank."""
    authority_key = ec.generate_private_key(ec.SECP256R1())
    issuer = _name(f"session {session}")
    authority = _pem(
        _certificate(issuer, issuer, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    issued = []
    for rank in range(size):
        key = ec.generate_private_key(ec.SECP256R1())
        name = f"rank-{rank}.{session}"
        certificate = (
            _certificate(_name(name), issuer, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(_USES, critical=False)
            .sign(authority_key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        issued.append(Credentials(authority=authority, certificate=_pem(certificate), key=private))
    return issued


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + LIFETIME)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
