from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import combinations
from typing import Any

import numpy as np
import psutil
import pytest

from motley.transport import (
    Communicator,
    Listener,
    Membership,
    PeerLost,
    PeerTimeout,
    Plain,
    ProtocolError,
    UsageError,
    connect_mesh,
)
from motley.transport import mesh as mesh_module
from motley.transport.links import connecting
from motley.transport.links.wire import Op, pack_frame
from motley.transport.schedules.forecast import Crowd
from tests.ports import unanswered_port

from .rank_process import lose_packets

MakeMember = Callable[..., Membership]
Run = Callable[..., list[Any]]
Refused = Callable[..., tuple[Any, Any]]


def total(communicator: Communicator) -> float:
    buffer = np.full(3, communicator.rank + 1, np.float32)
    communicator.all_reduce(buffer)
    return float(buffer[0])


@pytest.fixture
def listener() -> Iterator[Listener]:
    with closing(Listener("127.0.0.1")) as listener:
        yield listener


def address_of(listener: Listener) -> str:
    return f"127.0.0.1:{listener.port}"


@pytest.fixture
def nobody() -> Iterator[str]:
    with unanswered_port() as port:
        yield f"127.0.0.1:{port}"


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_mesh_of_any_size(run_ranks: Run, size: int) -> None:
    assert run_ranks(size, total) == [size * (size + 1) / 2] * size


def test_a_mesh_over_ipv6(run_ranks: Run) -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        Listener("::1").close()
    except UsageError:
        pytest.skip("this machine has no IPv6 loopback")
    assert run_ranks(3, total, host="::1") == [6.0] * 3


def test_all_ranks_hold_the_same_measurements(run_ranks: Run) -> None:
    networks = run_ranks(3, lambda communicator: communicator.network)
    latency, bandwidth = np.array(networks[0].latency), np.array(networks[0].bandwidth)
    assert networks[1] == networks[2] == networks[0]
    assert all(crowd.ranks == [0, 1, 2] and 1 <= crowd.cores < 3 for crowd in networks[0].crowds)
    assert (latency == latency.T).all()
    assert (latency[~np.eye(3, dtype=bool)] > 0).all()
    assert (bandwidth == bandwidth.T).all()
    assert (bandwidth[~np.eye(3, dtype=bool)] > 0).all()


@pytest.mark.parametrize("size", range(2, 17))
def test_every_pair_measures_once_and_no_rank_twice_at_a_time(size: int) -> None:
    turns = mesh_module._turns(size, [])
    assert sorted(pair for pairs in turns for pair in pairs) == list(combinations(range(size), 2))
    for pairs in turns:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))


@pytest.mark.parametrize("crowds", [[[0, 1, 2, 3, 4, 5, 6]], [[0, 2, 5], [1, 3, 4, 6]], [[5, 6]]])
def test_pairs_of_a_crowd_measure_one_after_the_other(crowds: list[list[int]]) -> None:
    turns = mesh_module._turns(7, [Crowd(ranks, 1) for ranks in crowds])
    assert sorted(pair for pairs in turns for pair in pairs) == list(combinations(range(7), 2))
    for pairs in turns:
        inside = [[pair for pair in pairs if set(pair) <= set(ranks)] for ranks in crowds]
        assert all(len({high for _, high in own}) <= 1 for own in inside)
        between = [rank for pair in pairs if not any(pair in own for own in inside) for rank in pair]
        assert len(between) == len(set(between))
        assert not between or not any(inside)


@pytest.mark.parametrize(
    ("cores", "crowds"),
    [
        ([{0}, {0}, {0, 1}], [(2, 1)]),  # the third will run on the other core
        ([{0, 1}, {0, 1}, {0, 1}], [(3, 2)]),
        ([{0}, {0, 1}, {1}], [(3, 2)]),
        ([{0}, {1}, {2}], []),
        ([{0, 1, 2, 3}] * 3, []),
        ([{70}, {5}, {5}], [(2, 1)]),
        ([{0}, {0}, {1, 2, 3}], [(2, 1)]),
    ],
)
def test_ranks_are_a_crowd_where_they_share_cores(
    run_ranks: Run, monkeypatch: pytest.MonkeyPatch, cores: list[set[int]], crowds: list[tuple[int, int]]
) -> None:
    given = iter(cores)  # which rank gets which is left to chance
    monkeypatch.setattr(mesh_module, "_usable_cores", lambda: next(given))
    networks = run_ranks(3, lambda communicator: communicator.network)
    assert [(len(crowd.ranks), crowd.cores) for crowd in networks[0].crowds] == crowds
    assert networks[1] == networks[2] == networks[0]


