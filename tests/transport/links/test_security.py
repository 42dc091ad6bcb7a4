from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.transport import (
    Algorithm,
    Communicator,
    Listener,
    Membership,
    PeerTimeout,
    Plain,
    ProtocolError,
    Tls,
    UsageError,
    WireFormat,
    connect_mesh,
)
from motley.transport.links.link import Link, wait_ready
from motley.transport.links.security import CHUNK, TlsStream

from ..certificates import Authority

MakeMember = Callable[..., Membership]
Run = Callable[..., list[Any]]

AUTHORITY = Authority()


def total(communicator: Communicator) -> float:
    buffer = np.full(5000, communicator.rank + 1, np.float32)
    communicator.all_reduce(buffer)
    return float(buffer[-1])


# -- streams -----------------------------------------------------------------------------------------------------------


class Pair:
    """Two ends of a TLS stream over a connection that takes and gives at most `sip` bytes at a time."""

    def __init__(self, sip: int = 1 << 20) -> None:
        self.sockets = socket.socketpair()
        for end in self.sockets:
            end.setblocking(False)
        self.sip = sip
        self.ends = [
            tls.protect(Sipping(end, self), dials=not index)  # type: ignore[arg-type]
            for index, (tls, end) in enumerate(zip((AUTHORITY.tls(1), AUTHORITY.tls(0)), self.sockets, strict=True))
        ]
        self.names: list[list[str] | None] = [None, None]
        while None in self.names:
            for index, end in enumerate(self.ends):
                assert isinstance(end, TlsStream)
                with suppress(BlockingIOError):
                    self.names[index] = end.handshake()

    def __enter__(self) -> tuple[Any, Any]:
        return self.ends[0], self.ends[1]

    def __exit__(self, *error: object) -> None:
        for end in self.sockets:
            end.close()


class Sipping:
    def __init__(self, end: socket.socket, pair: Pair) -> None:
        self._end, self._pair = end, pair
        self.fileno, self.shutdown, self.close = end.fileno, end.shutdown, end.close

    def send(self, data: memoryview) -> int:
        return self._end.send(data[: self._pair.sip])

    def recv_into(self, buffer: memoryview) -> int:
        return self._end.recv_into(buffer[: self._pair.sip])


def send_all(stream: Any, data: bytes, peer: Any, size: int) -> bytes:
    """Send `data` while the peer receives it, in pieces of up to `size` bytes."""
    unsent, got = memoryview(data), b""
    while len(got) < len(data):
        with suppress(BlockingIOError):
            unsent = unsent[stream.send(unsent) :] if unsent else unsent
        with suppress(BlockingIOError):
            room = bytearray(size)
            got += bytes(room[: peer.recv_into(memoryview(room))])
    return got


@given(st.integers(1, 3 * CHUNK), st.integers(300, 100_000), st.integers(64, 100_000))
def test_what_is_sent_arrives_however_little_the_connection_takes(length: int, sip: int, size: int) -> None:
    data = np.random.default_rng(length).bytes(length)
    with (pair := Pair()) as (first, second):
        assert pair.names == [["rank-0.test"], ["rank-1.test"]]
        pair.sip = sip
        assert send_all(first, data, second, size) == data
        assert send_all(second, data, first, size) == data


def test_a_record_that_is_not_whole_is_progress() -> None:
    with Pair() as (first, second):
        link = Link(1, 0, "there:1", second, is_local=True)
        before = link.progress
        first._tls.write(b"few words")
        record = first._leaving.read()
        first._connection.send(record[:-1])
        assert wait_ready([link], (), 5.0)
        with pytest.raises(BlockingIOError):
            second.recv_into(memoryview(bytearray(9)))
        assert link.progress == before + len(record) - 1
        first._connection.send(record[-1:])
        assert wait_ready([link], (), 5.0)
        assert second.recv(9) == b"few words"
        assert link.progress == before + len(record)


def test_a_byte_at_a_time() -> None:
    with Pair(1) as (first, second):
        assert send_all(first, b"every byte", second, 1) == b"every byte"


def test_peeked_bytes_stay_and_are_seen_by_whoever_waits() -> None:
    with Pair() as (first, second):
        link = Link(0, 1, "there:1", second, is_local=True)
        assert not link.has_words()
        assert link.ready_in() is None
        assert first.send(b"to be peeked at, and then read") == 30
        assert wait_ready([link], (), 5.0) == {link}
        assert second.recv(8, socket.MSG_PEEK) == b"to be pe"
        assert second.recv(2, socket.MSG_PEEK) == b"to"
        assert link.has_words()
        assert link.ready_in() == 0
        assert wait_ready([link], (), 5.0) == {link}  # although the system has nothing to read any more
        assert second.recv(5) == b"to be"
        room = bytearray(100)
        read = second.recv_into(memoryview(room))
        read += second.recv_into(memoryview(room)[read:])
        assert room[:read] == b" peeked at, and then read"
        assert link.ready_in() is None
        assert wait_ready([link], (), 0.0) == set()
        with pytest.raises(BlockingIOError):
            second.recv(1, socket.MSG_PEEK)


