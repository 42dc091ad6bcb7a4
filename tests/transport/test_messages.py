"""Messages between ranks of which any may go: real sockets, sides that take turns in one thread, and real processes.

The file is long: all tests are of `Messenger`, between sides that the class at the top drives.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.transport import (
    MAX_MESSAGE,
    Connected,
    Listener,
    Lost,
    Message,
    Messenger,
    Plain,
    Tls,
    UsageError,
    messages,
)
from motley.transport.links.wire import Decoder, Handshake, Header, Op, Purpose, pack_frame, unpack_abort
from tests.ports import unanswered_port

from .certificates import Authority
from .conftest import _membership as member

AUTHORITY = Authority()
LIMIT_S = 30.0
"""Every wait for something that is to come ends."""


class Side:
    """One rank: its messenger and what has happened to it."""

    def __init__(
        self, rank: int, *, size: int = 3, security: Tls | Plain | None = None, listens: bool = False, **options: Any
    ) -> None:
        changes = options.pop("changes", {})
        self.rank = rank
        self.listener = Listener("127.0.0.1") if listens else None
        self.messenger = Messenger(
            member(rank, size, **changes), security or Plain(), listener=self.listener, **options
        )
        self.events: list[Connected | Message | Lost] = []

    @property
    def address(self) -> str:
        assert self.listener is not None
        return f"127.0.0.1:{self.listener.port}"

    @property
    def told(self) -> list[bytes]:
        return [bytes(event.data) for event in self.events if isinstance(event, Message)]

    @property
    def lost(self) -> list[Lost]:
        return [event for event in self.events if isinstance(event, Lost)]

    def connect(self, other: Side, seconds: float = LIMIT_S) -> None:
        self.messenger.connect(other.rank, other.address, seconds)

    def close(self) -> None:
        self.messenger.close()
        if self.listener is not None:
            self.listener.close()


def until(condition: Callable[[], Any], *sides: Side) -> None:
    """Let the sides take turns until this is so."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, [side.events for side in sides]
        for side in sides:
            side.events += side.messenger.receive(1e-3)


def join(*sides: Side) -> None:
    """All others dial the first."""
    host, *others = sides
    for side in others:
        side.connect(host)
    until(lambda: all(side.messenger.connected for side in others), *sides)
    until(lambda: len(host.messenger.connected) == len(others), *sides)


@pytest.fixture
def sides() -> Iterator[Callable[..., Side]]:
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(closing(Side(*arguments, **options)))


MakeSide = Callable[..., Side]


