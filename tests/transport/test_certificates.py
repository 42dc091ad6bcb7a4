"""What is in certificates, and who trusts whom. That TLS takes them is tested by test_security.py."""

from __future__ import annotations

import datetime

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from motley.transport.certificates import (
    CLOCK_SKEW,
    LIFETIME,
    Authority,
    Papers,
    names_in_certificates,
    self_signed,
)

DAY = datetime.timedelta(days=1)


def load(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)


def names(pem: bytes) -> list[str]:
    extension = load(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return extension.value.get_values_for_type(x509.DNSName)


def test_a_self_signed_certificate_is_its_own_root_for_its_name() -> None:
    papers = self_signed("motley")
    certificate = load(papers.certificate)
    certificate.verify_directly_issued_by(certificate)
    assert names(papers.certificate) == ["motley"]
    assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_certificate_and_its_key_are_read_back_from_one_file() -> None:
    papers = self_signed("motley")
    assert Papers.read(papers.certificate + papers.key) == papers
    assert len(papers.fingerprint) == 64
    for half in papers:
        with pytest.raises(ValueError, match="no BEGIN"):
            Papers.read(half)


def test_a_rank_is_certified_by_its_sessions_authority_only() -> None:
    ours, others = Authority("ours"), Authority("ours")
    papers = ours.issue_rank(2, "abc")
    assert names(papers.certificate) == ["rank-2.abc"]
    certificate = load(papers.certificate)
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    certificate.verify_directly_issued_by(load(ours.pem))
    with pytest.raises(InvalidSignature):
        certificate.verify_directly_issued_by(load(others.pem))


def test_all_who_know_a_secret_have_the_same_authority() -> None:
    one, another, stranger = (Authority("ranks", secret=secret) for secret in (b"secret", b"secret", b"another"))
    certificate = load(one.issue_rank(0, "abc").certificate)
    certificate.verify_directly_issued_by(load(another.pem))
    with pytest.raises(InvalidSignature):
        certificate.verify_directly_issued_by(load(stranger.pem))


@pytest.mark.parametrize("lifetime", [LIFETIME, 2 * DAY, -DAY])
def test_a_certificate_is_valid_as_long_as_it_shall_be(lifetime: datetime.timedelta) -> None:
    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    papers = Authority("ours").issue("a name", lifetime=lifetime)
    after = datetime.datetime.now(datetime.UTC)
    assert before <= papers.expires - lifetime <= after
    begins = load(papers.certificate).not_valid_before_utc
    assert begins <= min(papers.expires, after) - CLOCK_SKEW


def test_names_may_be_longer_than_a_common_name() -> None:
    assert names(Authority("a" * 100).issue("b" * 200).certificate) == ["b" * 200]


@pytest.mark.parametrize(
    ("machine", "named"),
    [
        ("den", ["den"]),
        ("BÜRO-PC", ["xn--bro-pc-3ya"]),
        ("192.168.1.5", ["192.168.1.5"]),
        ("fe80::1", ["fe80::1"]),
        ("", []),
        ("a..b", []),
        ("x" * 64, []),
    ],
)
def test_any_name_of_a_machine_is_named_or_left_out(machine: str, named: list[str]) -> None:
    """Windows allows names that are not ASCII."""
    assert names_in_certificates(machine) == named
    Authority("mesh").issue("localhost", *named)
