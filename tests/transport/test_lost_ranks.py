"""Ranks as real processes that are killed, stopped, cut off, reset, slow or busy."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from motley.transport import Algorithm, Communicator, PeerLost

from .certificates import Authority
from .rank_process import Trouble, sum_up

SCRIPT = Path(__file__).with_name("rank_process.py")


class Rank:
    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = ""

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def write(self, plan: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(plan) + "\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


Start = Callable[..., list[Rank]]


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(plan, plan, ...)`` starts a process per plan and returns when their mesh is up."""
    started: list[Rank] = []

    def start(*plans: dict[str, Any], arguments: list[list[str]] | None = None) -> list[Rank]:
        ranks = [Rank(*(arguments[index] if arguments else ())) for index in range(len(plans))]
        started.extend(ranks)
        for rank in ranks:
            rank.address = f"127.0.0.1:{rank.read()['port']}"
        connect(ranks, 1, *plans)
        return ranks

    yield start
    for rank in started:
        rank.stop()


def connect(ranks: list[Rank], epoch: int, *plans: dict[str, Any]) -> None:
    addresses = [rank.address for rank in ranks]
    for index, (rank, plan) in enumerate(zip(ranks, plans, strict=True)):
        rank.write({"rank": index, "size": len(ranks), "epoch": epoch, "addresses": addresses} | plan)
    for rank in ranks:
        assert "up" in rank.read()


def expect_loss(survivors: list[Rank], blamed: set[int], *, silent: bool) -> list[str]:
    """Every survivor names one of these ranks and has nothing left of the mesh.

    `silent`: it took a rank that waited for signs of life in vain; otherwise all knew at once.
    """
    texts = []
    for rank in survivors:
        answer = rank.read()
        assert answer["error"] == "PeerLost", answer
        assert answer["rank"] in blamed, answer
        assert max(answer["left"]) <= 0, answer
        texts.append(answer["text"])
    assert any("for 5 s" in text for text in texts) is silent, texts
    return texts


def expect_new_mesh(survivors: list[Rank]) -> None:
    """The same processes build a mesh, on the same listeners."""
    connect(survivors, 2, *[{"rounds": 10}] * len(survivors))
    for rank in survivors:
        assert rank.read()["sum"] == sum(range(1, len(survivors) + 1))


def without(ranks: list[Rank], victim: int) -> list[Rank]:
    return [rank for index, rank in enumerate(ranks) if index != victim]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_survivors_name_the_killed_rank_and_build_a_new_mesh(start: Start, victim: int) -> None:
    ranks = start({}, {}, {})
    ranks[victim].process.kill()
    survivors = without(ranks, victim)
    expect_loss(survivors, {victim}, silent=False)
    expect_new_mesh(survivors)


def test_a_killed_rank_is_noticed_under_tls(start: Start, tmp_path: Path) -> None:
    authority = Authority()
    folders = []
    for rank in range(3):
        folder = tmp_path / str(rank)
        folder.mkdir()
        certificate, key = authority.issue(f"rank-{rank}.test")
        (folder / "certificate.pem").write_bytes(certificate)
        (folder / "key.pem").write_bytes(key)
        (folder / "authority.pem").write_bytes(authority.pem)
        folders.append([str(folder)])
    ranks = start({}, {}, {}, arguments=folders)
    ranks[2].process.kill()
    expect_loss(ranks[:2], {2}, silent=False)
    expect_new_mesh(ranks[:2])


def test_a_rank_that_is_stopped_for_two_seconds_disturbs_nobody(start: Start) -> None:
    ranks = start({"seconds": 2.5}, {}, {})
    stopped = psutil.Process(ranks[1].process.pid)
    stopped.suspend()
    time.sleep(2.0)
    stopped.resume()
    assert [rank.read()["sum"] for rank in ranks] == [6.0] * 3


