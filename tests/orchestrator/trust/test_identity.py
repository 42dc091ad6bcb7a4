"""The mesh's certificate on disk, and what it signs."""

from __future__ import annotations

import datetime
import errno
import os
from pathlib import Path

import pytest
from cryptography import x509

from motley.orchestrator.trust import identity
from motley.orchestrator.trust.identity import IdentityError, load_identity


def test_it_is_created_once_and_kept(tmp_path: Path) -> None:
    first = load_identity(tmp_path / "a" / "b")
    again = load_identity(tmp_path / "a" / "b")
    assert again == first
    assert first.join_token("secret") == f"secret.{first.fingerprint}"
    assert len(first.fingerprint) == 64
    assert load_identity(tmp_path / "other").fingerprint != first.fingerprint
    certificate = x509.load_pem_x509_certificate(first.certificate_pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["motley"]
    assert b"PRIVATE" not in first.certificate_pem


@pytest.mark.skipif(os.name == "nt", reason="Windows has no file modes")
def test_secrets_are_private(tmp_path: Path) -> None:
    load_identity(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["identity.pem"]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_a_certificate_near_its_end_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "LIFETIME", datetime.timedelta(days=29))
    old = load_identity(tmp_path)
    monkeypatch.undo()
    new = load_identity(tmp_path)
    assert new.certificate_pem != old.certificate_pem
    assert load_identity(tmp_path) == new


@pytest.mark.parametrize("content", [b"", b"garbage", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "identity.pem").write_bytes(content)
    with pytest.raises(IdentityError, match=r"identity\.pem is damaged"):
        load_identity(tmp_path)


def test_a_lost_key_is_noticed(tmp_path: Path) -> None:
    certificate = load_identity(tmp_path).certificate_pem
    (tmp_path / "identity.pem").write_bytes(certificate)
    with pytest.raises(IdentityError, match=r"identity\.pem is damaged"):
        load_identity(tmp_path)


def test_a_folder_on_a_full_disk_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, _: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(identity, "write_private", full)
    with pytest.raises(IdentityError) as told:
        load_identity(tmp_path)
    why = "No space left on device; free space there, or choose another folder with --state"
    assert str(told.value) == f"cannot keep the mesh's identity in {tmp_path}: {why}"
