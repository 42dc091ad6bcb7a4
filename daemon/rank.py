"""The rank worker: one process, one thread, that loads a share and executes steps.

``python -m motley.daemon.rank`` is started by `motley.daemon.worker`. Life of a worker: settings on stdin, an
`Assignment` over the pipe, listen, load the share, meet the peers, then the step loop until a `Release`, the end of
the pipe, or an error. The leader (rank 0) decides each step and tells the others on the data plane.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from motley.daemon.executor import Executor
from motley.daemon.gate import GateError
from motley.daemon.hardware import pin_to_core, resident_bytes
from motley.daemon.leader import Leader
from motley.daemon.loading import LoadError, load_rank
from motley.daemon.models.config import ConfigError
from motley.daemon.models.share import ShareError
from motley.daemon.pipe import PipeClosed, WorkerPipe
from motley.daemon.sampling import SamplingError, SummaryError
from motley.daemon.steps import Close, StepError, Stop, decode
from motley.daemon.weights.cache import ShareCache
from motley.daemon.weights.checkpoint import CheckpointError
from motley.daemon.weights.hub import ModelNotFound
from motley.daemon.weights.share_file import ShareFileError
from motley.plugins.engine import EngineError
from motley.protocol import mesh_pb2 as pb
from motley.transport import (
    Communicator,
    Listener,
    Membership,
    PeerLost,
    PeerTimeout,
    Plain,
    Tls,
    TransportError,
    WireFormat,
    connect_mesh,
)
from motley.transport.security import Stream

logger = logging.getLogger(__name__)

COMMAND_S = 120.0
"""The daemon has this long to send the assignment, and the orchestrator to send the peers."""
CONNECT_S = 30.0
LOOK_S = 0.5
"""An idle follower looks at the pipe this often."""
PROGRESS_S = 0.2

Wrap = Callable[[int, Stream], Stream]
"""What `connect_mesh` takes."""


class Released(Exception):
    """The daemon wants this worker to end."""


class OrderError(Exception):
    """What this worker needs to start has not come."""


def main(network: Callable[[int], Wrap] | None = None) -> int:
    """Run one worker; the exit status is 0 if it ended because it was asked to.

    Args:
        network: gives a rank what its streams go through, where a benchmark wants a network that this machine lacks.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the daemon decides
    logging.basicConfig(level=logging.WARNING, format="rank worker: %(message)s")
    settings = json.loads(sys.stdin.readline())
    if settings["core"] is not None:
        pin_to_core(settings["core"])
    pipe = WorkerPipe(settings["port"], bytes.fromhex(settings["token"]))
    worker = RankWorkerProcess(pipe, settings, network)
    try:
        worker.run()
    except PipeClosed:
        pass
    except Released:
        with contextlib.suppress(PipeClosed):
            worker.emit(released=pb.Empty())
    except Exception as error:
        failure = failure_of(error)
        if failure.code == "internal_error":
            logger.exception("unexpected error")
        with contextlib.suppress(PipeClosed):
            worker.emit(failed=failure)
        return 1
    finally:
        pipe.close()
    return 0


