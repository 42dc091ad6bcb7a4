from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.transport import PeerLost
from motley.transport.links.link import Link, wait_ready
from motley.transport.links.liveness import BEAT_S, SILENCE_S, SUSPENDED_S, Pulse, Watch
from motley.transport.links.wire import HEADER_SIZE, Frame, Op, pack_abort, pack_beat, pack_frame, unpack_header

BEAT = pack_beat(7, 0)


def watch(peers: int = 3, own_rank: int = 0) -> Watch:
    """A watch of the other ranks of a mesh."""
    watching = Watch(own_rank)
    for rank in range(peers):
        if rank != own_rank:
            watching.add(rank, f"host-{rank}:1")
    return watching


def beat(watch: Watch, ranks: list[int], start: float, end: float) -> float:
    """These ranks beat, and the watch looks, from one time to the other."""
    now = start
    while now < end:
        for rank in ranks:
            watch.receive(rank, BEAT, now)
        watch.look(now, {})
        now += BEAT_S
    return now


def test_silence_is_measured_from_the_last_sign_of_life() -> None:
    watching = watch()
    beat(watching, [1, 2], 0, 10)
    assert watching.look(10, {}) == pytest.approx(9.5 + SILENCE_S)
    beat(watching, [2], 10, 9.5 + SILENCE_S - 0.01)
    assert not watching.lost
    watching.look(9.5 + SILENCE_S, {})
    assert watching.lost == {1: "no sign of life for 5 s (host-1:1)"}
    assert watching.watched == (2,)


def test_a_peer_that_still_builds_its_mesh_is_not_silent() -> None:
    watching = watch()
    beat(watching, [2], 0, 100)
    assert not watching.lost


def test_a_rank_that_hears_nobody_is_lost_itself() -> None:
    """Peers beat at different times, and one has left before."""
    watching = watch(5)
    beat(watching, [1, 2, 3, 4], 0, 3)
    watching.receive(4, pack_frame(Op.BYE), 3)
    for rank, last in ((1, 3.0), (2, 3.2), (3, 3.4)):
        watching.receive(rank, BEAT, last)
    now = 3.4
    while not watching.lost and now < 20:
        now += BEAT_S
        watching.look(now, {})
    assert next(iter(watching.lost.items())) == (
        0,
        "no sign of life of ranks 1 and 2 and 3 for 5 s: this rank is cut off from all others (host-1:1)",
    )


def test_of_two_ranks_the_silent_one_is_lost() -> None:
    watching = watch(2)
    now = beat(watching, [1], 0, 3)
    for quarter in (1, 2, 3, 4):
        assert not watching.lost
        watching.look(now - BEAT_S + SILENCE_S * quarter / 4, {})
    assert list(watching.lost) == [1]


@given(
    st.lists(
        st.tuples(st.sampled_from(["beat", "data", "knock", "nothing"]), st.sampled_from([1, 2]), st.floats(0.01, 1.9)),
        max_size=60,
    )
)
def test_a_peer_is_lost_when_nothing_of_any_kind_has_come_for_so_long(heard: list[tuple[str, int, float]]) -> None:
    watching, now, progress = watch(), 0.0, {1: 0, 2: 0}
    latest = dict.fromkeys((1, 2), now)
    for rank in (1, 2):
        watching.receive(rank, BEAT, now)
    watching.look(now, {}, progress)
    for kind, rank, later in heard:
        now += later
        if kind == "beat" and rank in watching.watched:
            watching.receive(rank, BEAT, now)
        elif kind == "data":
            progress[rank] += 1
        elif kind == "knock":
            watching.knocked(rank, Frame(unpack_header(BEAT), BEAT[HEADER_SIZE:]), now)
        if kind != "nothing":
            latest[rank] = now
        watching.look(now, {}, progress)
        silent = [rank for rank in (1, 2) if now - latest[rank] >= SILENCE_S]
        assert bool(watching.lost) == bool(silent)
        if watching.lost:
            assert set(watching.lost) <= {0, *silent}
            break
        assert watching.silent(now, 1.0) == [rank for rank in (1, 2) if now - latest[rank] >= 1.0]


