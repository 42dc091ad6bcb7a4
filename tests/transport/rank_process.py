"""One rank as a real process, for tests that break ranks: reads its plans from standard input, prints JSON lines.

A plan is ``{"rank", "size", "epoch", "addresses"}`` and what is to happen. The rank connects, prints ``{"up": pid}``,
computes ("sleep" or "spin" for so many seconds), then sums until the mesh breaks, or "rounds" times, or, if rank 0's
plan has "seconds", so long. A peer that is silent for "silence" seconds is lost, if the plan has that. The rank prints
``{"error", "rank", "text"}`` or ``{"sum"}``, with what it has left behind.

Half a second after it is up, a rank with ``"cut": [ranks]`` neither hears nor reaches these any more, and they are not
told; with ``"cut data": [ranks]`` that is so of the connections for data, while beats come and go; one with
``"reset": true`` ends with a reset of all its connections. ``"slow": true`` reads in small sips.

With ``"loss": [ranks]`` all packets that these send to this rank are lost from one SIGUSR1 to the next: the system
drops them before TCP sees them, so it waits and repeats as on a real network. A rank that loses those of all its peers
meets nobody meanwhile, by new connections neither.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from motley.transport import Communicator, Listener, Membership, Plain, Tls, TransportError, connect_mesh
from motley.transport.links import connecting, liveness

IN_A_ROW, REST_S = 10, 5e-3
"""Sums between two rests, and how long each is: what tests wait for takes seconds, for which every rank would have all
that it gets of a core."""
_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # a packet filter that lets no byte through
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # of Linux, for setsockopt


class Trouble:
    """A stream that can be cut, and may be slow."""

    def __init__(self, peer: int, stream: Any, *, slow: bool, is_data: bool = True) -> None:
        self.peer = peer
        self.is_data = is_data
        self.is_cut = False
        self.stream = stream
        self._slow = slow

    def send(self, data: memoryview) -> int:
        return len(data) if self.is_cut else self.stream.send(data)

    def recv(self, size: int, flags: int = 0) -> bytes:
        self._look()
        return self.stream.recv(size, flags)

    def recv_into(self, buffer: memoryview, size: int = 0) -> int:
        self._look()
        if self._slow:
            time.sleep(1e-4)
            size = min(size or len(buffer), 2048)
        return self.stream.recv_into(buffer, size)

    def _look(self) -> None:
        if self.is_cut:
            time.sleep(1e-3)  # the system's poll still sees what is not to be seen
            raise BlockingIOError

    def ready_in(self) -> float | None:
        look = getattr(self.stream, "ready_in", None)
        return None if look is None or self.is_cut else look()

    def fileno(self) -> int:
        return self.stream.fileno()

    def shutdown(self, how: int) -> None:
        if not self.is_cut:
            self.stream.shutdown(how)

    def close(self) -> None:
        if not self.is_cut:  # a cable that is pulled brings no FIN
            self.stream.close()


class Loss:
    """Packets for this rank that are lost between two signals."""

    def __init__(self, plan: dict[str, Any], listener: Listener, streams: list[Trouble]) -> None:
        self._peers = plan["loss"]
        self._everything = len(self._peers) == plan["size"] - 1
        self._listener = listener
        self._streams = streams
        self._dialled: list[socket.socket] = []
        self._now = False
        connecting.tune = self._tune
        signal.signal(signal.SIGUSR1, lambda *_: self._turn())

    def _tune(self, connection: socket.socket) -> None:
        """In the place of the transport's own: new connections of a rank that hears nothing are as deaf."""
        if self._everything:
            self._dialled.append(connection)
            if self._now:
                lose_packets(connection, True)
        _tune(connection)

    def _turn(self) -> None:
        self._now = now = not self._now
        old = [stream.stream for stream in self._streams if stream.peer in self._peers]
        for connection in [*old, *([self._listener.socket, *self._dialled] if self._everything else ())]:
            if connection.fileno() >= 0:
                lose_packets(connection, now)


def lose_packets(connection: socket.socket, now: bool) -> None:
    """Drop all packets for a socket, or no longer."""
    if now:
        connection.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(_DROP)))
        return
    with suppress(FileNotFoundError):  # it has none
        connection.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


_tune = connecting.tune


def holdings() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    process = psutil.Process()
    return threading.active_count(), process.num_handles() if psutil.WINDOWS else process.num_fds()


def wrapper(plan: dict[str, Any], streams: list[Trouble]) -> Callable[[int, Any], Trouble] | None:
    """What to give to `connect_mesh`; none if there shall be no trouble."""

    def wrap(peer: int, stream: Any) -> Trouble:
        is_data = all(known.peer != peer for known in streams)  # a pair's first connection
        streams.append(Trouble(peer, stream, slow="slow" in plan, is_data=is_data))
        streams[-1].is_cut = peer in plan.get("cut", ()) and any(known.is_cut for known in streams)
        return streams[-1]

    return wrap if {"cut", "cut data", "loss", "reset", "slow"} & plan.keys() else None


def strike(plan: dict[str, Any], streams: list[Trouble]) -> None:
    for stream in streams:
        stream.is_cut = stream.peer in plan.get("cut data" if stream.is_data and "cut data" in plan else "cut", ())
    if plan.get("reset"):
        for stream in streams:
            stream.stream.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
            )
        os._exit(1)


def compute(plan: dict[str, Any]) -> None:
    time.sleep(plan.get("sleep", 0))
    until = time.monotonic() + plan.get("spin", 0)
    while time.monotonic() < until:
        pass


def sum_up(communicator: Communicator, plan: dict[str, Any]) -> float:
    buffer = np.zeros(plan.get("elements", 2048), np.float32)
    until = time.monotonic() + plan.get("seconds", 1e9)
    rounds, done = plan.get("rounds", 0), 0
    while True:
        if done % IN_A_ROW == 0:
            time.sleep(REST_S)
        buffer[:] = communicator.rank + 1
        buffer[-1] = time.monotonic() > until
        communicator.all_reduce(buffer)
        done += 1
        if buffer[-1] or done == rounds:
            return float(buffer[0])


def main() -> None:
    security: Tls | Plain = Plain()
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
        security = Tls(folder / "certificate.pem", folder / "key.pem", folder / "authority.pem")
    listener = Listener("127.0.0.1")
    print(json.dumps({"port": listener.port}), flush=True)
    for line in sys.stdin:
        plan = json.loads(line)
        member = Membership("test", plan["epoch"], plan["rank"], plan["size"], b"s" * 32, b"a" * 32)
        streams: list[Trouble] = []
        before = holdings()
        liveness.SILENCE_S = plan.get("silence", liveness.SILENCE_S)
        if "loss" in plan:
            Loss(plan, listener, streams)
        try:
            with connect_mesh(
                listener, member, plan["addresses"], 20.0, security=security, wrap=wrapper(plan, streams)
            ) as communicator:
                print(json.dumps({"up": os.getpid()}), flush=True)
                if streams:
                    threading.Timer(0.5, strike, [plan, streams]).start()
                compute(plan)
                answer: dict[str, Any] = {"sum": sum_up(communicator, plan)}
        except TransportError as error:
            answer = {"error": type(error).__name__, "rank": error.rank, "text": str(error)}
        after = holdings()
        print(json.dumps(answer | {"left": [b - a for a, b in zip(before, after, strict=True)]}), flush=True)


if __name__ == "__main__":
    main()
