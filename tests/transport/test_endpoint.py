"""Messages between ranks, calls that are wrong, and how a mesh ends: who is named to whom."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from motley.transport import (
    MAX_MESSAGE,
    Algorithm,
    Communicator,
    Listener,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    TransportError,
    UsageError,
)
from motley.transport import endpoint as endpoint_module
from motley.transport.links.link import wait_ready
from motley.transport.links.wire import pack_abort
from tests.transport.ranks import LIMIT_S, Run, shrink_buffers, until

Array = npt.NDArray[Any]


def test_messages_of_any_length_keep_their_order(run_ranks: Run) -> None:
    messages = [b"", b"x", bytes(100_000), b"last"]

    def work(communicator: Communicator) -> list[bytes]:
        right, left = (communicator.rank + 1) % 3, (communicator.rank - 1) % 3
        for message in messages:
            communicator.send(message, right)
        got = [communicator.recv(left, 10.0) for _ in messages]
        return [*got, communicator.broadcast_message(b"step" if communicator.rank == 1 else None, 1, None)]

    assert run_ranks(3, work) == [[*messages, b"step"]] * 3


def test_huge_messages_both_ways_do_not_deadlock(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> int:
        shrink_buffers(communicator)
        communicator.send(bytes(3 << 20), 1 - communicator.rank)
        total = np.ones(1, np.float32)
        length = len(communicator.recv(1 - communicator.rank, 10.0))
        communicator.all_reduce(total)
        return length + int(total[0])

    assert run_ranks(2, work) == [(3 << 20) + 2] * 2


def test_what_is_flushed_needs_no_later_call(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> list[Any]:
        shrink_buffers(communicator)
        if communicator.rank == 1:
            return [len(communicator.recv(0, 10.0))]
        communicator.send(bytes(3 << 20), 1)
        before = bool(communicator._links[1].unsent)
        communicator.flush()
        return [before, bool(communicator._links[1].unsent)]

    assert run_ranks(2, work) == [[True, False], [3 << 20]]


def test_a_last_message_arrives_before_the_farewell(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> bytes:
        if communicator.rank:
            communicator.send(bytes([communicator.rank]) * 10, 0)
            return b""
        return communicator.recv(2, 10.0) + communicator.recv(1, 10.0)

    assert run_ranks(3, work)[0] == b"\2" * 10 + b"\1" * 10


def test_waiting_for_a_message_is_bounded_and_takes_nothing(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> list[Any]:
        if communicator.rank == 1:
            communicator.recv(0, 20.0)
            communicator.send(b"step", 0)
            return []
        waited = [communicator.wait_message(1, 0.05)]
        communicator.check()
        communicator.send(b"go", 1)
        waited += [communicator.wait_message(1, 20.0), communicator.wait_message(1, 0.0)]
        return [*waited, communicator.recv(1, 1.0)]

    assert run_ranks(2, work)[0] == [False, True, True, b"step"]


def test_a_check_finds_a_peer_that_has_died(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> None:
        if communicator.rank == 1:
            communicator._links[0].socket.close()
            return
        assert wait_ready([communicator._links[1]], (), 20.0)
        communicator.check()

    error = run_ranks(2, work)[0]
    assert isinstance(error, PeerLost)
    assert error.rank == 1


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda c: c.all_reduce(np.zeros(4, np.complex64)), "complex64 cannot travel"),
        (lambda c: c.all_reduce(np.zeros(4, ">f4")), ">f4 cannot travel"),
        (lambda c: c.all_reduce(np.zeros(4, np.int32)), "sums float32, float16, bfloat16 and float64, not int32"),
        (lambda c: c.all_reduce(np.zeros((4, 4), np.float32)[:, 0]), "C-contiguous"),
        (lambda c: c.all_reduce(np.frombuffer(bytes(16), np.float32)), "writable"),
        (lambda c: c.all_gather(np.zeros(1, np.float32), [np.zeros(1, np.float32)]), "wants 2 output arrays, got 1"),
        (lambda c: c.all_gather(np.zeros(1, np.float32), [np.zeros(2, np.float32)] * 2), "gives 1 x float32"),
        (lambda c: c.all_gather(np.zeros(1, np.float32), [np.zeros(1), np.zeros(1)]), "all must be of one type"),
        (lambda c: c.all_gather(np.zeros(1), [np.zeros(1)] * 2, Algorithm.TWO_SHOT), "all_gather has no two-shot"),
        (lambda c: c.reduce_scatter(np.zeros(4), np.zeros(2), [1, 2]), "do not cut 4 elements in 2"),
        (
            lambda c: c.reduce_scatter(np.zeros(4), np.zeros(3)),
            "out takes 3 x float64, this rank's part is 2 x float64",
        ),
        (lambda c: c.reduce_scatter(z := np.zeros(4), z[1:3]), "must not overlap"),
        (lambda c: c.all_to_all([np.zeros(1)], [np.zeros(1)]), "wants 2 arrays each way, got 1 and 1"),
        (lambda c: c.all_to_all([np.zeros(1)] * 2, [np.zeros(1, np.float32)] * 2), "of one type"),
        (lambda c: c.all_to_all([np.zeros(1)] * 2, [np.zeros(2)] * 2), "has 1 elements for itself"),
        (lambda c: c.broadcast(np.zeros(1, np.float32), 2), "rank 2 is no peer"),
        (lambda c: c.send(b"", c.rank), "is no peer of rank"),
        (lambda c: c.send(bytes(MAX_MESSAGE + 1), 1 - c.rank), f"at most {MAX_MESSAGE}"),
        (lambda c: c.broadcast_message(None, c.rank, 1.0), "root must give the message"),
    ],
)
def test_wrong_calls_are_refused_before_anything_is_sent(
    run_ranks: Run, call: Callable[[Communicator], object], text: str
) -> None:
    def work(communicator: Communicator) -> float:
        with pytest.raises(UsageError, match=text):
            call(communicator)
        buffer = np.ones(1, np.float32)
        communicator.all_reduce(buffer)  # the communicator is as good as before
        return float(buffer[0])

    assert run_ranks(2, work) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda c: c.all_reduce(np.zeros(5, np.float32)), "expected bytes of payload"),
        (lambda c: c.all_reduce(np.zeros(4, np.float64)), "expected element type"),
        (lambda c: c.all_reduce(np.zeros(4, np.float32), Algorithm.TWO_SHOT), "expected bytes of payload"),
        (lambda c: c.all_gather(np.zeros(4, np.float32), [np.zeros(4, np.float32)] * 2), "in another call"),
        (lambda c: (c.send(b"x", 1 - c.rank), c.recv(1 - c.rank, 5.0)), "in another call"),
    ],
)
def test_a_peer_in_another_call_is_an_error(run_ranks: Run, call: Callable[[Communicator], object], text: str) -> None:
    def work(communicator: Communicator) -> None:
        if communicator.rank:
            call(communicator)
        else:
            communicator.all_reduce(np.zeros(4, np.float32))

    errors = run_ranks(2, work)
    assert all(isinstance(error, ProtocolError | PeerLost) for error in errors)
    blamed = [error for error in errors if isinstance(error, ProtocolError)]
    assert blamed
    assert any(text in str(error) for error in blamed)


def test_a_message_beyond_the_limit_is_refused_on_arrival(run_ranks: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.transport.links.link.MAX_MESSAGE", 1 << 20)

    def work(communicator: Communicator) -> None:
        if communicator.rank == 0:
            communicator.send(bytes((1 << 20) + 1), 1)
        communicator.recv(1 - communicator.rank, 5.0)

    errors = run_ranks(2, work)
    assert isinstance(errors[1], ProtocolError)
    assert "a message of 1048577 bytes; at most 1048576 are allowed" in str(errors[1])
    assert isinstance(errors[0], PeerLost)
    assert "a message of 1048577 bytes" in str(errors[0])


def test_a_silent_peer_times_out_by_name_and_everyone_learns_it(run_ranks: Run) -> None:
    begun, noticed = threading.Event(), threading.Event()

    def work(communicator: Communicator) -> None:
        buffer = np.zeros(4, np.float32)
        if communicator.rank == 0:
            begun.wait(LIMIT_S)
            communicator.deadline_s = 0.3
            communicator.all_reduce(buffer, Algorithm.ONE_SHOT)
        if communicator.rank == 1:
            try:
                pending = communicator.all_reduce_start(buffer, Algorithm.ONE_SHOT)
                begun.set()  # rank 0 has heard of it whenever it looks
                pending.finish()
            finally:
                noticed.set()
        noticed.wait(LIMIT_S)  # rank 2 is alive, but in no collective

    errors = run_ranks(3, work)
    assert isinstance(errors[0], PeerTimeout)
    assert errors[0].rank == 2
    assert isinstance(errors[1], PeerLost)
    assert errors[1].rank == 2
    assert "reported by rank 0: rank 2 was silent for 0.3 s" in str(errors[1])


def test_a_timeout_in_a_ring_names_the_rank_that_has_not_come(run_ranks: Run) -> None:
    """Rank 0 waits for rank 3, which waits for rank 2, which waits for rank 1, which computes; beats have told that."""
    noticed = threading.Event()

    def work(communicator: Communicator) -> None:
        if communicator.rank == 1:
            noticed.wait(LIMIT_S)
            return
        if communicator.rank == 0:
            communicator.deadline_s = 1.5
            told, here = communicator._pulse._watch._sequences, communicator._pulse.sequence  # type: ignore[union-attr]
            until(lambda: min(told.get(rank, 0) for rank in (2, 3)) > here)
        try:
            communicator.all_reduce(np.zeros(4, np.float32), Algorithm.RING)
        finally:
            noticed.set()

    errors = run_ranks(4, work)
    assert isinstance(errors[0], PeerTimeout)
    assert errors[0].rank == 1
    assert "it is behind in its calls; all_reduce" in str(errors[0])
    assert "of rank 3" in str(errors[0])
    for error in errors[2:]:
        assert isinstance(error, PeerLost)
        assert error.rank == 1


def test_a_timeout_of_a_message_names_its_sender(run_ranks: Run) -> None:
    """Rank 2 is behind, alive and of no concern: rank 1 has the collective and never sends what rank 0 waits for."""
    noticed = threading.Event()

    def work(communicator: Communicator) -> None:
        buffer = np.zeros(4, np.float32)
        communicator.barrier()
        if communicator.rank == 0:
            try:
                communicator.broadcast(buffer, 0, Algorithm.ONE_SHOT)
                communicator.recv(1, 1.2)
            finally:
                noticed.set()
        if communicator.rank == 1:
            communicator.broadcast(buffer, 0, Algorithm.ONE_SHOT)
        noticed.wait(20.0)

    error = run_ranks(3, work)[0]
    assert isinstance(error, PeerTimeout)
    assert error.rank == 1


def test_a_timeout_sooner_than_beats_can_tell_names_the_rank_that_was_waited_for(
    run_ranks: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, noticed = threading.Event(), threading.Event()

    def work(communicator: Communicator) -> None:
        buffer = np.zeros(4, np.float32)
        if communicator.rank == 0:
            monkeypatch.setattr(communicator._pulse, "last", lambda suspect: 1)
            begun.wait(LIMIT_S)
            communicator.deadline_s = 0.3
            try:
                communicator.all_reduce(buffer, Algorithm.ONE_SHOT)
            finally:
                noticed.set()
        if communicator.rank == 1:
            pending = communicator.all_reduce_start(buffer, Algorithm.ONE_SHOT)
            begun.set()
            pending.finish()
        noticed.wait(LIMIT_S)

    error = run_ranks(3, work)[0]
    assert isinstance(error, PeerTimeout)
    assert error.rank == 2


def test_a_long_spin_does_not_hide_a_deadline(run_ranks: Run) -> None:
    noticed = threading.Event()

    def work(communicator: Communicator) -> float:
        if communicator.rank == 1:
            noticed.wait(60.0)
            return 0.0
        began = perf_counter()
        communicator.deadline_s = 0.1
        try:
            with pytest.raises(PeerTimeout):
                communicator.barrier()
        finally:
            noticed.set()
        return perf_counter() - began

    assert 0.1 <= run_ranks(2, work, spin_s=60.0)[0] < 30.0


def test_an_accused_rank_accuses_nobody_else(run_ranks: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 misses rank 1, which learns it and must not tell rank 2 another name."""
    told: list[int] = []

    def tell(blamed: int, why: str, finder: int | None) -> bytes:
        told.append(blamed)
        return pack_abort(blamed, why, finder)

    monkeypatch.setattr(endpoint_module, "pack_abort", tell)
    monkeypatch.setattr(endpoint_module, "LAST_WORDS_S", LIMIT_S)  # those of rank 0 are waited for

    def work(communicator: Communicator) -> None:
        if communicator.rank == 0:
            communicator.recv(1, 0.1)
        communicator.recv(0, 20.0)

    errors = run_ranks(3, work)
    assert isinstance(errors[0], PeerTimeout)
    assert isinstance(errors[1], PeerLost)
    assert isinstance(errors[2], PeerLost)
    assert (errors[0].rank, errors[2].rank) == (1, 1)
    assert errors[1].rank == 0  # whoever is faster to tell it
    assert told == [1, 1, 1]


