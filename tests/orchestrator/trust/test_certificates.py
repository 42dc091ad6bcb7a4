"""A session's certificates: TLS 1.3 between its ranks works, and with anybody else's it does not."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from motley.orchestrator.trust.certificates import SessionAuthority, issue_credentials
from motley.protocol.mesh_pb2 import Credentials
from motley.transport.certificates import Authority, Papers
from motley.transport.links.wire import certified_name


def context(folder: Path, credentials: Credentials, server: bool) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    chain = folder / "chain.pem"
    chain.write_bytes(credentials.certificate + credentials.key)
    made.load_cert_chain(chain)
    made.load_verify_locations(cadata=credentials.authority.decode())
    return made


def shake_hands(folder: Path, dialler: Credentials, listener: Credentials) -> tuple[str, str]:
    """The DNS names that both ends have proven, the dialler's first."""
    towards_listener, towards_dialler = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context(folder, dialler, False).wrap_bio(towards_dialler, towards_listener)
    server = context(folder, listener, True).wrap_bio(towards_listener, towards_dialler, server_side=True)
    done = set[ssl.SSLObject]()
    for _ in range(5):
        for side in (client, server):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                pass
    assert done == {client, server}
    assert client.version() == "TLSv1.3"
    names = []
    for side in (server, client):
        shown = side.getpeercert()
        assert shown is not None
        ((kind, name),) = shown["subjectAltName"]
        assert kind == "DNS"
        names.append(str(name))
    return names[0], names[1]


def test_ranks_of_a_session_know_each_other_by_name(tmp_path: Path) -> None:
    zero, one, two = issue_credentials("abc", 3)
    assert shake_hands(tmp_path, two, zero) == ("rank-2.abc", "rank-0.abc")
    assert one.authority == zero.authority


def test_a_session_that_grows_has_a_certificate_issued_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued: list[int] = []
    issue = Authority.issue_rank

    def counted(self: Authority, rank: int, session: str) -> Papers:
        issued.append(rank)
        return issue(self, rank, session)

    monkeypatch.setattr(Authority, "issue_rank", counted)
    authority = SessionAuthority("abc")
    assert issued == []
    seven, zero = authority.of(7), authority.of(0)
    assert (authority.of(7), issued) == (seven, [7, 0])
    assert shake_hands(tmp_path, seven, zero) == ("rank-7.abc", "rank-0.abc")


def test_another_session_of_the_same_name_is_a_stranger(tmp_path: Path) -> None:
    ours, theirs = issue_credentials("abc", 2)[0], issue_credentials("abc", 2)[1]
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(tmp_path, theirs, ours)


def test_the_transport_looks_for_the_names_that_are_issued(tmp_path: Path) -> None:
    names = shake_hands(tmp_path, *issue_credentials("abc", 2))
    assert names == (certified_name(0, "abc"), certified_name(1, "abc"))