def test_a_beat_that_was_held_up_takes_nothing_back() -> None:
    watching = watch()
    newer, older = pack_beat(9, 2000), pack_beat(8, 1000)
    watching.receive(1, BEAT, 0)
    watching.knocked(1, Frame(unpack_header(newer), newer[HEADER_SIZE:]), 1)
    watching.receive(1, older, 2)
    for now in (2.0, 3.5, 5.0, 6.5, 2.0 + SILENCE_S):
        watching.receive(1, older, now)
        watching.look(now, {1: (1500, 0)})
    assert list(watching.lost) == [1]
    assert "500 bytes are on their way" in watching.lost[1]


def test_a_knock_that_brings_anything_else_is_nothing() -> None:
    watching = watch()
    for frame in (pack_frame(Op.BYE), pack_frame(Op.BEAT, b"1234"), pack_abort(2, "cut")):
        watching.knocked(1, Frame(unpack_header(frame), frame[HEADER_SIZE:]), 1.0)
    assert not watching.lost
    assert watching.silent(100.0, 1.0) == []


def test_a_rank_that_was_suspended_itself_blames_nobody() -> None:
    watching = watch()
    now = beat(watching, [1, 2], 0, 5)
    watching.look(now + 1000, {})
    assert not watching.lost
    now = beat(watching, [1], now + 1000 + BEAT_S, now + 1000 + SILENCE_S + BEAT_S)
    assert list(watching.lost) == [2]


@pytest.mark.parametrize("looks_first", [False, True])
def test_a_rank_that_was_suspended_and_is_given_up_blames_itself(looks_first: bool) -> None:
    watching = watch()
    now = beat(watching, [1, 2], 0, 5) - BEAT_S + 20
    if looks_first:
        watching.look(now, {})
    watching.receive(1, pack_abort(0, "no sign of life for 5 s", 2), now + 0.1)
    said = "it stood still for 20 s, and rank 2 has given it up: no sign of life for 5 s (host-1:1)"
    assert list(watching.lost.items()) == [(0, said)]
    assert watching.accused


def test_a_connection_that_ended_while_this_rank_was_suspended_is_its_own_fault() -> None:
    watching = watch()
    now = beat(watching, [1, 2], 0, 5) - BEAT_S + 3600
    watching.end(2, "reset", now)
    assert watching.lost == {0: "it stood still for 3600 s; of rank 2: reset (host-2:1)"}


def test_a_suspension_too_short_to_be_given_up_for_is_no_excuse() -> None:
    watching = watch()
    now = beat(watching, [1, 2], 0, 5) - BEAT_S + SUSPENDED_S + 1
    watching.receive(2, b"", now)
    assert list(watching.lost) == [2]


def test_a_suspension_long_ago_is_no_excuse() -> None:
    watching = watch()
    now = beat(watching, [1, 2], 0, 5)
    now = beat(watching, [1, 2], now + 20, now + 40)
    watching.receive(1, pack_abort(0, "no sign of life for 5 s", 2), now)
    assert list(watching.lost) == [2]


def test_looking_late_but_in_time_hides_no_silence() -> None:
    watching = watch()
    now = beat(watching, [1, 2], 0, 5)
    watching.look(now, {})
    while not watching.lost:
        now += SUSPENDED_S
        watching.look(now, {})
    assert now <= 5 + SILENCE_S + SUSPENDED_S


def look(watch: Watch, sent: int, awaited: dict[int, tuple[int, int]], start: float, end: float) -> float:
    """Rank 1 beats that it has sent so many bytes while this rank waits for those; rank 2 only beats."""
    now = start
    while now < end:
        watch.receive(1, pack_beat(7, sent), now)
        watch.receive(2, BEAT, now)
        watch.look(now, awaited)
        now += BEAT_S
    return now


