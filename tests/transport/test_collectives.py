from __future__ import annotations

import gc
import hashlib
import os
import socket
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from time import monotonic, perf_counter, perf_counter_ns, sleep
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import psutil
import pytest

from motley.transport import (
    MAX_MESSAGE,
    Algorithm,
    Communicator,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    Record,
    Stats,
    StatsSnapshot,
    TransportError,
    UsageError,
    WireFormat,
)
from motley.transport import endpoint as endpoint_module
from motley.transport import exchange as exchange_module
from motley.transport import plans as plans_module
from motley.transport import schedule as schedule_module
from motley.transport import stats as stats_module
from motley.transport.link import wait_ready
from motley.transport.schedule import Operation, Schedule, build
from motley.transport.stats import RECORDS
from motley.transport.wire import Op, pack_abort

Run = Callable[..., list[Any]]
Array = npt.NDArray[Any]
LIMIT_S = 30.0


def until(condition: Callable[[], Any]) -> None:
    """Wait for what another rank does."""
    deadline = monotonic() + LIMIT_S
    while not condition():
        assert monotonic() < deadline
        sleep(1e-3)


def is_waiting(communicator: Communicator) -> bool:
    """It sleeps in a call until it hears of a peer."""
    assert communicator._pulse is not None
    return communicator._pulse.awaited is not tuple


class Clock:
    """Stands still until a test moves it on."""

    def __init__(self) -> None:
        self.now_ns = 10**9

    def __call__(self) -> int:
        return self.now_ns

    def move(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


def values(rank: int, elements: int, dtype: npt.DTypeLike = np.float32) -> Array:
    """Numbers of very different size, so that another order of summing gives other bits."""
    random = np.random.default_rng([rank, elements])
    return (random.standard_normal(elements) * 10.0 ** random.integers(-4, 5, elements)).astype(dtype)


def rank_order_sum(size: int, elements: int, dtype: npt.DTypeLike = np.float32) -> Array:
    """What any exact sum must be, bit by bit: taken in FP32 (float64 in itself), rounded to the type at the end."""
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    total = values(0, elements, dtype).astype(wide)
    for rank in range(1, size):
        total = total + values(rank, elements, dtype).astype(wide)
    with np.errstate(over="ignore"):
        return total.astype(dtype)


def rounded(numbers: Array, wire_format: WireFormat) -> Array:
    """float32 values as they are after a journey, written down once more and independently."""
    out = numbers.copy()
    if wire_format is WireFormat.BF16:
        out[:] = numbers.astype(ml_dtypes.bfloat16)
    elif wire_format is WireFormat.INT8:
        for start in range(0, len(numbers), 64):
            block = numbers[start : start + 64]
            scale = np.abs(block).max() * np.float32(1 / 127)
            out[start : start + 64] = np.rint(block / scale).astype(np.int8) * scale if scale else 0
    return out


def replay(schedule: Schedule, terms: Sequence[Array], wire_format: WireFormat) -> list[Array]:
    """What each rank must hold in the end, by going through the transfers on plain arrays, step by step."""
    held = [term.copy() for term in terms]
    travelled = set()  # totals that are rounded already
    one_shot = (schedule.goal.operation, schedule.algorithm) == (Operation.ALL_REDUCE, Algorithm.ONE_SHOT)
    for transfers in schedule.steps():
        arrived: dict[tuple[int, int, int], list[tuple[int, Array]]] = {}
        for t in transfers:
            start, stop = t.part.start, t.part.stop
            if len(t.terms) < len(terms):
                sent = rounded(held[t.source][start:stop], wire_format)
                arrived.setdefault((t.target, start, stop), []).append((t.terms.start, sent))
            else:  # a total is taken as it travels, also by its owner
                if (t.source, start) not in travelled:
                    held[t.source][start:stop] = rounded(held[t.source][start:stop], wire_format)
                held[t.target][start:stop] = held[t.source][start:stop]
                travelled |= {(t.source, start), (t.target, start)}
        for (rank, start, stop), frames in arrived.items():
            own = held[rank][start:stop]
            frames.append((rank, rounded(own, wire_format) if one_shot else own))
            total, *others = [values for _, values in sorted(frames, key=lambda frame: frame[0])]
            for term in others:
                total = total + term
            held[rank][start:stop] = total
    return held


def shrink_buffers(communicator: Communicator) -> None:
    for link in communicator._links.values():
        link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        # Less than a segment of the loopback device would make TCP crawl.
        link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)