def test_what_has_not_left_is_not_sent() -> None:
    """A link that has nothing unsent may sleep, so a stream must not keep encrypted bytes to itself."""
    with Pair() as (first, second):
        sent = 0
        with suppress(BlockingIOError):
            while True:
                sent += first.send(bytes(CHUNK))
        got = 0
        with suppress(BlockingIOError):
            while True:
                got += len(second.recv(1 << 20))
        assert got >= sent


@pytest.mark.parametrize("farewell", [True, False])
def test_the_end_of_a_stream(farewell: bool) -> None:
    with Pair() as (first, second):
        first.send(b"last words")
        if farewell:  # this transport never says it, others may
            with pytest.raises(ssl.SSLWantReadError):
                first._tls.unwrap()
            first._flush()
        first.shutdown(socket.SHUT_WR)
        assert second.recv(100) == b"last words"
        assert second.recv(100) == b""
        assert second.recv_into(memoryview(bytearray(100))) == 0


@given(st.integers(5, 40), st.integers(0, 7))
def test_a_changed_bit_is_an_error(position: int, bit: int) -> None:
    with (pair := Pair()) as (first, second):
        first._tls.write(b"nobody can change this")
        record = bytearray(first._leaving.read())
        record[position % len(record)] ^= 1 << bit
        pair.sockets[0].send(record)
        with pytest.raises(ssl.SSLError):
            second.recv(100)


def test_certificates_from_files_and_unusable_ones(tmp_path: Path) -> None:
    certificate, key = AUTHORITY.issue("rank-0.test")
    files = [tmp_path / "certificate.pem", tmp_path / "key.pem", tmp_path / "authority.pem"]
    for file, pem in zip(files, (certificate, key, AUTHORITY.pem), strict=True):
        file.write_bytes(pem)
    Tls(*files)
    with pytest.raises(UsageError, match="cannot be used"):
        Tls(certificate, AUTHORITY.issue("rank-0.test")[1], AUTHORITY.pem)
    with pytest.raises(UsageError, match="cannot be used"):
        Tls(certificate, key, b"no certificate")
    with pytest.raises(UsageError, match="cannot be used"):
        Tls(tmp_path / "missing.pem", key, AUTHORITY.pem)


# -- meshes ------------------------------------------------------------------------------------------------------------


def test_a_mesh_under_tls(run_ranks: Run) -> None:
    assert run_ranks(4, total, security=[AUTHORITY.tls(rank) for rank in range(4)]) == [10.0] * 4


STRANGER = Authority("a stranger")


def refused(name: str, **how: Any) -> Tls:
    return Tls(*AUTHORITY.issue(name, **how), AUTHORITY.pem)


@pytest.mark.parametrize(
    ("listening", "dialling", "changes", "reasons"),
    [
        pytest.param(
            AUTHORITY.tls(0),
            Tls(*STRANGER.issue("rank-1.test"), AUTHORITY.pem),
            {},
            ("its certificate is refused: unable to get local issuer certificate", "tlsv1 alert unknown ca"),
            id="a stranger",
        ),
        pytest.param(
            AUTHORITY.tls(0),
            refused("rank-1.test", lifetime=-timedelta(days=1)),
            {},
            ("its certificate is refused: certificate has expired", "alert certificate expired"),
            id="expired",
        ),
        pytest.param(
            Tls(*STRANGER.issue("rank-0.test"), AUTHORITY.pem),
            AUTHORITY.tls(1),
            {},
            ("tlsv1 alert unknown ca", "its certificate is refused: unable to get local issuer certificate"),
            id="a strange listener",
        ),
        pytest.param(
            AUTHORITY.tls(0),
            AUTHORITY.tls(2),
            {},
            ("its certificate is for rank-2.test, not for rank-1.test",) * 2,
            id="the certificate of another rank",
        ),
        pytest.param(
            AUTHORITY.tls(3),
            AUTHORITY.tls(1),
            {},
            ("its certificate is for rank-3.test, not for rank-0.test",) * 2,
            id="the listener has the certificate of another rank",
        ),
        pytest.param(
            AUTHORITY.tls(0),
            AUTHORITY.tls(1, "other"),
            {},
            ("its certificate is for rank-1.other, not for rank-1.test",) * 2,
            id="the certificate of another session",
        ),
        pytest.param(
            AUTHORITY.tls(0),
            Tls(*AUTHORITY.issue(), AUTHORITY.pem),
            {},
            ("its certificate is for nobody, not for rank-1.test",) * 2,
            id="a certificate without names",
        ),
        pytest.param(
            AUTHORITY.tls(0),
            AUTHORITY.tls(1, "other"),
            {"session": "other"},
            ("session 'other' is not the one served here",) * 2,
            id="another session",
        ),
        pytest.param(
            AUTHORITY.tls(0), AUTHORITY.tls(1), {"epoch": 0}, ("epoch 0; epoch 1 is current here",) * 2, id="stale"
        ),
        pytest.param(
            AUTHORITY.tls(0),
            AUTHORITY.tls(1),
            {"secret": bytes(32)},
            ("does not hold this session's secret",) * 2,
            id="another secret",
        ),
        pytest.param(AUTHORITY.tls(0), Plain(), {}, ("TLS failed: wrong version number",) * 2, id="plain to TLS"),
        pytest.param(
            Plain(), AUTHORITY.tls(1), {}, ("not Motley's", "TLS failed: wrong version number"), id="TLS to plain"
        ),
    ],
)
def test_whom_a_mesh_refuses_and_what_both_sides_say(
    run_refused: Callable[..., tuple[Any, Any]],
    caplog: pytest.LogCaptureFixture,
    listening: Tls | Plain,
    dialling: Tls | Plain,
    changes: dict[str, Any],
    reasons: tuple[str, str],
) -> None:
    caplog.set_level(logging.WARNING)
    waiting, dialler = run_refused(changes=changes, security=[listening, dialling])
    assert isinstance(dialler, ProtocolError)
    assert dialler.rank == 0
    assert reasons[1] in str(dialler)
    assert isinstance(waiting, PeerTimeout)
    assert waiting.rank == 1
    logged = [record.getMessage() for record in caplog.records]
    assert any("refused the connection" in text and reasons[0] in text for text in logged), logged
    assert any("cannot use rank 0" in text and reasons[1] in text for text in logged), logged