def test_bytes_that_were_sent_and_do_not_come_are_the_end_of_a_connection() -> None:
    watching = watch()
    now = look(watching, 1000, {1: (1000, 0), 2: (0, 0)}, 0, 60)  # nothing is on its way: slow is not dead
    now = look(watching, 1024, {}, now, 120)  # this rank computes and does not read
    look(watching, 1024, {1: (1000, 0)}, now, now + SILENCE_S)
    assert not watching.lost
    assert watching.look(now + SILENCE_S - 0.01, {1: (1000, 0)}) == pytest.approx(now + SILENCE_S)
    watching.look(now + SILENCE_S, {1: (1000, 0)})
    assert watching.lost == {1: "its beats come, but no data for 5 s: 24 bytes are on their way (host-1:1)"}
    assert watching.watched == (2,)


def test_bytes_that_come_slowly_are_life() -> None:
    watching = watch()
    now = 0.0
    for came in range(1000, 1020):
        now = look(watching, 9000, {1: (came, came)}, now, now + SILENCE_S - BEAT_S)
    now = look(watching, 9000, {}, now, now + BEAT_S)  # the wait is interrupted
    look(watching, 9000, {1: (1019, 1019)}, now, now + SILENCE_S)
    assert not watching.lost


def test_bytes_of_a_record_that_is_not_whole_are_life() -> None:
    watching = watch()
    now = 0.0
    for progress in range(5):
        now = look(watching, 9000, {1: (1000, progress)}, now, now + SILENCE_S - BEAT_S)
    assert not watching.lost


def test_a_rank_that_gets_no_data_of_several_peers_is_lost_itself() -> None:
    """Their beats tell at different times what they have sent."""
    watching, now = watch(4), 0.0
    while not watching.lost and now < 10:
        for rank in (1, 2, 3):
            if now >= 0.3 * rank:
                watching.receive(rank, pack_beat(7, 100 if rank < 3 else 50), now)
        watching.look(now, dict.fromkeys((1, 2, 3), (50, 50)))
        now += 0.1
    assert watching.lost == {0: "the beats of ranks 1 and 2 come here, but no data for 5 s (host-1:1)"}


def test_bytes_that_did_not_come_while_this_rank_was_suspended_are_missed_from_then_on() -> None:
    watching = watch()
    now = look(watching, 1000, {1: (0, 0)}, 0, 2)
    watching.look(now + 1000, {1: (0, 0)})
    look(watching, 1000, {1: (0, 0)}, now + 1000, now + 1000 + SILENCE_S)
    assert not watching.lost


def test_the_last_rank_is_the_one_in_the_earliest_call() -> None:
    watching = watch(4)
    assert watching.last(1, 8) == 1
    for rank, sequence in ((2, 7), (3, 6)):
        watching.receive(rank, pack_beat(sequence, 0), 1.0)
    assert watching.last(1, 8) == 1  # where it is is not known
    watching.receive(1, pack_beat(8, 0), 1.0)
    assert [watching.last(suspect, 8) for suspect in (1, 2, 3)] == [3, 3, 3]
    assert watching.last(1, 6) == 1  # this rank is no further itself
    watching.receive(1, pack_frame(Op.BYE), 1.0)
    assert watching.last(1, 8) == 1


def test_the_first_loss_comes_first() -> None:
    watching = watch(4)
    beat(watching, [1, 2, 3], 0, 1)
    watching.receive(3, b"", 1)
    watching.receive(1, pack_abort(3, "it is gone"), 1)
    watching.end(2, "reset", 1)
    assert list(watching.lost.items()) == [
        (3, "its connection ended without a farewell (host-3:1)"),
        (2, "reset (host-2:1)"),
    ]
    assert watching.watched == ()


@pytest.mark.parametrize(
    ("last", "lost"),
    [
        (pack_frame(Op.BYE), {}),
        (pack_abort(2, "cut"), {2: "reported by rank 1: cut (host-1:1)"}),
        (pack_abort(1, "a wrong call"), {1: "it gave up: a wrong call (host-1:1)"}),
        (pack_abort(0, "you"), {1: "it gave up: you (host-1:1)"}),
        (pack_abort(0, "you", 2), {2: "reported by rank 1: you (host-1:1)"}),
        (pack_frame(Op.ABORT), {1: "an abort frame that blames nobody (host-1:1)"}),
        (pack_frame(Op.BEAT, b"1234"), {1: "a beat of 4 bytes (host-1:1)"}),
        (pack_frame(Op.ALL_REDUCE), {1: "ALL_REDUCE on a connection for beats (host-1:1)"}),
    ],
)
@pytest.mark.parametrize("chunk", [1, 25, 1000])
def test_last_words_however_they_arrive(last: bytes, lost: dict[int, str], chunk: int) -> None:
    watching = watch()
    words = BEAT + BEAT + last
    for start in range(0, len(words), chunk):
        if 1 in watching.watched:
            watching.receive(1, words[start : start + chunk], 1.0)
    assert watching.lost == lost
    assert watching.watched == (2,)
    assert watching.accused == (b"you" in last)


