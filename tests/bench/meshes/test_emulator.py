from __future__ import annotations

import ctypes
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.bench.meshes.emulator import CHUNK_BYTES, EmulatedSocket, LinkSpec, Nic, occupy, sleep_exactly

MS = 1_000_000
HOME = LinkSpec(latency_s=1e-3, bandwidth=1e6)  # a byte per microsecond: easy to reckon with


class Clock:
    """Time that passes when the test says so, in ns."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def connect(ours: Nic, theirs: Nic) -> tuple[EmulatedSocket, EmulatedSocket]:
    one, other = socket.socketpair()
    one.setblocking(False)
    other.setblocking(False)
    return ours.wrap(1, one), theirs.wrap(0, other)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pair(clock: Clock) -> Iterator[tuple[EmulatedSocket, EmulatedSocket]]:
    one, other = connect(Nic(HOME, clock=clock), Nic(HOME, clock=clock))
    with closing(one), closing(other):
        yield one, other


def wait_readable(emulated: EmulatedSocket) -> None:
    """The bytes are on this machine, due or not."""
    assert select.select([emulated], [], [], 10.0)[0]


def arrival(emulated: EmulatedSocket, count: int, clock: Clock) -> int:
    """Let time pass until `count` bytes can be read; returns when that was."""
    wait_readable(emulated)
    while count:
        try:
            count -= len(emulated.recv(count))
        except BlockingIOError:
            ready_in = emulated.ready_in()
            if ready_in is None:
                wait_readable(emulated)
            else:
                clock.now += round(1e9 * ready_in)
    return clock.now


# -- when bytes come ------------------------------------------------------------------------------------------------


def test_a_chunk_comes_after_latency_and_transmission(
    pair: tuple[EmulatedSocket, EmulatedSocket], clock: Clock
) -> None:
    one, other = pair
    clock.now = 5 * MS
    assert other.ready_in() is None
    one.send(memoryview(bytes(1000)))
    wait_readable(other)
    for now in (5 * MS, 7 * MS - 1):
        clock.now = now
        for flags in (0, socket.MSG_PEEK):
            with pytest.raises(BlockingIOError):
                other.recv(1000, flags)
        with pytest.raises(BlockingIOError):
            other.recv_into(memoryview(bytearray(1000)))
    assert other.ready_in() == 1e-9
    clock.now = 7 * MS  # 1 ms on the way, 1000 bytes at 1 us each
    assert other.ready_in() == 0
    assert other.recv(24, socket.MSG_PEEK) == bytes(24)
    assert other.recv(2000) == bytes(1000)
    assert other.ready_in() is None


def test_chunks_queue_for_the_wire_and_directions_do_not_meet(
    pair: tuple[EmulatedSocket, EmulatedSocket], clock: Clock
) -> None:
    one, other = pair
    for _ in range(3):
        one.send(memoryview(bytes(1000)))
    other.send(memoryview(bytes(1000)))
    assert arrival(one, 1000, clock) == 2 * MS
    assert arrival(other, 1000, clock) == 2 * MS
    assert arrival(other, 2000, clock) == 4 * MS
    clock.now = 10 * MS
    one.send(memoryview(bytes(1000)))  # the wire has been idle: no credit, no debt
    assert arrival(other, 1000, clock) == 12 * MS


def test_a_rank_that_computes_delays_nothing(pair: tuple[EmulatedSocket, EmulatedSocket], clock: Clock) -> None:
    one, other = pair
    one.send(memoryview(bytes(1000)))
    clock.now = 1 * MS
    one.send(memoryview(bytes(1000)))
    clock.now = 50 * MS
    assert arrival(other, 2000, clock) == 50 * MS


def test_the_connections_of_a_rank_share_its_interface(clock: Clock) -> None:
    """Two peers get 1000 bytes each from one rank, and it gets 1000 bytes from each."""
    nics = [Nic(HOME, clock=clock) for _ in range(3)]
    first, second = connect(nics[0], nics[1]), connect(nics[0], nics[2])
    with closing(first[0]), closing(first[1]), closing(second[0]), closing(second[1]):
        for own, peer in (first, second):
            own.send(memoryview(bytes(1000)))
            peer.send(memoryview(bytes(1000)))
        assert arrival(first[1], 1000, clock) == 2 * MS
        assert arrival(first[0], 1000, clock) == 2 * MS
        assert arrival(second[1], 1000, clock) == 3 * MS
        assert arrival(second[0], 1000, clock) == 3 * MS


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 8)), max_size=25))
def test_a_chunk_takes_the_first_time_that_is_free(chunks: list[tuple[int, int]]) -> None:
    intervals: list[tuple[int, int]] = []
    taken: set[int] = set()
    for begin, need in chunks:
        mine = list(islice((at for at in count(begin) if at not in taken), need))
        taken |= set(mine)
        assert occupy(intervals, begin, need) == mine[-1] + 1
        assert intervals == sorted(intervals)
        assert {at for start, end in intervals for at in range(start, end)} == taken


def test_jitter_is_bounded_and_never_reorders(clock: Clock) -> None:
    spec = LinkSpec(1e-3, 1e9, jitter_s=5e-3)
    one, other = connect(Nic(spec, clock=clock), Nic(spec, seed=1, clock=clock))
    late = []
    with closing(one), closing(other):
        for number in range(200):
            sent = clock.now
            one.send(memoryview(bytes([number])))
            late.append(arrival(other, 1, clock) - sent - 1 * MS)
    assert all(0 <= ns <= 5 * MS + 1 for ns in late)
    assert 2 * MS < np.mean(late) < 3 * MS
    assert len({round(ns, -4) for ns in late}) > 100


def test_loss_is_a_late_chunk(clock: Clock) -> None:
    spec = LinkSpec(1e-3, 1e9, loss=0.1, retransmission_s=0.2)
    one, other = connect(Nic(spec, clock=clock), Nic(spec, seed=1, clock=clock))
    late = 0
    with closing(one), closing(other):
        for _ in range(1000):
            sent = clock.now
            one.send(memoryview(b"x"))
            took = arrival(other, 1, clock) - sent
            assert abs(took - 1 * MS) < 10 or abs(took - 201 * MS) < 10
            late += took > 100 * MS
    assert 60 < late < 140


def test_a_lost_packet_holds_up_its_own_connection_only(clock: Clock) -> None:
    lossy, clean = LinkSpec(1e-3, 1e6, loss=1.0), HOME
    receiver = Nic(lossy, clock=clock)
    first = connect(Nic(clean, clock=clock), receiver)
    with closing(first[0]), closing(first[1]):
        first[0].send(memoryview(bytes(1000)))
        with pytest.raises(BlockingIOError):
            first[1].recv(1)
        receiver.spec = clean
        first[0].send(memoryview(bytes(1000)))
        second = connect(Nic(clean, clock=clock), receiver)
        with closing(second[0]), closing(second[1]):
            second[0].send(memoryview(bytes(1000)))
            assert arrival(second[1], 1000, clock) == 3 * MS
            assert arrival(first[1], 2000, clock) == 202 * MS


def test_the_clock_of_the_machine_gives_the_same_times() -> None:
    """Never early, and late only by what a busy machine adds: in the end there is a moment in which it adds little."""
    spec = LinkSpec(latency_s=10e-3, bandwidth=10e6)
    one, other = connect(Nic(spec), Nic(spec))
    took = []
    with closing(one), closing(other):
        while len(took) < 5 or (min(took) > 2 * 30e-3 and len(took) < 500):
            started = time.perf_counter()
            sender = threading.Thread(target=send_all, args=(one, bytes(200_000)))
            sender.start()
            assert len(receive_all(other, 200_000, [65_536])) == 200_000
            took.append(time.perf_counter() - started)
            sender.join()
    assert 30e-3 <= min(took) < 2 * 30e-3


# -- what comes -----------------------------------------------------------------------------------------------------


def send_all(emulated: EmulatedSocket, data: bytes, cuts: list[int] | None = None) -> None:
    """Offer `data` in pieces of these sizes, again and again, as far as the system takes them."""
    sent, number = 0, 0
    while sent < len(data):
        piece = len(data) if not cuts else cuts[number % len(cuts)]
        try:
            sent += emulated.send(memoryview(data)[sent : sent + piece])
        except BlockingIOError:
            select.select([], [emulated], [], 0.001)
        number += 1


def receive_all(emulated: EmulatedSocket, count: int, cuts: list[int]) -> bytes:
    """Read in pieces of these sizes, with `recv` and `recv_into` in turn, looking first now and then."""
    data, number = bytearray(), 0
    while len(data) < count:
        wanted = cuts[number % len(cuts)]
        try:
            seen = emulated.recv(wanted, socket.MSG_PEEK) if number % 4 == 0 else b""
            target = bytearray(wanted)
            match number % 3:
                case 0:
                    got = emulated.recv(wanted)
                case 1:
                    got = bytes(target[: emulated.recv_into(memoryview(target))])
                case _:
                    target += b"more room"
                    got = bytes(target[: emulated.recv_into(memoryview(target), wanted)])
            assert got.startswith(seen) or seen.startswith(got)
            data += got
            number += 1
        except BlockingIOError:
            pass
    return bytes(data)


SIZES = st.lists(st.integers(1, 3 * CHUNK_BYTES), min_size=1, max_size=5)


@given(st.integers(0, 1 << 20), SIZES, SIZES)
def test_the_same_bytes_come_in_the_same_order_however_they_are_cut(
    count: int, sent: list[int], received: list[int]
) -> None:
    data = np.random.default_rng(count).bytes(count)
    spec = LinkSpec(latency_s=1e-5, bandwidth=1e10, jitter_s=1e-5)
    one, other = connect(Nic(spec), Nic(spec))
    with closing(one), closing(other):
        # Small pieces of a large whole would only be slow.
        least = max(1, count // 200)
        sender = threading.Thread(target=send_all, args=(one, data, [max(least, size) for size in sent]))
        sender.start()
        assert receive_all(other, count, [max(least, size) for size in received]) == data
        sender.join()
        one.close()
        wait_readable(other)
        assert other.recv(10) == b""
        assert other.recv_into(memoryview(bytearray(10))) == 0


def test_a_full_connection_takes_the_rest_later() -> None:
    spec = LinkSpec(0.0, 1e12)
    one, other = connect(Nic(spec), Nic(spec))
    data = bytes(range(256)) * (64 << 10)
    with closing(one), closing(other):
        sent = one.send(memoryview(data))
        assert 0 < sent < len(data)
        with pytest.raises(BlockingIOError):
            one.send(memoryview(data[sent:]))
        sender = threading.Thread(target=send_all, args=(one, data[sent:], [1000, 100_000]))
        sender.start()
        assert receive_all(other, len(data), [1 << 20]) == data
        sender.join()


def test_a_cut_is_silence(pair: tuple[EmulatedSocket, EmulatedSocket], clock: Clock) -> None:
    one, other = pair
    one.send(memoryview(b"on the way"))
    wait_readable(other)
    other.cut()
    one.cut()
    clock.now = 1000 * MS
    assert one.send(memoryview(b"into the void")) == len(b"into the void")
    one.shutdown(socket.SHUT_WR)
    one.close()
    for read in (lambda: other.recv(10), lambda: other.recv_into(memoryview(bytearray(10)))):
        with pytest.raises(BlockingIOError):
            read()
    assert other.ready_in() is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets threads oversleep so much that it matters")
def test_only_a_thread_that_asks_for_it_sleeps_exactly() -> None:
    def slack_ns() -> int:
        return int(ctypes.CDLL(None).prctl(30))  # PR_GET_TIMERSLACK

    with ThreadPoolExecutor(1) as pool:
        usual = pool.submit(slack_ns).result()
        pool.submit(Nic, HOME).result()
        assert pool.submit(slack_ns).result() == usual > 1
        pool.submit(sleep_exactly).result()
        assert pool.submit(slack_ns).result() == 1


def test_pulling_the_plug_cuts_every_connection(clock: Clock) -> None:
    nic = Nic(HOME, clock=clock)
    pairs = [connect(nic, Nic(HOME, clock=clock)) for _ in range(2)]
    nic.cut()
    pairs.append(connect(nic, Nic(HOME, clock=clock)))  # a rank that hears nothing tries new ones
    for own, peer in pairs:
        assert own.is_cut
        assert not peer.is_cut
        own.close()
        peer.close()


# -- the text of a link ---------------------------------------------------------------------------------------------


def test_links_are_written_as_people_say_them() -> None:
    assert LinkSpec.parse("0.1ms,1Gbit") == LinkSpec(1e-4, 125e6)
    assert LinkSpec.parse("20ms, 100Mbit, jitter=2ms, loss=0.1%") == LinkSpec(0.02, 12.5e6, 2e-3, 1e-3)
    assert LinkSpec.parse("bandwidth=1gbit,latency=2s") == LinkSpec(2.0, 125e6)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1ms",
        "1Gbit,1ms",
        "1ms,1Gbit,2ms",
        "1ms,0Gbit",
        "1ms,1Gbit,loss=101%",
        "1ms,1Gbit,loss=1ms",
        "1ms,1Gbit,hops=3ms",
        "1ms,1Gbit,latency=1ms",
        "1,1Gbit",
        "-1ms,1Gbit",
        "1e3ms,1Gbit",
        "1ms,1Gbit,",
    ],
)
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        LinkSpec.parse(text)


@given(st.text(st.sampled_from("0123456789.,=%msubGbitloyjer -"), max_size=30))
def test_any_text_is_a_link_or_an_error(text: str) -> None:
    try:
        spec = LinkSpec.parse(text)
    except ValueError:
        return
    assert spec.bandwidth > 0
    assert 0 <= spec.loss <= 1