def test_the_name_of_a_peer_is_resolved_once(sides: Callable[..., Side], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has lost a peer may be in the middle of a step when it is dialled again; a resolver can take seconds."""
    host, side = sides(0, listens=True, accepts=[1]), sides(1)
    asked: list[str] = []
    resolve = socket.getaddrinfo

    def counted(name: str, *arguments: Any, **options: Any) -> Any:
        asked.append(name)
        return resolve(name, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", counted)
    for _ in range(2):
        side.messenger.connect(0, f"localhost:{host.listener.port}", LIMIT_S)
        until(lambda: side.messenger.connected and host.messenger.connected, host, side)
        host.messenger.drop(1, "it is to be dialled again")
        until(lambda: not side.messenger.connected, side)
    assert asked == ["localhost"]


@pytest.fixture
def pair(sides: MakeSide) -> tuple[Side, Side]:
    """A host (rank 0) and a side that has connected to it."""
    both = sides(0, listens=True, accepts={1, 2}), sides(1)
    join(*both)
    return both


# -- messages ----------------------------------------------------------------------------------------------------------


class Sips:
    """A stream that takes and gives little at a time, and at times nothing."""

    def __init__(self, stream: Any, sip: int) -> None:
        self._stream, self._sip, self._turn = stream, sip, 0
        self.fileno, self.shutdown, self.close = stream.fileno, stream.shutdown, stream.close

    def _pause(self) -> None:
        self._turn += 1
        if self._turn % 3 == 0:
            raise BlockingIOError

    def send(self, data: memoryview) -> int:
        self._pause()
        sent: int = self._stream.send(data[: self._sip])
        return sent

    def recv_into(self, buffer: memoryview, size: int = 0) -> int:
        self._pause()
        count: int = self._stream.recv_into(buffer[: self._sip])
        return count

    def recv(self, size: int, flags: int = 0) -> bytes:
        data: bytes = self._stream.recv(size, flags)
        return data

    def ready_in(self) -> float | None:
        look = getattr(self._stream, "ready_in", None)
        return None if look is None else look()


TLS = {rank: AUTHORITY.tls(rank) for rank in range(3)}
contents = st.lists(st.lists(st.binary(max_size=300), max_size=4), max_size=6)


@given(contents, contents, st.integers(1, 400), st.sampled_from([0, 1 << 16]), st.booleans())
def test_messages_arrive_whole_and_in_order_however_little_moves(
    there: list[list[bytes]], back: list[list[bytes]], sip: int, joined: int, is_tls: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(messages, "JOINED", joined)
        options: dict[str, Any] = {"wrap": lambda _, stream: Sips(stream, sip)}
        host = stack.enter_context(
            closing(Side(0, listens=True, accepts={1}, security=TLS[0] if is_tls else None, **options))
        )
        guest = stack.enter_context(closing(Side(1, security=TLS[1] if is_tls else None, **options)))
        join(host, guest)
        for side, peer, parts in [(guest, 0, words) for words in there] + [(host, 1, words) for words in back]:
            buffers = [bytearray(part) for part in parts]
            side.messenger.send(peer, buffers)
            for buffer in buffers:
                buffer[:] = bytes(len(buffer))  # it may be used again at once
        until(lambda: len(host.told) == len(there) and len(guest.told) == len(back), host, guest)
        assert host.told == [b"".join(parts) for parts in there]
        assert guest.told == [b"".join(parts) for parts in back]


def test_arrays_are_parts_and_what_has_come_stays(pair: tuple[Side, Side]) -> None:
    host, guest = pair
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    guest.messenger.send(0, [b"head", values, np.empty((0, 4), np.float32)])
    until(lambda: host.told, *pair)
    first = host.events[-1]
    assert isinstance(first, Message)
    guest.messenger.send(0, [values + 1])
    until(lambda: len(host.told) == 2, *pair)
    assert bytes(first.data[:4]) == b"head"
    assert np.array_equal(np.frombuffer(first.data[4:], np.float32).reshape(3, 4), values)


def test_the_longest_message_passes_and_a_longer_one_is_refused(pair: tuple[Side, Side]) -> None:
    host, guest = pair
    longest = np.random.default_rng(1).integers(0, 256, MAX_MESSAGE, np.uint8)
    with pytest.raises(UsageError, match=f"a message of {MAX_MESSAGE + 1} bytes; at most {MAX_MESSAGE} can be sent"):
        guest.messenger.send(0, [b"x", longest])
    guest.messenger.send(0, [longest[:10], longest[10:]])
    guest.messenger.send(0, [b"and on"])
    until(lambda: any(isinstance(event, Message) for event in host.events), *pair)
    event = next(event for event in host.events if isinstance(event, Message))
    assert np.array_equal(np.frombuffer(event.data, np.uint8), longest)
    until(lambda: len(host.told) == 2, *pair)
    assert host.told[1] == b"and on"


def test_what_a_slow_reader_leaves_is_kept(pair: tuple[Side, Side]) -> None:
    host, guest = pair
    buffer = np.empty(1 << 20, np.uint8)
    for value in range(24):
        buffer[:] = value
        guest.messenger.send(0, [buffer])  # the host does not read
    assert guest.messenger.receive(0.0) == []
    until(lambda: sum(isinstance(event, Message) for event in host.events) == 24, *pair)
    assert [told == bytes([value]) * len(buffer) for value, told in enumerate(host.told)] == [True] * 24


def test_a_peer_that_never_reads_is_lost(pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_UNSENT", 20 << 20)
    _, guest = pair
    for _ in range(32):
        guest.messenger.send(0, [bytes(1 << 20)])
    (event,) = guest.messenger.receive(0.0)
    assert isinstance(event, Lost)
    assert "it does not read: " in event.reason
    with pytest.raises(UsageError, match="rank 0 is not connected"):
        guest.messenger.send(0, [b"more"])


def test_two_peers_at_once(sides: MakeSide) -> None:
    host = sides(0, listens=True, accepts={1, 2}, security=TLS[0])
    guests = [sides(rank, security=TLS[rank]) for rank in (1, 2)]
    join(host, *guests)
    assert sorted(host.messenger.connected) == [1, 2]
    for n in range(50):
        for guest in guests:
            guest.messenger.send(0, [bytes([guest.rank, n]), bytes(n * 500)])
    until(lambda: len(host.told) == 100, host, *guests)
    for rank in (1, 2):
        theirs = [event.data for event in host.events if isinstance(event, Message) and event.peer == rank]
        assert [bytes(data) for data in theirs] == [bytes([rank, n]) + bytes(n * 500) for n in range(50)]
    guests[0].close()
    until(lambda: host.lost, host)
    assert [lost.peer for lost in host.lost] == [1]
    host.messenger.send(2, [b"you are still there"])
    until(lambda: guests[1].told, host, guests[1])
    assert not guests[1].lost


# -- losses ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["plain", "tls"])
def process(request: pytest.FixtureRequest) -> Iterator[tuple[Side, subprocess.Popen[str]]]:
    """A side (rank 0) that is connected to a process which echoes (rank 1)."""
    keys = {}
    if request.param == "tls":
        certificate, key = AUTHORITY.issue("rank-1.test")
        keys = {"certificate": certificate.decode(), "key": key.decode(), "authority": AUTHORITY.pem.decode()}
    script = Path(__file__).with_name("messenger_process.py")
    echo = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    side = Side(0, size=2, security=TLS[0] if keys else Plain())
    try:
        assert echo.stdin is not None
        assert echo.stdout is not None
        echo.stdin.write(json.dumps(keys) + "\n")
        echo.stdin.flush()
        side.messenger.connect(1, f"127.0.0.1:{json.loads(echo.stdout.readline())['port']}", LIMIT_S)
        until(lambda: side.messenger.connected, side)
        assert side.events == [Connected(1)]
        yield side, echo
    finally:
        side.close()
        echo.kill()
        echo.communicate()


def test_a_process_answers(process: tuple[Side, subprocess.Popen[str]]) -> None:
    side, echo = process
    generator = np.random.default_rng(2)
    sent = [generator.bytes(size) for size in (0, 1, 8192, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 3_000_000)]
    for data in sent:
        side.messenger.send(1, [data[:100], data[100:]])
    until(lambda: len(side.told) == len(sent), side)
    assert side.told == sent
    side.close()
    assert echo.stdout is not None
    assert json.loads(echo.stdout.readline())["lost"].startswith("it left the session")


@pytest.mark.parametrize("doing", ["nothing", "sending"])
def test_a_process_that_is_killed_is_lost_at_once(process: tuple[Side, subprocess.Popen[str]], doing: str) -> None:
    side, echo = process
    if doing == "sending":
        psutil.Process(echo.pid).suspend()
        for _ in range(8):
            side.messenger.send(1, [bytes(4 << 20)])
    echo.kill()
    until(lambda: side.lost, side)
    assert [lost.peer for lost in side.lost] == [1]
    assert not side.messenger.connected
    assert side.messenger.receive(0.0) == []
    with pytest.raises(UsageError, match="rank 1 is not connected"):
        side.messenger.send(1, [b"are you there?"])


def test_sending_to_the_dead_is_no_error_before_the_loss_is_told(process: tuple[Side, subprocess.Popen[str]]) -> None:
    side, echo = process
    echo.kill()
    echo.wait()
    for _ in range(10):
        side.messenger.send(1, [bytes(100_000)])
    assert 1 in side.messenger.connected
    until(lambda: side.lost, side)
    assert not side.messenger.connected


@pytest.mark.parametrize("leaver", [1, 2])
def test_who_is_told_of_a_message_may_still_send_to_all(sides: MakeSide, leaver: int) -> None:
    host = sides(0, listens=True, accepts={1, 2})
    guests = {rank: sides(rank) for rank in (1, 2)}
    join(host, *guests.values())
    guests[3 - leaver].messenger.send(0, [b"news"])
    guests[leaver].messenger.drop(0, "for a test")
    known = {1, 2}
    deadline = time.monotonic() + LIMIT_S
    while not host.told or not host.lost:
        assert time.monotonic() < deadline
        for event in host.messenger.receive(0.1):
            if isinstance(event, Lost):
                known.remove(event.peer)
            for peer in known:
                host.messenger.send(peer, [b"I have heard"])
            host.events.append(event)
    assert known == {3 - leaver}


class Raw:
    """A peer (rank 1) that has made its handshake and then says what it likes."""

    def __init__(self, host: Side) -> None:
        self.socket = socket.create_connection(("127.0.0.1", int(host.address.rpartition(":")[2])), 10)
        handshake = Handshake(member(1, 3), {(0, Purpose.MESSAGES)}, dials_for=Purpose.MESSAGES)
        self.socket.sendall(handshake.start())
        self.socket.settimeout(0.01)
        while handshake.peer is None:
            host.events += host.messenger.receive(0.0)
            try:
                self.socket.sendall(handshake.receive(self.socket.recv(handshake.missing)))
            except TimeoutError:
                continue
        until(lambda: 1 in host.messenger.connected, host)

    def last_words(self) -> tuple[int, str]:
        self.socket.settimeout(10)
        decoder = Decoder(1 << 20)
        while data := self.socket.recv(1 << 16):
            for frame in decoder.feed(data):
                if frame.header.op == Op.ABORT:
                    return unpack_abort(frame.payload)[:2]
        raise AssertionError("it left without a word")


@pytest.fixture
def raw(sides: MakeSide) -> Iterator[tuple[Side, Raw]]:
    host = sides(0, listens=True, accepts={1})
    peer = Raw(host)
    yield host, peer
    peer.socket.close()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "these bytes are not Motley's"),
        (pack_frame(Op.ALL_REDUCE), "expected message 0, got all_reduce 0"),
        (pack_frame(Op.MESSAGE, b"", 7), "expected message 0, got message 7"),
        (Header(Op.MESSAGE, length=MAX_MESSAGE + 1).pack(), f"a message of {MAX_MESSAGE + 1} bytes; at most"),
        (Header(Op.MESSAGE, dtype=3, length=4).pack(), "expected element type bytes, got int64"),
        (b"MT\xff" + bytes(21), "unknown operation 255"),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_lost_and_told(raw: tuple[Side, Raw], words: bytes, reason: str) -> None:
    host, peer = raw
    peer.socket.sendall(words)
    until(lambda: host.lost, host)
    assert host.lost[0].peer == 1
    assert reason in host.lost[0].reason
    assert not host.messenger.connected
    blamed, why = peer.last_words()
    assert blamed == 1
    assert reason in why


@pytest.mark.parametrize("sent", [b"", Header(Op.MESSAGE, length=1000).pack() + bytes(10), b"MT"])
@pytest.mark.parametrize("reset", [False, True])
def test_the_end_of_a_connection_is_a_loss(raw: tuple[Side, Raw], sent: bytes, reset: bool) -> None:
    host, peer = raw
    peer.socket.sendall(pack_frame(Op.MESSAGE, b"a whole one") + sent)
    until(lambda: host.told == [b"a whole one"], host)
    if reset:
        peer.socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
        )
    peer.socket.close()
    until(lambda: host.lost, host)
    assert host.told == [b"a whole one"]
    assert [lost.peer for lost in host.lost] == [1]


def test_what_came_before_the_end_is_told_first(raw: tuple[Side, Raw]) -> None:
    host, peer = raw
    peer.socket.sendall(b"".join(pack_frame(Op.MESSAGE, bytes([n]), n) for n in range(5)) + pack_frame(Op.BYE))
    peer.socket.close()
    until(lambda: host.lost, host)
    assert host.told == [bytes([n]) for n in range(5)]
    assert isinstance(host.events[-1], Lost)
    assert host.events[-1].reason.startswith("it left the session")


def test_a_peer_that_is_dropped_is_told_why_and_no_event_follows(pair: tuple[Side, Side]) -> None:
    host, guest = pair
    guest.messenger.drop(0, "its answer is not finite")
    assert not guest.messenger.connected
    guest.messenger.drop(0, "again, which changes nothing")
    until(lambda: host.lost, *pair)
    assert "it gave up" in host.lost[0].reason
    assert "its answer is not finite" in host.lost[0].reason
    assert not guest.lost


# -- connections -------------------------------------------------------------------------------------------------------


def test_a_peer_that_was_lost_can_be_dialled_again(pair: tuple[Side, Side]) -> None:
    host, guest = pair
    for _ in range(3):
        guest.messenger.send(0, [b"for once"])
        until(lambda: len(host.told) > len(host.lost), *pair)
        guest.messenger.drop(0, "for a test")
        until(lambda: len(host.told) == len(host.lost), *pair)
        guest.connect(host)
        until(lambda: guest.messenger.connected and host.messenger.connected, *pair)
    host.messenger.send(1, [b"welcome back"])
    until(lambda: guest.told, *pair)
    assert [type(event) for event in host.events] == [Connected, Message, Lost] * 3 + [Connected]


def test_the_newer_link_of_a_peer_counts(pair: tuple[Side, Side], sides: MakeSide) -> None:
    """The host has not noticed that the older one is dead."""
    host, _ = pair
    successor = sides(1)
    successor.connect(host)
    until(lambda: successor.messenger.connected and host.lost, host, successor)
    assert [type(event) for event in host.events] == [Connected, Lost, Connected]
    assert "it has connected anew" in host.lost[0].reason
    host.messenger.send(1, [b"to the newer one"])
    until(lambda: successor.told, host, successor)


@pytest.mark.parametrize(
    ("changes", "rank", "reason"),
    [
        ({"session": "other"}, 1, "session 'other' is not the one served here"),
        ({"agreement": bytes(32)}, 1, "both ranks need the same plan"),
        ({"secret": bytes(32)}, 1, "does not hold this session's secret"),
        ({}, 2, "rank 2 is not expected by rank 0"),
    ],
)
def test_who_is_refused_knows_at_once(
    sides: MakeSide, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], rank: int, reason: str
) -> None:
    caplog.set_level(logging.WARNING)
    host, guest = sides(0, listens=True, accepts={1}), sides(rank, changes=changes)
    guest.connect(host)
    until(lambda: guest.lost, host, guest)
    assert guest.lost[0].peer == 0
    assert reason in guest.lost[0].reason
    assert host.events == []
    assert sum(reason in record.getMessage() for record in caplog.records) == 2


def test_a_certificate_for_another_rank_is_refused(sides: MakeSide) -> None:
    host, guest = sides(0, listens=True, accepts={1, 2}, security=TLS[0]), sides(1, security=TLS[2])
    guest.connect(host)
    until(lambda: guest.lost, host, guest)
    assert "its certificate is for rank-2.test, not for rank-1.test" in guest.lost[0].reason


def test_a_peer_that_is_not_there_is_lost_in_time(sides: MakeSide) -> None:
    guest = sides(1)
    with unanswered_port() as port:
        began = time.monotonic()
        guest.messenger.connect(0, f"127.0.0.1:{port}", 0.3)
        until(lambda: guest.lost, guest)
    assert time.monotonic() - began >= 0.3
    assert "could not be reached in time: " in guest.lost[0].reason
    assert "refused" in guest.lost[0].reason


def test_a_peer_that_accepts_but_never_answers_is_lost_in_time(sides: MakeSide) -> None:
    silent, guest = sides(0, listens=True, accepts={1}), sides(1)
    guest.connect(silent, 0.3)
    until(lambda: guest.lost, guest)
    assert "could not be reached in time: no answer" in guest.lost[0].reason


def test_a_peer_that_comes_later_is_reached(sides: MakeSide) -> None:
    guest = sides(1)
    with unanswered_port() as port:
        guest.messenger.connect(0, f"127.0.0.1:{port}", LIMIT_S)
        until(lambda: "refused" in guest.messenger._connector.trouble.get(0, ""), guest)
    with closing(Listener("127.0.0.1", port)) as listener:
        host = sides(0)
        host.messenger = Messenger(member(0, 3), Plain(), listener=listener, accepts={1})
        until(lambda: guest.messenger.connected, host, guest)
    assert guest.events == [Connected(0)]


def test_strangers_disturb_nobody(pair: tuple[Side, Side], caplog: pytest.LogCaptureFixture) -> None:
    host, guest = pair
    with ExitStack() as stack:
        for words in (b"GET / HTTP/1.1\r\n\r\n" * 3, pack_frame(Op.MESSAGE), b"", b"M"):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", host.listener.port), 5))  # type: ignore[union-attr]
            stranger.sendall(words)
        for _ in range(100):
            guest.messenger.send(0, [b"x" * 100])
        until(lambda: len(host.told) == 100 and len(caplog.records) >= 2, *pair)
    assert 1 in host.messenger.connected
    assert not host.lost


def test_arguments_that_cannot_be_right(pair: tuple[Side, Side], sides: MakeSide) -> None:
    host, guest = pair
    for peer, address, text in [
        (0, host.address, "rank 0 is connected already"),
        (1, host.address, "rank 1 is no peer of rank 1 of 3"),
        (3, host.address, "rank 3 is no peer of rank 1 of 3"),
        (2, "nowhere", "'nowhere' is no address"),
    ]:
        with pytest.raises(UsageError, match=text):
            guest.messenger.connect(peer, address, 1.0)
    guest.messenger.connect(2, "127.0.0.1:9", 1.0)
    with pytest.raises(UsageError, match="rank 2 is connected already, or will be"):
        guest.messenger.connect(2, "127.0.0.1:9", 1.0)
    with pytest.raises(UsageError, match="rank 5 of 3"):
        Messenger(member(5, 3), Plain(), listener=None)


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_a_wait_ends_with_a_message_with_others_or_with_its_time(pair: tuple[Side, Side]) -> None:
    host, guest = pair
    ours, theirs = socket.socketpair()
    with ours, theirs:
        began = time.monotonic()
        while (waited := time.monotonic() - began) < 0.05:
            host.messenger.wait([ours], 0.05 - waited)
            assert host.messenger.receive(0.0) == []
        guest.messenger.send(0, [b"come"])
        host.messenger.wait([ours], LIMIT_S)
        assert time.monotonic() - began < LIMIT_S / 2
        until(lambda: host.told == [b"come"], *pair)
        theirs.send(b"x")
        host.messenger.wait([ours], LIMIT_S)
        assert time.monotonic() - began < LIMIT_S / 2
        assert host.messenger.receive(0.0) == []


@pytest.mark.parametrize("security", [None, TLS])
def test_a_wait_knows_of_messages_that_the_system_has_handed_over(
    sides: MakeSide, security: dict[int, Tls] | None
) -> None:
    host, guest = (
        sides(rank, listens=not rank, accepts={1}, security=None if security is None else security[rank])
        for rank in range(2)
    )
    join(host, guest)
    for n in range(3):
        guest.messenger.send(0, [bytes([n])])
    until(lambda: host.told, host)
    began = time.monotonic()
    while len(host.told) < 3:
        host.messenger.wait((), LIMIT_S)
        host.events += host.messenger.receive(0.0)
    assert time.monotonic() - began < LIMIT_S / 2


def test_nothing_comes_of_a_messenger_alone(sides: MakeSide) -> None:
    began = time.monotonic()
    assert sides(0).messenger.receive(0.05) == []
    assert time.monotonic() - began >= 0.05


def test_no_socket_is_left_behind() -> None:
    def descriptors() -> int:
        process = psutil.Process()
        return process.num_handles() if psutil.WINDOWS else process.num_fds()  # type: ignore[attr-defined,no-any-return,unused-ignore]

    def life() -> None:
        with (
            closing(Side(0, listens=True, accepts={1})) as host,
            closing(Side(1)) as guest,
            unanswered_port() as port,
        ):
            join(host, guest)
            guest.messenger.connect(2, f"127.0.0.1:{port}", LIMIT_S)
            guest.messenger.drop(2, "not wanted any more")
            guest.messenger.drop(0, "for a test")
            until(lambda: host.lost, host, guest)

    life()
    before = descriptors()
    life()
    assert descriptors() <= before
