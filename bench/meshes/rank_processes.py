"""A process of this machine for every rank, which answers questions about the time that collectives take."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from motley.transport.schedules.schedule import Operation

TIMEOUT_S = 120.0
"""No rank takes longer for one answer, nor to start."""


class Question(NamedTuple):
    """How often a rank process is to do what, with so many float32 elements."""

    operation: Operation
    elements: int
    rounds: int


class Answer(NamedTuple):
    """How long a rank's calls took, and what it expected of them."""

    stamps_ns: list[int]
    """When the first of so many calls began, and when each of them was done."""
    batch: int
    """Calls between two stamps."""
    algorithm: str = ""
    predicted_s: float = 0.0
    """Of one call, by the cost model."""


class RankProcesses:
    """A process per rank that answers questions through a pipe until it is told None."""

    def __init__(self, targets: Sequence[Callable[[Any], None]]) -> None:
        """`targets`: what each process runs, given its end of the pipe; it must be possible to pickle them."""
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Any] = []
        self._processes = []
        for target in targets:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs,), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self._pipes.append(ours)
            self._processes.append(process)

    def exchange_addresses(self) -> None:
        """Tell every rank on which ports of this machine all of them listen."""
        addresses = [f"127.0.0.1:{port}" for port in self._receive()]
        self._send(addresses)

    def ready(self) -> None:
        """Wait until every rank can be asked."""
        self._receive()

    def hear(self) -> list[Any]:
        """What every rank says next without being asked, by rank; errors as `ask`."""
        return self._receive()

    def ask(self, question: Question) -> list[Answer]:
        """Have every rank do the same; their answers, by rank.

        Raises:
            RuntimeError: a process ended, or has not answered within `TIMEOUT_S`.
        """
        self._send(question)
        return self._receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._send(None)
        for process in self._processes:
            process.join(TIMEOUT_S if error is None else 0)
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def _send(self, message: object) -> None:
        for pipe in self._pipes:
            pipe.send(message)

    def _receive(self) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(TIMEOUT_S):
                    raise RuntimeError(f"rank {rank} has not answered within {TIMEOUT_S:g} s")
                answers.append(pipe.recv())
            except EOFError:
                raise RuntimeError(f"the process of rank {rank} ended; its error stands above") from None
        return answers


def serve(pipe: Any, answer: Callable[[Question], Answer]) -> None:
    """What a rank process does once it is ready: answers until it is told None."""
    pipe.send("ready")
    while (question := pipe.recv()) is not None:
        pipe.send(answer(question))


def clock(call: Callable[[], object], rounds: int, batch: int = 1) -> list[int]:
    """`Answer.stamps_ns`."""
    stamps = [perf_counter_ns()]
    for _ in range(rounds):
        for _ in range(batch):
            call()
        stamps.append(perf_counter_ns())
    return stamps


def percentile_us(answers: Sequence[Answer], percent: float) -> float:
    """A percentile of the time that a call takes, in us; a call ends when the last rank has done it."""
    done = np.max([answer.stamps_ns for answer in answers], axis=0)
    return round(float(np.percentile(np.diff(done), percent)) / answers[0].batch / 1e3, 1)
