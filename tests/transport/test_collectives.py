from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any

import numpy as np
import psutil
import pytest

from motley.transport import (
    MAX_MESSAGE,
    Algorithm,
    Communicator,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    StatsSnapshot,
    TransportError,
    UsageError,
)
from motley.transport import schedule as schedule_module
from motley.transport.link import wait_ready

Run = Callable[..., list[Any]]


def values(rank: int, elements: int, dtype: type[np.floating[Any]] = np.float32) -> np.ndarray[Any, Any]:
    """Numbers of very different size, so that another order of summing gives other bits."""
    random = np.random.default_rng([rank, elements])
    return (random.standard_normal(elements) * 10.0 ** random.integers(-4, 5, elements)).astype(dtype)


def rank_order_sum(size: int, elements: int, dtype: type[np.floating[Any]] = np.float32) -> np.ndarray[Any, Any]:
    total = values(0, elements, dtype)
    for rank in range(1, size):
        total = total + values(rank, elements, dtype)
    return total


def shrink_buffers(communicator: Communicator) -> None:
    for link in communicator._links.values():
        link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        # Less than a segment of the loopback device would make TCP crawl.
        link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_all_reduce_is_the_rank_order_sum_whatever_the_algorithm(
    run_ranks: Run, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(schedule_module, "RING_PIECE_BYTES", 4096)  # several pieces in small payloads
    lengths = (0, 1, 2, 5, 2048, 4099, 30_000)
    algorithms = (*Algorithm, None)

    def work(communicator: Communicator) -> list[bytes]:
        results = []
        for elements in lengths:
            for algorithm in algorithms:
                buffer = values(communicator.rank, elements)
                communicator.all_reduce(buffer, algorithm)
                results.append(buffer.tobytes())
        return results

    wanted = [rank_order_sum(size, elements).tobytes() for elements in lengths for _ in algorithms]
    assert run_ranks(size, work) == [wanted] * size


@pytest.mark.parametrize("algorithm", Algorithm)
def test_no_size_can_deadlock(run_ranks: Run, algorithm: Algorithm) -> None:
    elements = (3 << 20) // 4

    def work(communicator: Communicator) -> bool:
        shrink_buffers(communicator)
        buffer = values(communicator.rank, elements)
        communicator.all_reduce(buffer, algorithm)
        return bool((buffer == wanted).all())

    wanted = rank_order_sum(5, elements)
    assert run_ranks(5, work) == [True] * 5


def test_all_reduce_keeps_the_shape_and_sums_float64(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> np.ndarray[Any, Any]:
        buffer = values(communicator.rank, 24, np.float64).reshape(2, 3, 4)
        communicator.all_reduce(buffer)
        return buffer

    for result in run_ranks(3, work):
        assert result.tolist() == rank_order_sum(3, 24, np.float64).reshape(2, 3, 4).tolist()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_gather_of_unequal_parts(run_ranks: Run, size: int) -> None:
    lengths = [(3, 0, 70_000, 1, 17)[rank] for rank in range(size)]

    def work(communicator: Communicator) -> list[Any]:
        out = [np.zeros(length, np.float32) for length in lengths]
        communicator.all_gather(values(communicator.rank, lengths[communicator.rank]), out)
        return [part.tolist() for part in out]

    assert run_ranks(size, work) == [[values(rank, length).tolist() for rank, length in enumerate(lengths)]] * size


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "float32", "float64"])
def test_broadcast_from_every_root(run_ranks: Run, dtype: str) -> None:
    def work(communicator: Communicator) -> list[Any]:
        results = []
        for root in range(communicator.size):
            for shape in ((0,), (2, 3), (40_000,)):
                buffer = np.full(shape, communicator.rank + 1, dtype)
                communicator.broadcast(buffer, root)
                results.append((buffer == root + 1).all())
        return results

    assert run_ranks(3, work) == [[True] * 9] * 3


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
        (lambda c: c.all_reduce(np.zeros(4, np.float16)), "float16 cannot travel"),
        (lambda c: c.all_reduce(np.zeros(4, np.int32)), "sums float32, not int32"),
        (lambda c: c.all_reduce(np.zeros((4, 4), np.float32)[:, 0]), "C-contiguous"),
        (lambda c: c.all_reduce(np.frombuffer(bytes(16), np.float32)), "writable"),
        (lambda c: c.all_gather(np.zeros(1, np.float32), [np.zeros(1, np.float32)]), "wants 2 output arrays, got 1"),
        (lambda c: c.all_gather(np.zeros(1, np.float32), [np.zeros(2, np.float32)] * 2), "gives 1 x float32"),
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
        (lambda c: c.all_reduce(np.zeros(5, np.float32)), "all_reduce 2: expected bytes of payload"),
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
    monkeypatch.setattr("motley.transport.link.MAX_MESSAGE", 1000)

    def work(communicator: Communicator) -> None:
        if communicator.rank == 0:
            communicator.send(bytes(1001), 1)
        communicator.recv(1 - communicator.rank, 5.0)

    errors = run_ranks(2, work)
    assert isinstance(errors[1], ProtocolError)
    assert "a message of 1001 bytes; at most 1000 are allowed" in str(errors[1])
    assert isinstance(errors[0], PeerLost)
    assert "a message of 1001 bytes" in str(errors[0])