SIZES = (0, 1, 2, 1023, 1024, 1025, 4099)
"""Elements: none, one, fewer than ranks, around a segment (1024 here), several segments and an odd rest."""


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "SEGMENT_BYTES", 4096)


# The grid of ranks x sizes x operations x formats is covered like this: all ranks x all small sizes x all sums in each
# format; all ranks x all small sizes x what only moves (no format touches it) in one; 3 MiB in all formats and
# operations with some ranks. TLS is below the frames: `test_security` runs collectives on it.


@pytest.mark.parametrize("wire_format", WireFormat)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8])
def test_sums_are_bit_by_bit_what_they_should_be(
    run_ranks: Run, small_segments: None, size: int, wire_format: WireFormat
) -> None:
    def work(communicator: Communicator) -> list[bytes]:
        results = []
        for elements in SIZES:
            for algorithm in Algorithm:
                buffer = values(communicator.rank, elements)
                communicator.all_reduce(buffer, algorithm)
                results.append(buffer.tobytes())
            buffer = values(communicator.rank, elements)
            communicator.all_reduce(buffer)  # as it chooses
            assert buffer.tobytes() in results[-3:]
            lengths = unequal(elements, size)
            data = values(communicator.rank, elements)
            out = np.empty(lengths[communicator.rank], np.float32)
            communicator.reduce_scatter(data, out, lengths)
            assert data.tobytes() == values(communicator.rank, elements).tobytes()
            gathered = [np.empty(length, np.float32) for length in lengths]
            communicator.all_gather(out, gathered)
            results.append(b"".join(part.tobytes() for part in gathered))
        return results

    wanted = []
    for elements in SIZES:
        terms = [values(rank, elements) for rank in range(size)]
        for algorithm in Algorithm:
            schedule = build(schedule_module.all_reduce(elements, size), algorithm, 4)
            wanted.append(replay(schedule, terms, wire_format)[0].tobytes())
        schedule = build(schedule_module.reduce_scatter(unequal(elements, size)), Algorithm.ONE_SHOT, 4)
        owned = zip(replay(schedule, terms, wire_format), schedule.goal.pieces, strict=True)
        wanted.append(b"".join(held[piece.part.start : piece.part.stop].tobytes() for held, piece in owned))
        if wire_format is WireFormat.FP32:
            assert set(wanted[-4:]) == {rank_order_sum(size, elements).tobytes()}
    results = run_ranks(size, work, wire_format=wire_format)
    assert results == [wanted] * size


def unequal(elements: int, size: int) -> list[int]:
    """Lengths that sum to `elements`: the first rank gets nothing, the last one most."""
    shares = [elements * rank * rank // (size * size) for rank in range(size)]
    return [b - a for a, b in pairwise([*shares, elements])]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("wire_format", WireFormat)
def test_other_types_are_summed_in_fp32_or_better(
    run_ranks: Run, small_segments: None, dtype: str, wire_format: WireFormat
) -> None:
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    exact = wire_format is not WireFormat.INT8 or dtype == "float64"

    def work(communicator: Communicator) -> list[Array]:
        results = []
        for elements in (1, 1025, 4099):
            for algorithm in Algorithm:
                buffer = values(communicator.rank, elements, kind)
                communicator.all_reduce(buffer, algorithm)
                results.append(buffer)
            even = schedule_module.even_parts(elements, 3)
            data = values(communicator.rank, elements, kind)
            own = data[even[communicator.rank].start : even[communicator.rank].stop]
            communicator.reduce_scatter(data, own)  # into itself
            gathered = np.split(np.empty(elements, kind), [even[1].start, even[2].start])
            communicator.all_gather(own, gathered)
            results.append(np.concatenate(gathered))
        return results

    results = run_ranks(3, work, wire_format=wire_format)
    wanted = [rank_order_sum(3, elements, kind) for elements in (1, 1025, 4099) for _ in range(4)]
    for result in results:
        assert [got.tobytes() for got in result] == [got.tobytes() for got in results[0]]
        for got, want in zip(result, wanted, strict=True):
            assert got.dtype == kind
            if exact:
                assert got.tobytes() == want.tobytes()
            elif dtype == "bfloat16":  # float16 overflows with these values, in parts of the block only
                errors = np.abs(got.astype(np.float64) - want.astype(np.float64))
                assert (errors <= 0.03 * np.abs(want.astype(np.float64)).max()).all()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8])
