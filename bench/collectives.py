"""How long an all-reduce takes between real rank processes of this machine.

Physics: with N ranks an all-reduce of S bytes moves at least 2 S (N-1)/N bytes through every rank; on loopback that is
memory copies, and small sizes cost system calls and the wake-up of the peer (9 us were seen for a bare exchange of
8 KiB between two spinning processes, 31 us when they block). Where ranks outnumber cores the figures are those of
the scheduler. Every rank times each call; a round's time is rank 0's.
"""

from __future__ import annotations

import json
import multiprocessing
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np

from motley.transport import Listener, Membership, connect_mesh

WARM_UP = 50
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Row:
    ranks: int
    size_bytes: int
    rounds: int
    p50_us: float
    p99_us: float


def measure(ranks: int, sizes: Sequence[int] = (8 << 10, 64 << 10, 1 << 20), rounds: int = 500) -> list[Row]:
    """Start `ranks` processes and time all-reduces of `sizes` bytes (multiples of 4).

    Raises:
        RuntimeError: a rank process ended before it had measured.
    """
    context = multiprocessing.get_context("spawn")
    secret = secrets.token_bytes(32)
    pipes, processes = [], []
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            member = Membership("bench", 0, rank, ranks, secret, bytes(32))
            process = context.Process(target=_rank, args=(theirs, member, tuple(sizes), rounds), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            pipes.append(ours)
            processes.append(process)
        addresses = [f"127.0.0.1:{_receive(pipe)}" for pipe in pipes]
        for pipe in pipes:
            pipe.send(addresses)
        rows: list[list[Row]] = [_receive(pipe) for pipe in pipes]
        return rows[0]
    finally:
        for process in processes:
            process.join(TIMEOUT_S)
            process.kill()


def _receive(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("a rank process ended before it had measured; its error stands above") from None


def _rank(pipe: Any, member: Membership, sizes: Sequence[int], rounds: int) -> None:
    listener = Listener("127.0.0.1")
    pipe.send(listener.port)
    rows = []
    with connect_mesh(listener, member, pipe.recv(), TIMEOUT_S) as communicator:
        for size in sizes:
            buffer = np.zeros(size // 4, np.float32)
            times = []
            for _ in range(WARM_UP + rounds):
                started = perf_counter_ns()
                communicator.all_reduce(buffer)
                times.append(perf_counter_ns() - started)
            p50, p99 = np.percentile(times[WARM_UP:], (50, 99)) / 1e3
            rows.append(Row(member.size, size, rounds, round(float(p50), 1), round(float(p99), 1)))
    pipe.send(rows)


if __name__ == "__main__":
    print(json.dumps([asdict(row) for count in (2, 3) for row in measure(count)]))
