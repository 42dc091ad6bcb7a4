"""Ranks as threads of this process over a real mesh on loopback: for sums whose time does not matter."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Protocol, TypeVar

from motley.transport import Communicator, Listener, Membership, Plain, WireFormat, connect_mesh

TIMEOUT_S = 60.0

Answer = TypeVar("Answer")


class OnEveryRank(Protocol):
    """Calls a function with every rank's communicator, each in a thread of its own; its answers, by rank."""

    def __call__(self, work: Callable[[Communicator], Answer], /) -> list[Answer]: ...


@contextmanager
def thread_mesh(ranks: int, wire_format: WireFormat = WireFormat.FP32) -> Iterator[OnEveryRank]:
    """Connect `ranks` threads for as long as the context lasts. What a rank raises, its caller gets."""
    secret = secrets.token_bytes(32)
    with ExitStack() as stack:
        listeners = [stack.enter_context(closing(Listener("127.0.0.1"))) for _ in range(ranks)]
        addresses = [f"127.0.0.1:{listener.port}" for listener in listeners]
        pool = stack.enter_context(ThreadPoolExecutor(ranks))

        def connect(rank: int) -> Communicator:
            member = Membership("threads", 0, rank, ranks, secret, bytes(32))
            return connect_mesh(
                listeners[rank], member, addresses, TIMEOUT_S, security=Plain(), wire_format=wire_format, spin_s=0
            )

        communicators = [stack.enter_context(communicator) for communicator in pool.map(connect, range(ranks))]

        def on_every_rank(work: Callable[[Communicator], Answer], /) -> list[Answer]:
            def one(communicator: Communicator) -> Answer:
                try:
                    return work(communicator)
                except BaseException:
                    communicator.close()  # or the others would wait for it
                    raise

            return list(pool.map(one, communicators))

        yield on_every_rank