def test_a_rank_that_stays_stopped_is_lost(start: Start) -> None:
    ranks = start({}, {}, {})
    psutil.Process(ranks[1].process.pid).suspend()
    texts = expect_loss(without(ranks, 1), {1}, silent=True)
    assert any("no sign of life for 5 s" in text for text in texts)
    expect_new_mesh(without(ranks, 1))
    psutil.Process(ranks[1].process.pid).resume()
    assert ranks[1].read()["error"] == "PeerLost"


def test_what_vanishes_is_lost(start: Start) -> None:
    """No FIN, no reset: what goes over the network of a rank, or one link in another mesh, comes to nothing."""
    ranks, linked = start({}, {}, {"cut": [0, 1]}), start({}, {}, {"cut": [1]})
    texts = expect_loss(ranks[:2], {2}, silent=True)
    assert any("no sign of life for 5 s" in text for text in texts)
    # Ranks 1 and 2 name each other, or rank 0 if it was faster to tell them that they themselves were named.
    answers = [rank.read() for rank in linked]
    assert [answer["error"] for answer in answers] == ["PeerLost"] * 3
    assert answers[0]["rank"] in (1, 2)
    assert answers[1]["rank"] in (2, 0)
    assert answers[2]["rank"] in (1, 0)
    assert any("no sign of life for 5 s" in answer["text"] for answer in answers)
    expect_new_mesh(ranks[:2])
    assert ranks[2].read()["error"] == "PeerLost"


@pytest.mark.parametrize("size", [3, 4])
def test_a_connection_for_data_that_dies_alone_is_missed(start: Start, size: int) -> None:
    """No FIN, no reset, and the beats of all ranks come and go."""
    *survivors, victim = start(*[{}] * (size - 1), {"cut data": list(range(size - 1))})
    texts = expect_loss(survivors, {size - 1}, silent=True)
    assert any("beats" in text and "but no data for 5 s" in text for text in texts)
    expect_new_mesh(survivors)
    assert victim.read()["error"] == "PeerLost"


def test_a_reset_is_the_end_of_a_rank(start: Start) -> None:
    ranks = start({}, {}, {"reset": True})
    expect_loss(ranks[:2], {2}, silent=False)
    expect_new_mesh(ranks[:2])


def cut(start: Start, victim: int, times: int, seconds: float) -> list[dict[str, Any]]:
    """What three ranks say that sum all the time, while one is cut off from the others now and then."""
    pause, rest = 1.0, 2.0
    plans: list[dict[str, Any]] = [
        {"loss": [peer for peer in range(3) if peer != rank and victim in (peer, rank)]} for rank in range(3)
    ]
    plans[0]["seconds"] = times * (pause + seconds) + rest
    ranks = start(*plans)
    for _ in range(times):
        for length in (pause, seconds):
            time.sleep(length)
            for rank in ranks:
                rank.process.send_signal(signal.SIGUSR1)
    return [rank.read() for rank in ranks]


drops_packets = pytest.mark.skipif(sys.platform != "linux", reason="packets are dropped by a filter of Linux")
UNDISTURBED = [{"sum": 6.0, "left": [0, 0]}] * 3


@drops_packets
def test_a_cut_of_three_seconds_disturbs_nobody(start: Start) -> None:
    assert cut(start, 1, 1, 3.0) == UNDISTURBED


@drops_packets
@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_twenty_cuts_of_three_seconds_disturb_nobody(start: Start, victim: int) -> None:
    assert cut(start, victim, 20, 3.0) == UNDISTURBED


@pytest.fixture
def beats_that_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Trouble]]:
    """To `connect_mesh` as `wrap`: of each pair the connection for beats, which is the second, ends to bring anything.

    A peer is silent after 2 s.
    """
    monkeypatch.setattr("motley.transport.links.liveness.SILENCE_S", 2.0)
    made: dict[tuple[int, int], list[Trouble]] = defaultdict(list)  # by thread and peer

    def wrap(peer: int, stream: Any) -> Trouble:
        streams = made[threading.get_ident(), peer]
        streams.append(Trouble(peer, stream, slow=False))
        if len(streams) == 2 and threading.current_thread().name != "motley-pulse":
            threading.Timer(1.0, setattr, [streams[1], "is_cut", True]).start()
        return streams[-1]

    yield wrap
    for stream in chain(*made.values()):
        stream.stream.close()  # what was cut could not be


