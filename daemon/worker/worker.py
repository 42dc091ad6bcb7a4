"""What every worker process has, whether it is a rank or an expert host: its daemon, its place, and a way to fail."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from motley.daemon.pipe.daemon import Daemon, Released
from motley.daemon.pipe.settings import WorkerSettings
from motley.daemon.pipe.worker_end import PipeClosed
from motley.daemon.weights.cache import ShareCache
from motley.daemon.worker.failures import failure_of
from motley.protocol.worker_pb2 import Start
from motley.transport import Communicator, Listener
from motley.transport.links.security import Stream

logger = logging.getLogger(__name__)

CONNECT_S = 30.0
"""Peers have so many seconds to be reached, once all of them listen."""

Wrap: TypeAlias = Callable[[int, Stream], Stream]
"""Puts something between a rank and a stream to one of its peers, see `motley.transport.connect_mesh`."""
Network: TypeAlias = Callable[[int], Wrap]
"""Gives a rank, by number, what its streams go through."""


class Worker:
    """A worker process and its place in a session.

    Attributes:
        start: which rank of which session this is; empty until the daemon has said it.
        began: when that was, by `time.monotonic`.
        cache: where shares are kept.
        models: the folder in which model names are looked up, if there is one.
    """

    def __init__(self, daemon: Daemon, settings: WorkerSettings, network: Network | None = None) -> None:
        """`network`: one to emulate between the ranks; None: streams are as they are."""
        self.daemon = daemon
        self.start = Start()
        self.began = time.monotonic()
        self.cache = ShareCache(Path(settings.cache), settings.cache_limit)
        self.models = Path(settings.models) if settings.models else None
        self._listens_on = settings.host, *settings.ports
        self._threads = settings.threads
        self._network = network
        self._failed = False

    def listen(self) -> Listener:
        """A socket on which other workers reach this one.

        Raises:
            UsageError: no port is free that it may have.
        """
        return Listener(*self._listens_on)

    @property
    def threads(self) -> int:
        """Compute threads of this worker."""
        return self.start.assignment.threads or self._threads

    @property
    def wrap(self) -> Wrap | None:
        """What this worker's streams go through."""
        return self._network(self.start.rank) if self._network else None

    def fail(self, error: Exception) -> None:
        """Tell the daemon why this worker ends; only the first reason counts."""
        if self._failed:
            return
        self._failed = True
        failure = failure_of(error)
        if failure.code == "internal_error":
            logger.error("unexpected error", exc_info=error)
        ranks = self.start.assignment.group.ranks
        if ranks and failure.lost_rank:  # workers of a group know each other by place
            failure.lost_rank = ranks[failure.lost_rank - 1] + 1
        if ranks and failure.found_by:
            failure.found_by = ranks[failure.found_by - 1] + 1
        with contextlib.suppress(PipeClosed):
            self.daemon.tell(failed=failure)

    @contextlib.contextmanager
    def parting(self, communicator: Communicator) -> Iterator[None]:
        """End the context so that peers hear the right thing: a worker that is released is no loss to them, and one
        that fails says why before they can miss it."""
        try:
            yield
        except (Released, PipeClosed):
            communicator.close()
            raise
        except Exception as error:
            self.fail(error)
            raise