def test_what_follows_the_last_words_is_not_looked_at() -> None:
    watching = watch()
    watching.receive(1, pack_frame(Op.BYE) + BEAT + BEAT[:7], 1.0)
    assert not watching.lost
    assert watching.watched == (2,)


def test_garbage_is_a_loss() -> None:
    watching = watch()
    watching.receive(1, BEAT + b"HTTP/1.1 400", 1.0)
    assert watching.lost == {1: "these bytes are not Motley's: b'HTTP/1.1 400' (host-1:1)"}


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=60), st.floats(0, 20)), max_size=20))
def test_no_bytes_can_break_the_watch(received: list[tuple[int, bytes, float]]) -> None:
    watching = watch()
    for rank, data, now in sorted(received, key=lambda entry: entry[2]):
        if rank in watching.watched:
            watching.receive(rank, data, now)
        watching.look(now, {})
    assert all(isinstance(why, str) for why in watching.lost.values())


# -- the thread ------------------------------------------------------------------------------------------------------


def link(own_rank: int, rank: int, end: socket.socket) -> Link:
    end.setblocking(False)
    return Link(own_rank, rank, "there:1", end, is_local=True)


def pulse(own_rank: int, rank: int, end: socket.socket) -> Pulse:
    """Of one rank of two; its link for data is idle."""
    beats = link(own_rank, rank, end)
    return Pulse(watch(2, own_rank), {rank: beats}, {rank: beats})


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def heard(pulse: Pulse, seconds: float = 30.0) -> bool:
    """The pulse has called whoever waits for it."""
    return pulse in wait_ready([pulse], (), seconds)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("motley")]


def test_two_pulses_beat_until_one_leaves_in_peace(ends: tuple[socket.socket, socket.socket]) -> None:
    first, second = pulse(0, 1, ends[0]), pulse(1, 0, ends[1])
    assert len(threads()) == 2
    assert not heard(first, 0.7)
    second.close()
    assert not heard(first, 0.2)
    assert not first.lost
    first.raise_if_lost()
    first.close()
    first.close()
    assert threads() == []


def test_a_farewell_with_blame_reaches_the_waiting_thread(ends: tuple[socket.socket, socket.socket]) -> None:
    first, second = pulse(0, 1, ends[0]), pulse(1, 0, ends[1])
    second.close(pack_abort(7, "its cable is cut"))
    assert heard(first)
    with pytest.raises(PeerLost, match="rank 7 is lost: reported by rank 1: its cable is cut"):
        first.raise_if_lost()
    first.close()
    assert threads() == []


def test_the_end_of_a_connection_is_a_loss_at_once(ends: tuple[socket.socket, socket.socket]) -> None:
    ours = pulse(0, 1, ends[0])
    ends[1].close()
    assert heard(ours)
    with pytest.raises(PeerLost, match=r"^rank 1 is lost: (?!no sign of life)") as loss:
        ours.raise_if_lost()
    assert loss.value.rank == 1
    ours.close()


def test_a_peer_that_does_not_read_gets_one_beat_at_a_time(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    peer = link(0, 1, ends[0])
    with suppress(BlockingIOError):
        while True:
            ends[0].send(BEAT * 100)
    pulse = Pulse(watch(2), {1: peer}, {1: peer})
    deadline = time.monotonic() + 30
    while not peer.unsent and time.monotonic() < deadline:
        select.select((), (), (), 0.01)
    assert len(peer.unsent) == 1
    pulse.close()