def test_a_solution_is_found_or_the_nearest_end() -> None:
    assert mesh_module._solve(lambda x: 2 * x, 3.0, 1.0, 4.0) == pytest.approx(1.5, abs=1e-3)
    assert mesh_module._solve(lambda x: 2 * x, 1.0, 1.0, 4.0) == 1.0
    assert mesh_module._solve(lambda x: 2 * x, 9.0, 1.0, 4.0) == pytest.approx(4.0, abs=1e-2)


def test_bootstrap_leaves_no_socket_behind(run_ranks: Run) -> None:
    def descriptors() -> int:
        process = psutil.Process()
        return process.num_handles() if psutil.WINDOWS else process.num_fds()  # type: ignore[attr-defined,no-any-return,unused-ignore]

    run_ranks(2, total)
    before = descriptors()
    run_ranks(4, total)
    run_ranks(2, total, changes=[{}, {"epoch": 5}], timeout=0.5)
    assert descriptors() <= before


def test_one_rank_needs_no_sockets(membership: MakeMember, listener: Listener) -> None:
    listener.close()
    with connect_mesh(listener, membership(0, 1), ["nowhere:1"], security=Plain()) as communicator:
        assert total(communicator) == 1.0
        assert communicator.broadcast_message(b"hello", 0, None) == b"hello"


def test_a_taken_port_is_a_clear_error(listener: Listener) -> None:
    with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1 port {listener.port}: .*choose another"):
        Listener("127.0.0.1", listener.port)


def test_missing_ranks_are_named(membership: MakeMember, listener: Listener, nobody: str) -> None:
    started = time.monotonic()
    with pytest.raises(PeerTimeout) as error:
        connect_mesh(
            listener, membership(1, 4), [nobody, address_of(listener), nobody, nobody], timeout=0.4, security=Plain()
        )
    assert time.monotonic() - started >= 0.4
    assert error.value.rank == 0
    for text in (f"rank 0 at {nobody} (", "refused", f"rank 2 at {nobody} (it has not connected to us)", "rank 3"):
        assert text in str(error.value)


def test_a_rank_that_gives_up_says_why_to_those_it_has_reached(membership: MakeMember, nobody: str) -> None:
    """Rank 2 reaches rank 0 but not rank 1; the others hear of it before their own time is over."""
    listeners = [Listener("127.0.0.1") for _ in range(3)]
    right = [address_of(listener) for listener in listeners]
    plans = [(right, 60.0), (right, 60.0), ([right[0], nobody, right[2]], 2.0)]
    with ThreadPoolExecutor(3) as pool:
        futures = [
            pool.submit(connect_mesh, listeners[rank], membership(rank, 3), addresses, timeout, security=Plain())
            for rank, (addresses, timeout) in enumerate(plans)
        ]
        errors = [future.exception(timeout=70) for future in futures]
    for listener in listeners:
        listener.close()
    assert isinstance(errors[2], PeerTimeout)
    assert errors[2].rank == 1
    assert isinstance(errors[0], PeerLost)
    assert errors[0].rank == 1
    assert "reported by rank 2" in str(errors[0])
    assert isinstance(errors[1], PeerLost)  # rank 0 told it, which is not to blame
    assert errors[1].rank == 2
    assert "reported by rank 0" in str(errors[1])