class RankWorkerProcess:
    """The life of one worker."""

    def __init__(
        self, pipe: WorkerPipe, settings: dict[str, Any], network: Callable[[int], Wrap] | None = None
    ) -> None:
        self._pipe = pipe
        self._network = network
        self._cache = ShareCache(Path(settings["cache"]), settings["cache_limit"])
        self._models = Path(settings["models"]) if settings["models"] else None
        self._host: str = settings["host"]
        self._threads: int = settings["threads"]
        self._command = pb.RankCommand()
        self._reported = 0.0

    def emit(self, **body: Any) -> None:
        """Send a `RankEvent` with this body."""
        command = self._command
        self._pipe.send(pb.RankEvent(session=command.session, epoch=command.epoch, rank=command.rank, **body))

    def run(self) -> None:
        """Load a share and execute steps until the end.

        Raises:
            Released, PipeClosed: the daemon is done with this worker, or is gone.
            Exception: anything that ends the session, see `failure_of`.
        """
        self._command = self._await("assign")
        assignment, rank = self._command.assign, self._command.rank
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            listener = Listener(self._host)
            stack.callback(listener.close)
            self.emit(listening=str(listener.port))
            addresses = list(self._await("peers").peers.addresses)
            communicator = connect_mesh(
                listener,
                membership(self._command),
                addresses,
                timeout=CONNECT_S,
                security=protection(assignment),
                wire_format=WireFormat(assignment.wire),
                wrap=self._network(rank) if self._network else None,
            )
            stack.enter_context(communicator)
            stack.enter_context(_leaving_in_peace(communicator))
            listener.close()
            loaded = stack.enter_context(
                load_rank(
                    assignment,
                    rank,
                    communicator,
                    models=self._models,
                    cache=self._cache,
                    threads=assignment.threads or self._threads,
                    progress=self._progress,
                )
            )
            ready = pb.Ready(
                share_bytes=loaded.share_bytes, rss_bytes=resident_bytes().now, load_s=time.monotonic() - began
            )
            self.emit(ready=ready)
            if rank == 0:
                self._lead(loaded.executor, communicator, assignment, loaded.max_rows)
            else:
                self._follow(loaded.executor, communicator)

    def _lead(self, executor: Executor, communicator: Communicator, assignment: pb.Assignment, max_rows: int) -> None:
        leader = Leader(
            executor,
            communicator,
            context=assignment.context,
            max_rows=max_rows,
            halves=assignment.size > 1 and not assignment.model.exact,
            emit=self.emit,
            report=lambda: self._report(executor, list(leader.step_ms)),
        )
        try:
            leader.run(self._commands)
        except Released:
            with contextlib.suppress(TransportError):
                leader.stop()
            raise

    def _follow(self, executor: Executor, communicator: Communicator) -> None:
        while True:
            for _ in self._commands(0.0):
                pass
            if not communicator.wait_message(0, LOOK_S):  # as long as it likes: the transport sees that it lives
                continue
            message = decode(communicator.recv(0, communicator.deadline_s))
            if isinstance(message, Stop):
                raise Released
            summary = executor.execute(message)
            if summary is not None:
                communicator.send(summary, 0)
            if isinstance(message, Close):
                self._report(executor, [])

    def _commands(self, timeout_s: float) -> Iterator[pb.RankCommand]:
        """The daemon's commands that are there, waiting up to `timeout_s` for the first.

        Raises:
            Released: one of them is a release.
        """
        while self._pipe.poll(timeout_s):
            command = self._pipe.receive()
            if command.WhichOneof("body") == "release":
                raise Released
            yield command
            timeout_s = 0.0

    def _await(self, body: str) -> pb.RankCommand:
        deadline = time.monotonic() + COMMAND_S
        while (left := deadline - time.monotonic()) > 0:
            for command in self._commands(left):
                if command.WhichOneof("body") == body:
                    return command
        raise OrderError(f"the orchestrator has not sent {body!r} within {COMMAND_S:.0f} s")

    def _progress(self, done: int, total: int) -> None:
        for _ in self._commands(0.0):
            pass
        now = time.monotonic()
        if now - self._reported > PROGRESS_S or done == total:
            self._reported = now
            self.emit(loading=pb.Loading(done_bytes=done, total_bytes=total))

    def _report(self, executor: Executor, step_ms: list[float]) -> None:
        times = executor.times
        timing = pb.Timing(
            tokens=times.tokens,
            compute_s=times.compute,
            wire_s=times.wire,
            wait_s=times.wait,
            collectives=times.collectives,
            peak_rss_bytes=resident_bytes().peak,
            step_ms=step_ms,
            step_compute_ms=[1e3 * compute for compute, _, _ in times.steps],
            step_wire_ms=[1e3 * wire for _, wire, _ in times.steps],
            step_wait_ms=[1e3 * wait for _, _, wait in times.steps],
        )
        times.steps.clear()
        self.emit(timing=timing)


def membership(command: pb.RankCommand) -> Membership:
    """What this rank proves to its peers, and what all of them must agree on, before the first tensor."""
    assignment = command.assign
    agreed = pb.Assignment()
    agreed.CopyFrom(assignment)
    for own in ("secret", "tls", "plain", "engine", "threads"):  # may differ from rank to rank
        agreed.ClearField(own)
    agreed.model.ClearField("source")  # the fingerprint tells whether the files are equal
    return Membership(
        session=command.session,
        epoch=command.epoch,
        rank=command.rank,
        size=assignment.size,
        secret=assignment.secret,
        agreement=hashlib.sha256(agreed.SerializeToString(deterministic=True)).digest(),
    )


@contextlib.contextmanager
def _leaving_in_peace(communicator: Communicator) -> Iterator[None]:
    """A rank that is released is no loss to its peers."""
    try:
        yield
    except (Released, PipeClosed):
        communicator.close()
        raise


def protection(assignment: pb.Assignment) -> Tls | Plain:
    """How the links are protected: by the session's certificates unless plain ones were asked for by name.

    Raises:
        UsageError: the certificates cannot be used.
    """
    if assignment.WhichOneof("links") == "plain":
        return Plain()
    mine = assignment.tls
    return Tls(mine.certificate, mine.key, mine.authority)


def failure_of(error: Exception) -> pb.Failure:
    """Put an error in the form of the control plane: a stable code, a message, and the rank to blame."""
    match error:
        case TransportError():
            code = {PeerLost: "peer_lost", PeerTimeout: "peer_timeout"}.get(type(error), "transport_error")
            return pb.Failure(code=code, message=str(error), lost_rank=0 if error.rank is None else error.rank + 1)
        case OrderError():
            return pb.Failure(code="timeout", message=str(error))
        case StepError() | SummaryError() | SamplingError():
            return pb.Failure(code="step_error", message=str(error))
        case ConfigError() | ShareError() | CheckpointError() | ShareFileError() | ModelNotFound() | LoadError():
            return pb.Failure(code="load_failed", message=str(error))
        case GateError():
            return pb.Failure(code="wrong_results", message=str(error))
        case EngineError():
            return pb.Failure(code="engine_error", message=str(error))
        case MemoryError():
            return pb.Failure(code="out_of_memory", message="this rank ran out of memory; give it a smaller share")
    return pb.Failure(code="internal_error", message=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