def test_what_only_moves_arrives_as_it_was(run_ranks: Run, small_segments: None, size: int) -> None:
    def work(communicator: Communicator) -> None:
        rank = communicator.rank
        for elements in SIZES:
            lengths = unequal(elements, size)
            for algorithm in (Algorithm.ONE_SHOT, Algorithm.RING, None):
                out = [np.zeros(length, np.float16) for length in lengths]
                communicator.all_gather(values(rank, lengths[rank], np.float16), out, algorithm)
                for source, part in enumerate(out):
                    assert part.tobytes() == values(source, lengths[source], np.float16).tobytes()
            for algorithm in (*Algorithm, None):
                buffer = values(rank, elements)
                communicator.broadcast(buffer, elements % size, algorithm)
                assert buffer.tobytes() == values(elements % size, elements).tobytes()
            # Rank a has (a + b) mod 3 times the elements for rank b.
            data = [values(100 * rank + target, (rank + target) % 3 * elements) for target in range(size)]
            taken = [np.zeros((source + rank) % 3 * elements, np.float32) for source in range(size)]
            communicator.all_to_all(data, taken)
            for source, got in enumerate(taken):
                assert got.tobytes() == values(100 * source + rank, (source + rank) % 3 * elements).tobytes()
            communicator.barrier()

    assert run_ranks(size, work, wire_format=WireFormat.INT8) == [None] * size