def test_a_flood_of_strangers_is_a_few_lines_in_the_log(
    membership: MakeMember, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the mesh is up: knocks are accepted there."""
    monkeypatch.setattr(connecting, "LOG_LINES", 3)
    caplog.set_level(logging.WARNING)
    with ExitStack() as stack:
        listeners = [stack.enter_context(closing(Listener("127.0.0.1"))) for _ in range(2)]
        addresses = [address_of(listener) for listener in listeners]
        pool = stack.enter_context(ThreadPoolExecutor(2))
        ranks = [
            pool.submit(connect_mesh, listeners[rank], membership(rank, 2), addresses, 20.0, security=Plain())
            for rank in range(2)
        ]
        first, second = (stack.enter_context(rank.result(20)) for rank in ranks)
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", listeners[0].port), 5) as stranger:
                stranger.sendall(b"GET / HTTP/1.1")
                stranger.settimeout(10)
                while stranger.recv(1000):
                    pass
        sums = [pool.submit(total, communicator) for communicator in (first, second)]
        assert [each.result(20) for each in sums] == [3.0, 3.0]
    assert len(caplog.records) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="packets are dropped by a filter of Linux")
def test_two_ranks_that_do_not_reach_each_other_are_named_by_all(
    membership: MakeMember, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall between ranks 0 and 1 drops packets; rank 2 reaches both."""
    monkeypatch.setattr(connecting, "ANSWER_S", 1.0)
    lose_packets(listener.socket, True)
    with ExitStack() as stack:
        listeners = [stack.enter_context(closing(Listener("127.0.0.1"))) for _ in range(3)]
        right = [address_of(listener) for listener in listeners]
        pool = stack.enter_context(ThreadPoolExecutor(3))
        began = time.monotonic()
        futures = [
            pool.submit(connect_mesh, listeners[rank], membership(rank, 3), addresses, 60.0, security=Plain())
            for rank, addresses in enumerate([right, [address_of(listener), *right[1:]], right])
        ]
        errors = [future.exception(timeout=70) for future in futures]
    assert time.monotonic() - began < 30
    losses = [error for error in errors if isinstance(error, PeerLost)]
    assert [(loss.rank, loss.finder) for loss in losses] == [(1, 1), (0, None), (0, 1)]
    assert all("rank 1 cannot reach it: nothing has answered at" in str(error) for error in errors)


def test_who_is_refused_where_all_listen_says_so_soon(
    membership: MakeMember, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall turns rank 1 away from rank 0; rank 2 reaches both."""
    monkeypatch.setattr(mesh_module, "REFUSED_S", 1.0)
    with ExitStack() as stack:
        listeners = [stack.enter_context(closing(Listener("127.0.0.1"))) for _ in range(3)]
        right = [address_of(listener) for listener in listeners]
        pool = stack.enter_context(ThreadPoolExecutor(3))
        began = time.monotonic()
        futures = [
            pool.submit(
                connect_mesh, listeners[rank], membership(rank, 3), addresses, 60.0, security=Plain(), all_listen=True
            )
            for rank, addresses in enumerate([right, [nobody, *right[1:]], right])
        ]
        errors = [future.exception(timeout=70) for future in futures]
    assert time.monotonic() - began < 30
    losses = [error for error in errors if isinstance(error, PeerLost)]
    assert [(loss.rank, loss.finder) for loss in losses] == [(1, 1), (0, None), (0, 1)]
    assert all(f"rank 1 cannot reach it: {nobody} has refused all connections for 1 s" in str(e) for e in errors)


def test_a_name_that_nobody_has_is_told_at_once(
    membership: MakeMember, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def getaddrinfo(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(connecting.socket, "getaddrinfo", getaddrinfo)
    addresses = ["upstairs:4000", address_of(listener)]
    with pytest.raises(PeerLost, match=r"this machine knows nobody by the name 'upstairs' .*use its address") as error:
        connect_mesh(listener, membership(1, 2), addresses, 60.0, security=Plain())
    assert error.value.rank == 0


def test_a_name_that_cannot_be_looked_up_now_is_tried_again_and_not_for_ever(
    membership: MakeMember, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def getaddrinfo(*_: object, **__: object) -> None:
        asked.append(time.monotonic())
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(connecting.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(connecting, "ANSWER_S", 0.5)
    addresses = ["upstairs:4000", address_of(listener)]
    with pytest.raises(PeerLost, match="its name cannot be looked up: Temporary failure"):
        connect_mesh(listener, membership(1, 2), addresses, 60.0, security=Plain())
    assert len(asked) > 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"session": "other"}, "session 'other' is not the one served here"),
        ({"epoch": 0}, "epoch 0; epoch 1 is current here"),
        ({"agreement": bytes(32)}, "both ranks need the same plan"),
        ({"secret": bytes(32)}, "does not hold this session's secret"),
    ],
)
def test_a_refused_rank_is_told_why_and_both_sides_log_it(
    run_refused: Refused, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], reason: str
) -> None:
    waiting, refused = run_refused(changes=changes)
    assert isinstance(refused, ProtocolError)
    assert refused.rank == 0
    assert reason in str(refused)
    assert isinstance(waiting, PeerTimeout)
    assert waiting.rank == 1
    assert sum(reason in record.getMessage() for record in caplog.records) == 2


def test_a_rank_that_is_ahead_waits_for_the_others(membership: MakeMember) -> None:
    """Rank 1 is in epoch 2 while rank 0 still waits in epoch 1, gives up, and comes again."""
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    addresses = [address_of(listener) for listener in listeners]
    with ThreadPoolExecutor(2) as pool:
        ahead = pool.submit(connect_mesh, listeners[1], membership(1, 2, epoch=2), addresses, 20.0, security=Plain())
        with pytest.raises(PeerTimeout, match="epoch 2; epoch 1 is current here"):
            connect_mesh(listeners[0], membership(0, 2, epoch=1), addresses, 2.0, security=Plain())
        here = pool.submit(connect_mesh, listeners[0], membership(0, 2, epoch=2), addresses, 20.0, security=Plain())
        with here.result(30), ahead.result(30):
            pass
    for listener in listeners:
        listener.close()


def test_strangers_are_refused_and_disturb_nobody(
    membership: MakeMember, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "STRANGER_S", 0.3)
    caplog.set_level(logging.WARNING)
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    addresses = [address_of(listener) for listener in listeners]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(connect_mesh, listeners[0], membership(0, 2), addresses, 20.0, security=Plain())
        strangers = [socket.create_connection(("127.0.0.1", listeners[0].port), 5) for _ in range(6)]
        spoken = [
            b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 9,
            pack_frame(Op.HELLO),
            pack_frame(Op.PROOF),
            b"",
            b"M",
            b"\x00",
        ]
        for stranger, words in zip(strangers, spoken, strict=True):
            stranger.settimeout(10)
            stranger.sendall(words)
        strangers[3].close()
        answers = []
        for stranger in (*strangers[:3], *strangers[4:]):
            answer = b""
            while data := stranger.recv(1000):
                answer += data
            answers.append(answer)
            stranger.close()
        second = pool.submit(connect_mesh, listeners[1], membership(1, 2), addresses, 20.0, security=Plain())
        with first.result(20), second.result(20):
            pass
    for listener in listeners:
        listener.close()
    for answer, reason in zip(
        answers,
        ("these bytes are not Motley's", "protocol version 0", "expected HELLO", "no handshake within", "not Motley's"),
        strict=True,
    ):
        assert reason in answer.decode(errors="replace")
        assert reason in caplog.text


def test_silent_strangers_do_not_keep_the_ranks_waiting(
    membership: MakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "MAX_STRANGERS", 3)
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    addresses = [address_of(listener) for listener in listeners]
    with ThreadPoolExecutor(2) as pool, ExitStack() as strangers:
        first = pool.submit(connect_mesh, listeners[0], membership(0, 2), addresses, 20.0, security=Plain())
        for _ in range(9):
            strangers.enter_context(socket.create_connection(("127.0.0.1", listeners[0].port), 5))
        began = time.monotonic()
        second = pool.submit(connect_mesh, listeners[1], membership(1, 2), addresses, 20.0, security=Plain())
        with first.result(20), second.result(20):
            assert time.monotonic() - began < connecting.STRANGER_S
    for listener in listeners:
        listener.close()


def test_a_dialled_stranger_is_named_at_once(membership: MakeMember, listener: Listener) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        addresses = [f"127.0.0.1:{server.getsockname()[1]}", address_of(listener)]
        dialling = pool.submit(connect_mesh, listener, membership(1, 2), addresses, 20.0, security=Plain())
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            with pytest.raises(ProtocolError, match=f"rank 0 .*not Motley's.*SSH.*{addresses[0]}"):
                dialling.result(20)


@pytest.mark.parametrize(
    ("changes", "addresses", "text"),
    [
        ({"rank": 3}, ["a:1"] * 3, "rank 3 of 3"),
        ({"rank": 1}, ["a:1"] * 2, "2 addresses for 3 ranks"),
        ({"rank": 1, "agreement": b""}, ["a:1"] * 3, "digest of 32 bytes"),
        ({"rank": 1, "secret": b"short"}, ["a:1"] * 3, "can be guessed"),
        ({"rank": 1, "epoch": -1}, ["a:1"] * 3, "epoch -1"),
        ({"rank": 1, "session": "s" * 300}, ["a:1"] * 3, "session id is longer"),
        ({"rank": 1}, ["a", "a:1", "a:1"], "'a' is no address"),
        ({"rank": 1}, ["a:0", "a:1", "a:1"], "'a:0' is no address"),
        ({"rank": 1}, ["a:http", "a:1", "a:1"], "'a:http' is no address"),
    ],
)
def test_arguments_that_cannot_be_right(
    membership: MakeMember, listener: Listener, changes: dict[str, Any], addresses: list[str], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        connect_mesh(listener, membership(**({"size": 3} | changes)), addresses, timeout=1.0, security=Plain())