def test_a_silent_peer_times_out_by_name_and_everyone_learns_it(run_ranks: Run) -> None:
    noticed = threading.Event()

    def work(communicator: Communicator) -> None:
        communicator.deadline_s = 0.3 if communicator.rank == 0 else 20.0
        if communicator.rank == 2:
            noticed.wait(20.0)  # alive, but in no collective
            return
        try:
            communicator.all_reduce(np.zeros(4, np.float32), Algorithm.ONE_SHOT)
        finally:
            if communicator.rank == 1:
                noticed.set()

    errors = run_ranks(3, work)
    assert isinstance(errors[0], PeerTimeout)
    assert errors[0].rank == 2
    assert isinstance(errors[1], PeerLost)
    assert errors[1].rank == 2
    assert "reported by rank 0: rank 2 was silent for 0.3 s" in str(errors[1])


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


def test_calls_after_close_are_wrong(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> None:
        communicator.close()
        communicator.close()
        with pytest.raises(UsageError, match="closed"):
            communicator.all_reduce(np.zeros(1, np.float32))

    assert run_ranks(2, work) == [None, None]


def test_stats_tell_waiting_from_computing(run_ranks: Run) -> None:
    """Rank 0 idles until rank 1 begins a step, then computes while rank 1 waits for it in the collective."""

    def work(communicator: Communicator) -> tuple[StatsSnapshot, float]:
        buffer = np.zeros(8, np.float32)
        communicator.all_reduce(buffer)
        communicator.stats.reset()
        started = perf_counter()
        if communicator.rank == 0:
            communicator.recv(1, 5.0)
            started = perf_counter()
            sleep(0.1)
        else:
            sleep(0.1)
            communicator.send(b"", 0)
        communicator.all_reduce(buffer)
        return communicator.stats.snapshot(), perf_counter() - started

    (stats_0, elapsed_0), (stats_1, _) = run_ranks(2, work)
    assert stats_0.collectives == stats_1.collectives == 1
    assert 0.1 <= stats_0.compute_s < elapsed_0 + 0.01  # its wait for the message is not in it
    assert stats_1.compute_s >= 0.1
    assert stats_1.wait_s >= 0.05


def test_twenty_thousand_collectives_leave_nothing_behind(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> list[int]:
        buffer = np.ones(16, np.float32)
        counts = []
        for rounds in (10, 20_000):
            for _ in range(rounds):
                communicator.all_reduce(buffer)
                buffer[:] = 1
            if communicator.rank == 0:  # counting opens a file; the other rank waits in a collective meanwhile
                process = psutil.Process()
                counts.append(process.num_handles() if psutil.WINDOWS else process.num_fds())
            communicator.all_reduce(buffer)
        return counts

    before, after = run_ranks(2, work)[0]
    assert after <= before