@pytest.mark.parametrize("wire_format", WireFormat)
@pytest.mark.parametrize("size", [2, 5])
def test_three_mebibytes_of_everything(run_ranks: Run, size: int, wire_format: WireFormat) -> None:
    elements = (3 << 20) // 4

    def work(communicator: Communicator) -> str:
        digest = hashlib.sha256()
        rank, lengths = communicator.rank, unequal(elements, size)
        for algorithm in (Algorithm.TWO_SHOT, Algorithm.RING):
            buffer = terms[rank].copy()
            communicator.all_reduce(buffer, algorithm)
            digest.update(buffer)
            if wire_format is WireFormat.FP32:
                assert (buffer == wanted).all()
            else:
                assert np.abs(buffer - wanted).max() < 0.05 * np.abs(wanted).max()
        out = np.empty(lengths[rank], np.float32)
        communicator.reduce_scatter(terms[rank], out, lengths)
        gathered = [np.empty(length, np.float32) for length in lengths]
        communicator.all_gather(out, gathered)
        digest.update(np.concatenate(gathered))
        communicator.broadcast(buffer, 1, Algorithm.TWO_SHOT)
        digest.update(buffer)
        grid = terms[rank][: elements // size * size].reshape(size, -1)
        communicator.all_to_all(list(grid), list(crossed := np.empty_like(grid)))
        assert all(
            (crossed[source] == terms[source][: grid.size].reshape(size, -1)[rank]).all() for source in range(size)
        )
        return digest.hexdigest()

    terms = [values(rank, elements) for rank in range(size)]
    wanted = rank_order_sum(size, elements)
    results = run_ranks(size, work, wire_format=wire_format)
    assert isinstance(results[0], str), results[0]
    assert results == [results[0]] * size


def test_all_to_all_in_one_buffer(run_ranks: Run) -> None:
    lengths = [[2, 20_000, 2], [1, 3, 2], [0, 3, 30_000]]  # from row to column

    def work(communicator: Communicator) -> None:
        rank = communicator.rank
        row = np.arange(70_000, dtype=np.int32) + 100_000 * rank
        given = np.split(row[: sum(lengths[rank])], np.cumsum(lengths[rank])[:-1])
        column = [lengths[source][rank] for source in range(3)]
        taken = np.split(row[: sum(column)], np.cumsum(column)[:-1])
        communicator.all_to_all(given, taken)
        for source, part in enumerate(taken):
            first = sum(lengths[source][:rank]) + 100_000 * source
            assert part.tolist() == list(range(first, first + column[source]))

    assert run_ranks(3, work) == [None] * 3


def test_a_split_call_lets_the_rank_compute_between(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> StatsSnapshot:
        small, large = np.ones(8, np.float32), np.ones(1 << 20, np.float32)
        communicator.all_reduce(small)
        communicator.barrier()
        communicator.stats.reset()
        pending = communicator.all_reduce_start(small)
        with pytest.raises(UsageError, match="must be finished before the next call"):
            communicator.all_reduce(large)
        with pytest.raises(UsageError, match="must be finished before the next call"):
            communicator.send(b"", 1 - communicator.rank)
        sleep(0.05)
        pending.finish()
        assert small.tolist() == [4.0] * 8
        with pytest.raises(UsageError, match="finished already"):
            pending.finish()
        snapshot = communicator.stats.snapshot()
        pending = communicator.all_reduce_start(large)
        pending.finish()
        assert (large == 2).all()
        return snapshot

    for snapshot in run_ranks(2, work):
        assert isinstance(snapshot, StatsSnapshot), snapshot
        assert snapshot.collectives == 1
        assert snapshot.compute_s >= 0.05  # what happens between start and finish is no wait


def test_forecasts_are_the_same_on_all_ranks(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> list[Any]:
        choices = [communicator.forecast(operation, 3000) for operation in Operation]
        assert communicator.forecast(Operation.ALL_REDUCE, 3000, algorithm=Algorithm.RING).schedule.algorithm == "ring"
        with pytest.raises(UsageError, match="sums float32"):
            communicator.forecast(Operation.ALL_REDUCE, 10, np.int32)
        return [(choice.schedule.algorithm, choice.seconds) for choice in choices]

    results = run_ranks(3, work)
    assert results == [results[0]] * 3
    assert all(seconds > 0 for _, seconds in results[0])


@pytest.mark.parametrize("algorithm", Algorithm)
def test_no_size_can_deadlock(run_ranks: Run, algorithm: Algorithm) -> None:
    elements = (1 << 20) // 4

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
    monkeypatch.setattr("motley.transport.link.MAX_MESSAGE", 1 << 20)

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

    def tell(blamed: int, why: str) -> bytes:
        told.append(blamed)
        return pack_abort(blamed, why)

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
    assert errors[1].rank in (0, 2)  # whoever is faster to tell it
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


def test_stats_tell_waiting_from_computing(run_ranks: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 idles until rank 1 begins a step, then computes while rank 1 waits for it in the collective."""
    clock, ranks = Clock(), dict[int, Communicator]()
    for module in (stats_module, exchange_module):
        monkeypatch.setattr(module, "perf_counter_ns", clock)

    def work(communicator: Communicator) -> StatsSnapshot:
        buffer = np.zeros(8, np.float32)
        ranks[communicator.rank] = communicator
        communicator.all_reduce(buffer)
        communicator.stats.reset()
        if communicator.rank == 0:
            communicator.recv(1, LIMIT_S)
            until(lambda: is_waiting(ranks[1]))
            clock.move(0.2)
        else:
            until(lambda: is_waiting(ranks[0]))
            clock.move(0.1)
            communicator.send(b"", 0)
        communicator.all_reduce(buffer)
        return communicator.stats.snapshot()

    stats_0, stats_1 = run_ranks(2, work)
    assert stats_0.collectives == stats_1.collectives == 1
    assert (stats_0.compute_s, stats_0.wait_s) == (0.2, 0)  # its wait for the message is in neither
    assert (stats_1.compute_s, stats_1.wait_s) == (0.1, 0.2)


def test_the_straggler_is_named(run_ranks: Run) -> None:
    """Rank 1 comes 30 ms after the others have heard of each other."""
    ranks, together = dict[int, Communicator](), threading.Barrier(3, timeout=LIMIT_S)

    def work(communicator: Communicator) -> StatsSnapshot:
        buffer = np.zeros(8, np.float32)
        ranks[communicator.rank] = communicator
        communicator.barrier()
        communicator.stats.reset()
        together.wait()  # all have left it
        before = perf_counter_ns()
        together.wait()
        for _ in range(5):
            if communicator.rank == 1:
                until(lambda since=before: min(ranks[0]._exchange.heard_ns[2], ranks[2]._exchange.heard_ns[0]) > since)
                sleep(0.03)
                before = perf_counter_ns()
            communicator.all_reduce(buffer, Algorithm.ONE_SHOT)
        return communicator.stats.snapshot()

    snapshots = run_ranks(3, work)
    assert [snapshot.straggler for snapshot in snapshots] == [1, 1, 1]
    for rank in (0, 2):
        snapshot = snapshots[rank]
        assert snapshot.waited_for_s[1] == pytest.approx(snapshot.wait_s)
        assert snapshot.wait_s >= snapshot.last_s[1] >= 0.15
        assert snapshot.last_s[2 - rank] == 0
        assert snapshot.waited_for_s[rank] == snapshot.last_s[rank] == 0
    assert snapshots[1].compute_s >= 0.15


def test_every_collective_is_recorded(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> list[Record]:
        buffer = np.zeros(8, np.float32)
        communicator.barrier()
        communicator.stats.reset()
        for _ in range(3):
            if communicator.rank == 1:
                communicator.wait_message(0, LIMIT_S)  # it has begun
                sleep(0.03)
            communicator.all_reduce(buffer, Algorithm.ONE_SHOT)
        pending = communicator.all_reduce_start(buffer)
        sleep(0.03)
        pending.finish()
        communicator.barrier()
        return communicator.stats.records()

    records = run_ranks(2, work)
    for rank, own in enumerate(records):
        assert [record.operation for record in own] == [Op.ALL_REDUCE] * 4 + [Op.BARRIER]
        assert [record.sequence for record in own] == [record.sequence for record in records[0]]
        assert [b.sequence - a.sequence for a, b in pairwise(own)] == [1] * 4
        assert own[3].compute_s >= 0.03
        assert all(record.wire_s > 0 for record in own)
        for record in own[:3]:
            assert (record.waited_for == 1 and record.wait_s >= 0.03) if rank == 0 else record.compute_s >= 0.03


def test_a_refused_call_is_no_end_of_computing(run_ranks: Run) -> None:
    """The time before it would count twice."""

    def work(communicator: Communicator) -> tuple[float, float]:
        buffer = np.zeros(8, np.float32)
        communicator.all_reduce(buffer)
        began = perf_counter()
        communicator.stats.reset()
        pending = communicator.all_reduce_start(buffer)
        pending.finish()
        sleep(0.05)
        for wrong in (pending.finish, lambda: communicator.all_reduce(np.zeros(8, np.int32))):
            with pytest.raises(UsageError):
                wrong()
        communicator.all_reduce(buffer)
        return communicator.stats.snapshot().compute_s, perf_counter() - began

    for computed, elapsed in run_ranks(2, work):
        assert 0.05 <= computed <= elapsed


def test_the_last_records_are_kept() -> None:
    stats = Stats(rank=0, size=2)
    for sequence in range(RECORDS + 10):
        entered = stats.enter()
        stats.leave(entered, [0, entered + 100], op=Op.BROADCAST, sequence=sequence)
    records = stats.records()
    assert [record.sequence for record in records] == list(range(10, RECORDS + 10))
    assert {(record.operation, record.wait_s, record.waited_for) for record in records} == {(Op.BROADCAST, 1e-7, 1)}
    stats.reset()
    assert stats.records() == []
    stats.leave(stats.enter())  # of a rank that is alone
    assert stats.records() == []


def test_stats_charge_the_last_rank_with_what_it_alone_cost() -> None:
    stats = Stats(rank=0, size=4)
    entered = stats.enter()
    stats.leave(entered, [0, entered + 100, entered + 900, entered + 300])
    stats.leave(entered, [0, entered + 50, entered - 50, 0])
    snapshot = stats.snapshot()
    assert [round(seconds * 1e9) for seconds in snapshot.waited_for_s] == [0, 150, 900, 300]
    assert [round(seconds * 1e9) for seconds in snapshot.last_s] == [0, 50, 600, 0]
    assert round(snapshot.wait_s * 1e9) == 950
    assert (snapshot.straggler, snapshot.collectives) == (2, 2)
    for _ in range(3):
        stats.leave(entered, [0, entered + 1, entered + 1, entered + 1], prompt=True)
    assert stats.snapshot().straggler == 0  # mostly, the others were there before this rank
    stats.reset()
    assert stats.snapshot().straggler is None
    assert stats.snapshot().last_s == (0, 0, 0, 0)


COLLECTIVES = int(os.environ.get("MOTLEY_TEST_COLLECTIVES", "20000"))
"""The promise is about 100 000; a run of the tests has time for fewer."""


def test_thousands_of_collectives_leave_nothing_behind(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> list[tuple[int, int, int]]:
        buffer, other = np.ones(16, np.float32), np.ones((2, 2048), np.float32)
        counts = []
        for rounds in (100, COLLECTIVES // 2):
            for _ in range(rounds):
                communicator.all_reduce(buffer)
                communicator.all_gather(other[communicator.rank], list(other))
                buffer[:] = 1
            communicator.barrier()
            if communicator.rank == 0:  # counting opens a file; the other rank waits in a collective meanwhile
                process = psutil.Process()
                handles = process.num_handles() if psutil.WINDOWS else process.num_fds()
                gc.collect()
                counts.append((handles, threading.active_count(), process.memory_info().rss))
            communicator.all_reduce(buffer)
            buffer[:] = 1
        return counts

    before, after = run_ranks(2, work)[0]
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    assert after[2] < before[2] + (2 << 20)


def test_a_call_that_repeats_allocates_nothing_that_lasts(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> list[int]:
        small, large, counts = np.zeros(2048, np.float32), np.zeros(1 << 19, np.float32), []
        for _ in range(4):
            for _ in range(RECORDS + 1):
                communicator.all_reduce(small)
            communicator.all_reduce(large)
            communicator.barrier()
            gc.collect()
            if communicator.rank == 0:
                counts.append((sys.getallocatedblocks(), tracemalloc.get_traced_memory()[0]))
                tracemalloc.reset_peak()
            communicator.barrier()
        return [*counts, (0, tracemalloc.get_traced_memory()[1])]

    tracemalloc.start(1)
    try:
        *counts, (_, peak) = run_ranks(2, work)[0]
    finally:
        tracemalloc.stop()
    assert abs(counts[-1][0] - counts[-2][0]) < 50
    assert abs(counts[-1][1] - counts[-2][1]) < 10_000
    assert peak - counts[-1][1] < 50_000  # 2 MiB were summed meanwhile


def test_plans_are_kept_within_bytes_the_latest_longest(run_ranks: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans_module, "MAX_PLAN_BYTES", 200_000)

    def work(communicator: Communicator) -> None:
        communicator.barrier()
        for elements in (10_000, 11_000, 10_000, 12_000, 13_000, 14_000):  # each is copied once, to be sent
            for _ in range(2):
                communicator.all_reduce(np.zeros(elements, np.float32), Algorithm.ONE_SHOT)
            communicator.all_reduce(np.zeros(10_000, np.float32), Algorithm.ONE_SHOT)
            kept = communicator._plans.kept.values()
            assert sum(plan.nbytes for plan in kept) <= 200_000
        sizes = [plan.nbytes // 4000 for plan in communicator._plans.kept.values() if plan.nbytes > 4000]
        assert sorted(sizes) == [10, 12, 13, 14]
        communicator.all_reduce(np.zeros(1 << 18, np.float32), Algorithm.ONE_SHOT)  # alone it is more than that
        assert len(communicator._plans.kept) == 1
        communicator.barrier()

    assert run_ranks(2, work) == [None] * 2


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_a_plan_does_not_keep_the_arrays_it_has_worked_on(run_ranks: Run, algorithm: Algorithm) -> None:
    def work(communicator: Communicator) -> bool:
        buffer = np.ones(200_000, np.float32)
        communicator.all_reduce(buffer, algorithm)
        communicator.all_reduce(buffer)
        watched = weakref.ref(buffer)
        del buffer
        gc.collect()
        return watched() is None

    assert run_ranks(3, work) == [True] * 3