def test_a_parked_rank_notices_the_end_of_a_peer_that_it_expects_nothing_of(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> None:
        if communicator.rank == 2:
            for link in communicator._links.values():
                link.socket.close()  # as the system does when a process dies
        else:
            communicator.recv(1 - communicator.rank, 20.0)

    errors = run_ranks(3, work)
    for error in errors[:2]:
        assert isinstance(error, PeerLost)
        assert error.rank == 2


def test_a_rank_that_fails_outside_of_the_transport_tells_its_peers_why(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> None:
        if communicator.rank == 1:
            raise MemoryError("the cache does not fit")
        communicator.all_reduce(np.zeros(4, np.float32))

    errors = run_ranks(3, work)
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerLost)
        assert error.rank == 1
        assert "the cache does not fit" in str(error)


def test_a_broken_communicator_raises_the_same_error_at_once(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> list[Any]:
        if communicator.rank == 1:
            return []
        errors = []
        for call in (
            lambda: communicator.recv(1, 5.0),
            lambda: communicator.all_reduce(np.zeros(1, np.float32)),
            lambda: communicator.send(b"", 1),
            lambda: communicator.broadcast_message(b"", 0, 1.0),
        ):
            with pytest.raises(TransportError) as error:
                call()
            errors.append(error.value)
        return errors

    errors = run_ranks(2, work)[0]
    assert isinstance(errors[0], PeerLost)
    assert "left the session" in str(errors[0])
    assert all(error is errors[0] for error in errors)


class WrongError(Exception):
    """Meant for people."""


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (KeyError("layer"), "KeyError('layer')"),
        (MemoryError(), "MemoryError()"),
        (WrongError("this rank computes wrongly"), ": this rank computes wrongly"),
    ],
)
def test_why_a_rank_gave_up_is_told(run_ranks: Run, error: Exception, why: str) -> None:
    def work(communicator: Communicator) -> str:
        def leave() -> None:
            with communicator:
                if communicator.rank == 1:
                    raise error
                communicator.barrier()

        with pytest.raises((type(error), PeerLost)) as raised:
            leave()
        return str(raised.value)

    told = run_ranks(2, work)[0]
    assert ("it gave up" in told, why in told) == (True, True), told


def test_calls_after_close_are_wrong(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> None:
        communicator.close()
        communicator.close()
        with pytest.raises(UsageError, match="closed"):
            communicator.all_reduce(np.zeros(1, np.float32))

    assert run_ranks(2, work) == [None, None]


def test_of_several_ports_the_first_that_is_free_is_taken() -> None:
    with closing(Listener("127.0.0.1")) as taken:
        port = taken.port
        with closing(Listener("127.0.0.1", port, min(port + 50, 65535))) as other:
            assert port < other.port <= port + 50
        with pytest.raises(UsageError, match=f"port {port}: "):
            Listener("127.0.0.1", port, port)
    with pytest.raises(UsageError, match="any of the ports 70000 to 70001"):
        Listener("127.0.0.1", 70000, 70001)