def test_data_is_a_sign_of_life(
    run_ranks: Callable[..., list[Any]], beats_that_end: Callable[..., Trouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.transport.links.liveness.KNOCK_AFTER_S", 1e9)

    def work(communicator: Communicator) -> float:
        return sum_up(communicator, {"seconds": 5.0})

    assert run_ranks(3, work, wrap=beats_that_end) == [6.0] * 3


def test_whoever_can_be_reached_anew_lives(
    run_ranks: Callable[..., list[Any]], beats_that_end: Callable[..., Trouble]
) -> None:
    """Ranks that have nothing to say to each other, as they compute for long."""

    def work(communicator: Communicator) -> float:
        time.sleep(5.0)
        return sum_up(communicator, {"rounds": 1})

    assert run_ranks(3, work, wrap=beats_that_end) == [6.0] * 3


def test_slow_is_not_dead(start: Start) -> None:
    """One rank sleeps and one computes, both longer than a silent one would be waited for, and one reads in sips."""
    sums = {"silence": 3.0, "rounds": 2, "elements": 300_000}
    ranks = start(sums, {"slow": True, "sleep": 3.6} | sums, {"slow": True, "spin": 3.6} | sums)
    assert [rank.read()["sum"] for rank in ranks] == [6.0] * 3


def test_a_rank_that_looks_for_messages_misses_those_that_do_not_come(
    run_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.transport.links.liveness.SILENCE_S", 2.0)
    streams: list[Trouble] = []

    def wrap(peer: int, stream: Any) -> Trouble:
        streams.append(Trouble(peer, stream, slow=False, is_data=all(known.peer != peer for known in streams)))
        return streams[-1]

    def work(communicator: Communicator) -> None:
        if communicator.rank == 0:
            (data,) = (stream for stream in streams if stream.peer == 1 and stream.is_data)
            data.is_cut = True
            communicator.send(b"lost on its way", 1)
        while not communicator.wait_message(1 - communicator.rank, 0.2):
            pass

    first, second = run_ranks(2, work, wrap=wrap)
    for stream in streams:
        stream.stream.close()  # what was cut could not be
    assert isinstance(second, PeerLost)
    assert second.rank == 0
    assert "its beats come, but no data for 2 s: 39 bytes are on their way" in str(second)
    assert isinstance(first, PeerLost)
    assert first.rank == 1


@pytest.mark.soak  # takes a minute
def test_a_survivor_that_computed_names_the_rank_that_was_lost_and_not_the_one_that_gave_up(
    run_ranks: Callable[..., list[Any]],
) -> None:
    """Rank 0 gives up with a full send buffer, so its last words never leave on the data link to rank 1."""
    streams: dict[int, list[Trouble]] = {}  # of each rank, by its thread
    over = [threading.Event() for _ in range(2)]

    def wrap(peer: int, stream: Any) -> Trouble:
        streams.setdefault(threading.get_ident(), []).append(Trouble(peer, stream, slow=False))
        return streams[threading.get_ident()][-1]

    def work(communicator: Communicator) -> None:
        if communicator.rank == 2:
            for stream in streams[threading.get_ident()]:
                stream.is_cut = True
            for event in over:
                event.wait(30)
            for stream in streams[threading.get_ident()]:
                stream.is_cut = False  # so that its sockets can be closed
            return
        try:
            if communicator.rank == 1:
                over[0].wait(30)  # it computes until long after rank 0 has gone
            communicator.all_reduce(np.ones(4 << 20, np.float32), Algorithm.ONE_SHOT)
        finally:
            over[communicator.rank].set()

    first, second, _ = run_ranks(3, work, wrap=wrap)
    assert isinstance(first, PeerLost)
    assert isinstance(second, PeerLost)
    assert (first.rank, second.rank) == (2, 2)
