"""A worker that is a cache holder: it keeps cache blocks for one rank, and attends to them."""

from __future__ import annotations

import os
import time
from contextlib import closing

from motley.daemon.caches.holder import CacheHolder
from motley.daemon.machine.memory import resident_bytes
from motley.daemon.worker.membership import membership, protection, with_hosts
from motley.daemon.worker.worker import Worker
from motley.plugins.native.matmul import Pool
from motley.protocol import mesh_pb2 as pb
from motley.transport import Listener, Messenger


def run_cache_holder(worker: Worker, listener: Listener) -> None:
    """Be a cache holder until the end.

    Args:
        listener: where the rank reaches this worker.

    Raises:
        Released, PipeClosed: the daemon is done with this worker, or is gone.
        Exception: anything else that ends it, see `motley.daemon.worker.failures.failure_of`.
    """
    assignment, daemon = worker.start.assignment, worker.daemon
    rank = worker.start.rank - assignment.size

    def ready(taken: int) -> None:
        rss, load_s = resident_bytes().now, time.monotonic() - worker.began
        daemon.tell(ready=pb.Ready(share_bytes=taken, rss_bytes=rss, load_s=load_s, pid=os.getpid()))

    messenger = Messenger(
        with_hosts(membership(worker.start)),
        protection(assignment),
        listener=listener,
        accepts=[rank],
        wrap=worker.wrap,
    )
    with closing(messenger), closing(Pool(worker.threads)) as pool:
        CacheHolder(
            messenger,
            rank,
            limit=assignment.holder_bytes,
            pool=pool,
            daemon=daemon,
            commands=daemon.commands,
            ready=ready,
        ).run()
