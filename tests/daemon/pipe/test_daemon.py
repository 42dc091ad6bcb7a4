"""A worker's daemon at the other end of a real pipe: commands in order, placements aside, deadlines."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial

import pytest

from motley.daemon.pipe import worker_end
from motley.daemon.pipe.daemon import Daemon, OrderError, Released
from motley.daemon.pipe.framing import LENGTH
from motley.daemon.pipe.settings import WorkerSettings
from motley.daemon.pipe.worker_end import PipeClosed, PipeStalled, WorkerPipe
from motley.protocol import mesh_pb2 as pb
from motley.protocol.worker_pb2 import WorkerCommand, WorkerEvent

TOKEN = bytes(range(32))


@dataclass
class Ends:
    """Both ends of a pipe: the worker's, and the daemon's as a plain socket."""

    daemon: Daemon
    other: socket.socket

    def send(self, *commands: WorkerCommand) -> None:
        for command in commands:
            body = command.SerializeToString()
            self.other.sendall(LENGTH.pack(len(body)) + body)


MORE_THAN_FITS = 32 << 20
"""Bytes that no system takes for a reader that does not read."""


@pytest.fixture
def ends() -> Iterator[Ends]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        pipe = WorkerPipe(server.getsockname()[1], TOKEN)
        with closing(pipe), closing(server.accept()[0]) as other:
            assert other.recv(len(TOKEN), socket.MSG_WAITALL) == TOKEN
            yield Ends(Daemon(pipe), other)


def placement(version: int) -> WorkerCommand:
    return WorkerCommand(placement=pb.Placement(version=version))


def test_events_go_out_one_by_one(ends: Ends) -> None:
    ends.daemon.tell(listening=7)
    (length,) = LENGTH.unpack(ends.other.recv(LENGTH.size, socket.MSG_WAITALL))
    assert WorkerEvent.FromString(ends.other.recv(length, socket.MSG_WAITALL)) == WorkerEvent(listening=7)


def test_events_that_are_told_together_go_out_in_one_piece_in_their_order(ends: Ends) -> None:
    events = [WorkerEvent(listening=number) for number in range(3)]
    with suppress(ZeroDivisionError), ends.daemon.together():
        for event in events:
            ends.daemon.tell(listening=event.listening)
        assert not select.select([ends.other], [], [], 0)[0]
        raise ZeroDivisionError
    bodies = [event.SerializeToString() for event in events]
    expected = b"".join(LENGTH.pack(len(body)) + body for body in bodies)
    assert ends.other.recv(len(expected)) == expected
    ends.daemon.tell(listening=7)
    assert ends.other.recv(100).endswith(WorkerEvent(listening=7).SerializeToString())


def test_commands_that_were_kept_come_first(ends: Ends) -> None:
    first, second, third = (WorkerCommand(cancel=str(number)) for number in range(3))
    ends.send(first, second)
    while len(ends.daemon._kept) < 2:
        ends.daemon.keep_commands(10.0)
    ends.send(third)
    taken: list[WorkerCommand] = []
    while len(taken) < 3:
        taken += ends.daemon.commands(10.0)
    assert taken == [first, second, third]


def test_the_newest_placement_is_kept_and_nobody_elses_business(ends: Ends) -> None:
    seen: list[int] = []
    ends.daemon.on_placement = lambda placement: seen.append(placement.version)
    last = WorkerCommand(cancel="r")
    ends.send(placement(3), placement(2), last)
    assert ends.daemon.wait_for("cancel", 10.0) == last
    assert ends.daemon.placement.version == 3
    assert seen == [3, 3]


def test_what_does_not_come_is_named(ends: Ends) -> None:
    ends.send(WorkerCommand(cancel="r"))
    with pytest.raises(OrderError, match="has not sent 'peers' within 0 s"):
        ends.daemon.wait_for("peers", 0.05)


def test_a_release_and_the_end_of_the_pipe_end_the_commands(ends: Ends) -> None:
    ends.send(WorkerCommand(release=pb.Release()))
    with pytest.raises(Released):
        list(ends.daemon.commands(10.0))
    ends.other.close()
    with pytest.raises(PipeClosed):
        list(ends.daemon.commands(10.0))


def read_to_the_end(other: socket.socket) -> None:
    while other.recv(1 << 20):
        pass


def test_a_daemon_may_stand_still_for_longer_than_connecting_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    real, share = socket.create_connection, 100

    def quicker(address: tuple[str, int], timeout: float) -> socket.socket:
        return real(address, timeout / share)

    monkeypatch.setattr(socket, "create_connection", quicker)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        pipe = WorkerPipe(server.getsockname()[1], TOKEN)
        with closing(pipe), closing(server.accept()[0]) as other:
            reader = threading.Timer(3 * 10.0 / share, partial(read_to_the_end, other))
            reader.start()
            began = time.monotonic()
            pipe.send(WorkerEvent(failed=pb.Failure(message="x" * MORE_THAN_FITS)))
            assert time.monotonic() - began > 2 * 10.0 / share, "it had to wait"
            pipe.close()
            reader.join()


def test_a_daemon_that_stands_still_for_ever_is_told_from_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_end, "STALL_S", 0.1)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        pipe = WorkerPipe(server.getsockname()[1], TOKEN)
        with closing(pipe), closing(server.accept()[0]) as other:
            with pytest.raises(PipeStalled, match="has read nothing for 0 s"):
                pipe.send(WorkerEvent(failed=pb.Failure(message="x" * MORE_THAN_FITS)))
            other.sendall(LENGTH.pack(7) + b"half")
            assert pipe.poll(10.0)
            with pytest.raises(PipeStalled, match="has not gone on with a command"):
                pipe.receive()
            other.close()
            with pytest.raises(PipeClosed) as caught:
                pipe.receive()
            assert caught.type is PipeClosed


def test_settings_come_back_from_their_line() -> None:
    settings = WorkerSettings(7, TOKEN.hex(), "shares", 10, None, "127.0.0.1", 2, 0)
    line = settings.to_line()
    assert line.endswith(b"\n")
    assert WorkerSettings.from_line(line.decode()) == settings