@pytest.fixture
def waiting_mesh(membership: MakeMember) -> Iterator[int]:
    """The port of rank 0, which waits under TLS for rank 1; it must still get it in the end."""
    with (
        closing(Listener("127.0.0.1")) as first,
        closing(Listener("127.0.0.1")) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        addresses = [f"127.0.0.1:{first.port}", f"127.0.0.1:{second.port}"]
        here = pool.submit(connect_mesh, first, membership(0, 2), addresses, 20.0, security=AUTHORITY.tls(0))
        yield first.port
        there = pool.submit(connect_mesh, second, membership(1, 2), addresses, 20.0, security=AUTHORITY.tls(1))
        with here.result(20), there.result(20):
            pass


def knock(port: int, context: ssl.SSLContext) -> None:
    """Dial as a TLS client; it is refused, at the latest when the first answer is read."""
    connection = socket.create_connection(("127.0.0.1", port), 5)
    with closing(connection), pytest.raises((ssl.SSLError, ConnectionError)), context.wrap_socket(connection) as stream:
        assert stream.recv(1) == b"an answer to a stranger"


def client() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=AUTHORITY.pem.decode())
    return context


def test_strangers_without_a_certificate_or_with_an_old_tls(
    waiting_mesh: int, caplog: pytest.LogCaptureFixture
) -> None:
    old = client()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    for context, reason in ((client(), "peer did not return a certificate"), (old, "unsupported protocol")):
        knock(waiting_mesh, context)
        deadline = time.monotonic() + 30
        while f"TLS failed: {reason}" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        assert f"TLS failed: {reason}" in caplog.text


def test_garbage_instead_of_a_handshake(waiting_mesh: int) -> None:
    random = np.random.default_rng(0)
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    for length in (1, 5, 11, 300, 5000):
        for words in (random.bytes(length), hello[:length] + random.bytes(length), hello + bytes(length)):
            with socket.create_connection(("127.0.0.1", waiting_mesh), 5) as stranger, suppress(ConnectionError):
                stranger.sendall(words)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(1000):
                    pass


@pytest.mark.parametrize("elements", [0, 1, 4097, 3 << 18])
@pytest.mark.parametrize("wire_format", list(WireFormat))
def test_every_call_gives_over_tls_what_it_gives_without(
    run_ranks: Run, wire_format: WireFormat, elements: int
) -> None:
    size = 3

    def work(communicator: Communicator) -> list[bytes]:
        rank = communicator.rank
        values = np.random.default_rng(rank).standard_normal(elements).astype(np.float32)
        results = []
        for algorithm in Algorithm:
            total = values.copy()
            communicator.all_reduce(total, algorithm)
            results.append(total)
        part = np.empty(len(range(rank, elements, size)), np.float32)
        communicator.reduce_scatter(values, part, [len(range(other, elements, size)) for other in range(size)])
        everything = [np.empty(elements + other, np.float32) for other in range(size)]
        communicator.all_gather(np.full(elements + rank, rank, np.float32), everything)
        copy = values.copy()
        communicator.broadcast(copy, 1)
        swapped = [np.empty(elements, np.float32) for _ in range(size)]
        communicator.all_to_all([values * (other + 1) for other in range(size)], swapped)
        communicator.send(values.tobytes(), (rank + 1) % size)
        message = communicator.recv((rank - 1) % size, 20.0)
        return [array.tobytes() for array in (*results, part, *everything, copy, *swapped)] + [message]

    plain = run_ranks(size, work, wire_format=wire_format)
    secured = run_ranks(size, work, wire_format=wire_format, security=[AUTHORITY.tls(rank) for rank in range(size)])
    assert all(isinstance(answer, list) for answer in plain), plain
    assert secured == plain
