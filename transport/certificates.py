"""Makes X.509 certificates and their keys: self-signed ones for servers, and those of ranks, signed by an authority.

All of them are for TLS, between ranks (`motley.transport.links.security`) and elsewhere, and in PEM. Keys are P-256,
which every TLS library takes, and not encrypted.
"""

from __future__ import annotations

import datetime
import hmac
import ipaddress
from typing import NamedTuple, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from .links.wire import certified_name

LIFETIME = datetime.timedelta(days=3650)
"""How long a certificate is valid, where nobody wants another time."""
CLOCK_SKEW = datetime.timedelta(days=1)
"""By which the clocks of machines may differ: a certificate is valid for so long already when it is made."""
MAX_COMMON_NAME = 64
"""Characters of a subject's common name, by X.509. Nobody here reads it but people: names that count are DNS names."""

PrivateKey = ec.EllipticCurvePrivateKey | Ed25519PrivateKey


class Papers(NamedTuple):
    """A certificate and the private key that belongs to it, in PEM."""

    certificate: bytes
    key: bytes

    @classmethod
    def read(cls, pem: bytes) -> Self:
        """The certificate and the key that lie in `pem` one after the other.

        Raises:
            ValueError: there is no certificate, or no key.
        """
        certificate = x509.load_pem_x509_certificate(pem)
        key = serialization.load_pem_private_key(pem, password=None)
        return cls(_pem(certificate), _key_pem(key))

    @property
    def expires(self) -> datetime.datetime:
        """Until when the certificate is valid."""
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, in 64 hexadecimal digits."""
        return x509.load_pem_x509_certificate(self.certificate).fingerprint(hashes.SHA256()).hex()


def self_signed(name: str, lifetime: datetime.timedelta = LIFETIME) -> Papers:
    """A certificate for the DNS name `name` that nobody else signs: whoever trusts it has it as a root."""
    key = ec.generate_private_key(ec.SECP256R1())
    return Papers(_certificate(name, name, key, key, [name], lifetime, signs=True), _key_pem(key))


class Authority:
    """Signs certificates that all who have its own certificate trust.

    Attributes:
        pem: its own certificate.
    """

    def __init__(self, name: str, *, secret: bytes | None = None, lifetime: datetime.timedelta = LIFETIME) -> None:
        """
        Args:
            name: for people.
            secret: all who know it, and the name, make the same authority: what one signs, the others trust. None: a
                new one, whose key is gone with this object.
            lifetime: of its own certificate.
        """
        self._name = name
        self._key: PrivateKey
        if secret is None:
            self._key = ec.generate_private_key(ec.SECP256R1())
        else:  # any 32 bytes are a key of this kind
            self._key = Ed25519PrivateKey.from_private_bytes(hmac.digest(secret, b"certificate authority", "sha256"))
        self.pem = _certificate(name, name, self._key, self._key, [], lifetime, signs=True)

    @classmethod
    def of(cls, papers: Papers) -> Self:
        """The authority that has these papers, as `self_signed` makes them.

        Raises:
            ValueError: they are not an authority's.
        """
        certificate = x509.load_pem_x509_certificate(papers.certificate)
        key = serialization.load_pem_private_key(papers.key, password=None)
        common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        if not isinstance(key, ec.EllipticCurvePrivateKey | Ed25519PrivateKey) or not common:
            raise ValueError("the certificate is not one that signs others")
        made = cls.__new__(cls)
        made._name, made._key, made.pem = str(common[0].value), key, papers.certificate
        return made

    def issue(self, *names: str, lifetime: datetime.timedelta = LIFETIME) -> Papers:
        """A certificate for these DNS names and IP addresses, with a new key. A negative `lifetime`: it has expired so
        long ago."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = names[0] if names else "nobody"
        return Papers(_certificate(subject, self._name, key, self._key, names, lifetime, signs=False), _key_pem(key))

    def issue_rank(self, rank: int, session: str, lifetime: datetime.timedelta = LIFETIME) -> Papers:
        """The certificate by which the peers of rank `rank` know it on links of `session`, and its key."""
        return self.issue(certified_name(rank, session), lifetime=lifetime)


def _certificate(
    subject: str,
    issuer: str,
    key: PrivateKey,
    signer: PrivateKey,
    names: tuple[str, ...] | list[str],
    lifetime: datetime.timedelta,
    *,
    signs: bool,
) -> bytes:
    """Sign a certificate of `key` with `signer`; `signs`: `key` may sign others, which sign none."""
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + lifetime) - CLOCK_SKEW)
        .not_valid_after(now + lifetime)
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
    )
    # What newer clients want to see (Python's own, from 3.13 on): who signed with which key, and what a key is for.
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    builder = builder.add_extension(issued_by, critical=False)
    builder = builder.add_extension(_usage(signs), critical=True)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), False)
    if not signs:  # ranks dial and are dialled
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = builder.add_extension(both, critical=False)
    return _pem(builder.sign(signer, None if isinstance(signer, Ed25519PrivateKey) else hashes.SHA256()))


def _usage(signs: bool) -> x509.KeyUsage:
    """What a key is for: TLS, and signing certificates if it `signs` any."""
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def names_in_certificates(name: str) -> list[str]:
    """A machine's name as certificates have it (IDNA where it is not ASCII); none where they cannot have it."""
    try:
        return [name.encode("idna").decode()] if name else []
    except UnicodeError:
        return []


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:MAX_COMMON_NAME])])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: PrivateKeyTypes) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
