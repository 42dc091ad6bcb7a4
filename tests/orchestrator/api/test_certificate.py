"""The API's certificate is renewed while the orchestrator runs."""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from motley.orchestrator.api.access.certificate import ApiCertificate
from motley.orchestrator.trust import identity
from motley.orchestrator.trust.identity import load_identity
from motley.transport.certificates import Authority


async def shown(context: ssl.SSLContext) -> str:
    """The certificate that a server shows a client now."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))


def addresses_in(pem: str) -> set[str]:
    names = x509.load_pem_x509_certificate(pem.encode()).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return {str(address) for address in names.value.get_values_for_type(x509.IPAddress)}


async def test_it_follows_the_addresses_and_ends_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ["192.168.1.10"]
    made = ApiCertificate(load_identity(tmp_path), tmp_path, lambda: addresses)
    first = await shown(made.context)
    assert addresses_in(first) == {"192.168.1.10"}
    made.renew()
    assert await shown(made.context) == first, "nothing has changed"
    addresses.append("fd00::1")
    made.renew()
    second = await shown(made.context)
    assert addresses_in(second) == {"192.168.1.10", "fd00::1"}
    monkeypatch.setattr("motley.orchestrator.api.access.certificate.API_LIFETIME", identity.API_LIFETIME * 4)
    made.renew()
    assert await shown(made.context) != second, "it would have ended in less than a third of its time"
    if os.name != "nt":
        assert (tmp_path / "api.pem").stat().st_mode & 0o777 == 0o600


async def test_files_that_were_given_are_loaded_again_when_they_change(tmp_path: Path) -> None:
    authority, files = Authority("a company"), (tmp_path / "own.crt", tmp_path / "own.key")

    def write(at: datetime.datetime) -> bytes:
        papers = authority.issue("motley.example")
        for file, content in zip(files, papers, strict=True):
            file.write_bytes(content)
            os.utime(file, (at.timestamp(), at.timestamp()))
        return papers.certificate

    now = datetime.datetime.now()
    first = write(now)
    made = ApiCertificate(load_identity(tmp_path), tmp_path, list, files)
    assert made.trusted == (await shown(made.context)).encode() == first
    second = write(now + datetime.timedelta(seconds=5))
    made.renew()
    assert made.trusted == (await shown(made.context)).encode() == second
