"""Meshes for tests: ranks are threads of this process, sockets are real ones on loopback."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import pytest

from motley.transport import Communicator, Listener, Membership, Plain, Tls, connect_mesh, mesh
from motley.transport.links.listening import join_address

SECRET = b"a secret of the session".ljust(32)
AGREEMENT = hashlib.sha256(b"the plan").digest()

RunRanks = Callable[..., list[Any]]


def _membership(rank: int, size: int, **changes: Any) -> Membership:
    fields = {"session": "test", "epoch": 1, "secret": SECRET, "agreement": AGREEMENT}
    return Membership(rank=rank, size=size, **(fields | changes))


@pytest.fixture
def membership() -> Callable[..., Membership]:
    return _membership


@pytest.fixture
def run_ranks() -> RunRanks:
    """``run_ranks(size, work)`` builds a mesh, runs ``work(communicator)`` on each rank, returns results or errors.

    `changes` are to the membership of each rank, `security` is each rank's, `ended` is called with each rank that has
    ended, `options` go to `connect_mesh`.
    """

    def run(
        size: int,
        work: Callable[[Communicator], Any],
        *,
        host: str = "127.0.0.1",
        timeout: float = 20.0,
        changes: Sequence[dict[str, Any]] | None = None,
        security: Sequence[Tls | Plain] | None = None,
        ended: Callable[[int], Any] = lambda rank: None,
        **options: Any,
    ) -> list[Any]:
        with ExitStack() as stack:
            listeners = [stack.enter_context(closing(Listener(host))) for _ in range(size)]
            addresses = [join_address(host, listener.port) for listener in listeners]

            def one(rank: int) -> Any:
                member = _membership(rank, size, **(changes[rank] if changes else {}))
                protection = security[rank] if security else Plain()
                settings = {"spin_s": 0.0} | options
                try:
                    with connect_mesh(
                        listeners[rank], member, addresses, timeout, security=protection, **settings
                    ) as communicator:
                        return work(communicator)
                except Exception as error:
                    return error
                finally:
                    ended(rank)

            pool = stack.enter_context(ThreadPoolExecutor(size))
            return [future.result(timeout=120) for future in [pool.submit(one, rank) for rank in range(size)]]

    return run


@pytest.fixture
def run_refused(run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    """``run_refused(changes={...}, security=[...])``: what ranks 0 and 1 raise where they do not go together.

    `changes` are to the membership of rank 1. Rank 0 waits for it until it has ended and all it has left was looked at.
    """
    over, looks = threading.Event(), iter(range(5))

    def monotonic() -> float:
        return math.inf if over.is_set() and next(looks, None) is None else 0.0

    def ended(rank: int) -> None:
        if rank == 1:
            over.set()

    def run(*, changes: dict[str, Any], **options: Any) -> tuple[Any, Any]:
        monkeypatch.setattr(mesh, "time", SimpleNamespace(monotonic=monotonic, perf_counter=time.perf_counter))
        first, second = run_ranks(
            2, lambda communicator: None, timeout=0.1, changes=[{}, changes], ended=ended, **options
        )
        return first, second

    return run
