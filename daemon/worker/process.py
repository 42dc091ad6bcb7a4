"""The worker process: ``python -m motley.daemon.worker.process``, started by `motley.daemon.node.workers.worker`.

Its life: settings on standard input, then over the pipe a `Start` that says which rank of which session it is; it
listens, is told where its peers are, and becomes what its number makes it: a rank (`motley.daemon.worker.rank`), or,
from the number of ranks on, an expert host (`motley.daemon.worker.host`). It ends when it is released, when the pipe or
standard input ends, or with an error, of which it tells its daemon.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time

from motley.daemon.machine.importing import imports_that_stay

with imports_that_stay():
    from motley.daemon.machine.ending import end_process, end_with_owner
    from motley.daemon.machine.json_log import VARIABLE, JsonLog
    from motley.daemon.machine.processor import pin_to_core
    from motley.daemon.machine.products import limit_products
    from motley.daemon.machine.trouble_log import TroubleLog
    from motley.daemon.pipe.daemon import Daemon, Released
    from motley.daemon.pipe.settings import WorkerSettings
    from motley.daemon.pipe.worker_end import PipeClosed, PipeStalled, WorkerPipe
    from motley.daemon.worker.cache_holder import run_cache_holder
    from motley.daemon.worker.host import run_host
    from motley.daemon.worker.rank import Rank
    from motley.daemon.worker.worker import Network, Worker
    from motley.protocol import mesh_pb2 as pb

logger = logging.getLogger(__name__)

COMMAND_S = 120.0
"""The daemon has so many seconds to say which rank this is, and the orchestrator to say where its peers are."""


def main(network: Network | None = None) -> int:
    """Run one worker; the exit status is 0 if it ended because it was asked to, or because the daemon has gone.

    Args:
        network: gives a rank what its streams go through, where a benchmark wants a network that this machine lacks.
    """
    if os.environ.get(VARIABLE) == "json":
        JsonLog(_tell).listen()
    else:
        TroubleLog(lambda text, _: _tell(text)).listen()
    line = sys.stdin.readline()
    if not line:
        return 1  # the daemon has gone
    if sys.platform != "win32":  # where libraries look at standard input as they are loaded, and wait for who reads it
        end_with_owner()  # also while one computes for minutes, and nobody looks at the pipe
    settings = WorkerSettings.from_line(line)
    if settings.core is not None:
        pin_to_core(settings.core)
    try:
        pipe = WorkerPipe(settings.port, bytes.fromhex(settings.token))
    except PipeClosed:
        return 1
    daemon = Daemon(pipe)
    worker = Worker(daemon, settings, network)
    try:
        run(worker)
    except PipeStalled as error:  # it cannot be told
        logger.error("%s; this worker ends", error)
        return 1
    except PipeClosed:
        pass
    except Released:
        with contextlib.suppress(PipeClosed):
            daemon.tell(released=pb.Empty())
    except Exception as error:
        worker.fail(error)
        return 1
    finally:
        pipe.close()
    return 0


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(worker: Worker) -> None:
    """Become what the daemon says, and be it until the end.

    Raises:
        Released, PipeClosed: the daemon is done with this worker, or is gone.
        Exception: anything else that ends it, see `motley.daemon.worker.failures.failure_of`.
    """
    daemon = worker.daemon
    start = worker.start = daemon.wait_for("start", COMMAND_S).start
    worker.began = time.monotonic()
    limit_products(worker.threads)
    with contextlib.closing(worker.listen()) as listener:
        daemon.tell(listening=listener.port)
        peers = daemon.wait_for("peers", COMMAND_S).peers
        if start.rank < start.assignment.size:
            Rank(worker).run(listener, list(peers.addresses))
        elif start.assignment.cache_holders:
            run_cache_holder(worker, listener)
        else:
            run_host(worker, listener, list(peers.group))


if __name__ == "__main__":
    end_process(main())
