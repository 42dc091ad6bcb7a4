"""The rank worker: one process, one thread, that loads a share and executes steps.

``python -m motley.daemon.rank.process`` is started by `motley.daemon.node.worker`. Life of a worker: settings on stdin,
an `Assignment` over the pipe, listen, load the share, meet the peers, then the step loop until a `Release`, the end of
the pipe, or an error. The leader (rank 0) decides each step and tells the others on the data plane.

Ranks beyond those that have shares are expert hosts: they load experts instead, and answer calls for them
(`motley.daemon.experts.host`), alone or with a group of workers that each have slices (`motley.daemon.experts.group`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from motley.daemon.experts.calls import ExpertsMissing
from motley.daemon.experts.dispatch import Dispatcher
from motley.daemon.experts.group import Group, GroupMember
from motley.daemon.experts.holding import Holding, keys_of
from motley.daemon.experts.host import ExpertHost, prepare_process
from motley.daemon.experts.loading import ExpertLoader
from motley.daemon.models.config import ConfigError
from motley.daemon.models.share import ShareError
from motley.daemon.node.hardware import pin_to_core, resident_bytes
from motley.daemon.node.pipe import PipeClosed, WorkerPipe
from motley.daemon.rank.executor import Executor
from motley.daemon.rank.gate import GateError
from motley.daemon.rank.loading import GpuFull, LoadedRank, LoadError, load_rank
from motley.daemon.rank.peers import Peers
from motley.daemon.rank.sampling import SamplingError, SummaryError
from motley.daemon.rank.scheduler import Leader
from motley.daemon.rank.steps import Able, Close, StepError, Stop, decode
from motley.daemon.weights.cache import ShareCache
from motley.daemon.weights.checkpoint import CheckpointError
from motley.daemon.weights.hub import ModelNotFound
from motley.daemon.weights.share_file import ShareFileError
from motley.plugins.engine import EngineError, EngineMemoryError
from motley.protocol import MAX_RANKS
from motley.protocol import mesh_pb2 as pb
from motley.transport import (
    Communicator,
    Listener,
    Membership,
    Messenger,
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
    logging.basicConfig(level=logging.WARNING, format="rank worker: %(message)s")
    settings = json.loads(sys.stdin.readline() or "null")
    if settings is None:
        return 1  # the daemon has gone, as it has where nobody answers
    if settings["core"] is not None:
        pin_to_core(settings["core"])
    try:
        pipe = WorkerPipe(settings["port"], bytes.fromhex(settings["token"]))
    except PipeClosed:
        return 1
    worker = RankWorkerProcess(pipe, settings, network)
    try:
        worker.run()
    except PipeClosed:
        pass
    except Released:
        with contextlib.suppress(PipeClosed):
            worker.emit(released=pb.Empty())
    except Exception as error:
        worker.fail(error)
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
        self._held: deque[pb.RankCommand] = deque()
        """Commands that came while a step waited for experts."""
        self._placement = pb.Placement()
        self._dispatcher: Dispatcher | None = None
        self._failed = False
        self._reported = 0.0
        self._loaded = 0

    def emit(self, **body: Any) -> None:
        """Send a `RankEvent` with this body."""
        command = self._command
        self._pipe.send(pb.RankEvent(session=command.session, epoch=command.epoch, rank=command.rank, **body))

    def fail(self, error: Exception) -> None:
        """Tell the daemon why this worker ends; only the first reason counts."""
        if self._failed:
            return
        self._failed = True
        failure = failure_of(error)
        if failure.code == "internal_error":
            logger.error("unexpected error", exc_info=error)
        ranks = self._command.assign.group.ranks
        if ranks and failure.lost_rank:  # workers of a group know each other by place
            failure.lost_rank = ranks[failure.lost_rank - 1] + 1
        with contextlib.suppress(PipeClosed):
            self.emit(failed=failure)

    @contextlib.contextmanager
    def _parting(self, communicator: Communicator) -> Iterator[None]:
        """A rank that is released is no loss to its peers; one that fails says why before they can miss it."""
        try:
            yield
        except (Released, PipeClosed):
            communicator.close()
            raise
        except Exception as error:
            self.fail(error)
            raise

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
            met = self._await("peers").peers
            addresses = list(met.addresses)
            if rank >= assignment.size:
                self._host_experts(listener, list(met.group))
                return
            communicator = connect_mesh(
                listener,
                membership(self._command),
                addresses[: assignment.size],
                timeout=CONNECT_S,
                security=protection(assignment),
                wire_format=WireFormat(assignment.wire),
                wrap=self._network(rank) if self._network else None,
            )
            stack.enter_context(communicator)
            stack.enter_context(self._parting(communicator))
            listener.close()
            peers = Peers(communicator)
            loaded = stack.enter_context(
                load_rank(
                    assignment,
                    rank,
                    peers,
                    models=self._models,
                    cache=self._cache,
                    threads=assignment.threads or self._threads,
                    progress=self._progress,
                )
            )
            if rank != 0:
                communicator.send(Able(loaded.executor.most_sequences).encode(), 0)
            ready = pb.Ready(
                share_bytes=loaded.share_bytes,
                rss_bytes=resident_bytes().now,
                load_s=time.monotonic() - began,
                pid=os.getpid(),
            )
            if assignment.hosts:
                peers.dispatcher = self._reach_hosts(loaded, communicator, addresses[assignment.size :])
                stack.callback(peers.dispatcher.close)
            self.emit(ready=ready)
            if rank == 0:
                self._lead(loaded.executor, communicator, assignment, loaded.max_rows)
            else:
                self._follow(loaded.executor, communicator)

    def _host_experts(self, listener: Listener, addresses: list[str]) -> None:
        """Be an expert host, or a worker of the group at these addresses, if there are any."""
        assignment, rank = self._command.assign, self._command.rank
        group = assignment.group if assignment.HasField("group") else None
        host = group.host if group is not None else rank - assignment.size
        leads = group is None or group.member == len(addresses) - 1
        prepare_process()
        with contextlib.ExitStack() as stack:
            communicator = None
            if group is not None:  # the leader dials all: its listener is for the trunk
                own = stack.enter_context(contextlib.closing(Listener(self._host))) if leads else listener
                communicator = stack.enter_context(
                    connect_mesh(
                        own,
                        group_membership(self._command),
                        addresses,
                        timeout=CONNECT_S,
                        security=_protection(group.tls, plain=assignment.WhichOneof("links") == "plain"),
                    )
                )
                stack.enter_context(self._parting(communicator))
            loader = stack.enter_context(
                ExpertLoader(
                    assignment,
                    models=self._models,
                    cache=self._cache,
                    threads=assignment.threads or self._threads,
                )
            )
            holding = stack.enter_context(Holding(keys_of(assignment.hosts[host]), loader, emit=self.emit))
            wire_format = WireFormat(assignment.wire)
            if communicator is not None and not leads:
                GroupMember(communicator, holding, wire_format=wire_format, commands=self._commands).run()
                return
            messenger = Messenger(
                with_hosts(membership(self._command)),
                protection(assignment),
                listener=listener,
                accepts=range(assignment.size),
                wrap=self._network(rank) if self._network else None,
            )
            stack.callback(messenger.close)
            ExpertHost(
                messenger,
                holding,
                trunk=assignment.size,
                wire_format=wire_format,
                daemon=self._pipe,
                commands=self._commands,
                group=Group(communicator, assignment.group.slices) if communicator is not None else None,
            ).run()

    def _lead(self, executor: Executor, communicator: Communicator, assignment: pb.Assignment, max_rows: int) -> None:
        leader = Leader(
            executor,
            communicator,
            context=assignment.context,
            max_rows=max_rows,
            halves=assignment.size > 1 and not assignment.model.exact,
            emit=self.emit,
            check=lambda: self._check(communicator),
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
                self._check(communicator)
                continue
            message = decode(communicator.recv(0, communicator.deadline_s))
            if isinstance(message, Stop):
                raise Released
            summary = executor.execute(message)
            if summary is not None:
                communicator.send(summary, 0)
            if isinstance(message, Close):
                self._report(executor, [])

    def _check(self, communicator: Communicator) -> None:
        """Look whether everyone is still there, while nothing is expected of them; hosts may come and go."""
        communicator.check()
        if self._dispatcher is not None:
            self._dispatcher.attend()

    def _reach_hosts(self, loaded: LoadedRank, communicator: Communicator, addresses: list[str]) -> Dispatcher:
        """Meet all expert hosts; those that still load their experts are waited for."""
        assignment = self._command.assign

        def look(seconds: float) -> None:
            communicator.check()
            self._held.extend(self._received(seconds))

        if not self._placement.version:
            alive = [True] * len(addresses)
            self._placement = pb.Placement(hosts=assignment.hosts, addresses=addresses, alive=alive)
        wrap = self._network(self._command.rank) if self._network else None
        dispatcher = Dispatcher(
            self._command.rank,
            assignment.size,
            Messenger(with_hosts(membership(self._command)), protection(assignment), listener=None, wrap=wrap),
            self._placement,
            hidden=loaded.hidden,
            wire_format=WireFormat(assignment.wire),
            look=look,
            emit=self.emit,
        )
        self._dispatcher = dispatcher
        try:
            dispatcher.meet(lambda: self._progress(loaded.share_bytes, loaded.share_bytes))
        except BaseException:
            dispatcher.close()
            raise
        return dispatcher

    def _commands(self, timeout_s: float) -> Iterator[pb.RankCommand]:
        """The daemon's commands that are there, waiting up to `timeout_s` for the first.

        Raises:
            Released: one of them is a release.
        """
        while self._held:
            yield self._held.popleft()
            timeout_s = 0.0
        yield from self._received(timeout_s)

    def _received(self, timeout_s: float) -> Iterator[pb.RankCommand]:
        """Commands as they come; a placement is adopted and seen by nobody else."""
        while self._pipe.poll(timeout_s):
            command = self._pipe.receive()
            match command.WhichOneof("body"):
                case "release":
                    raise Released
                case "placement":
                    self._placement = max(self._placement, command.placement, key=lambda placement: placement.version)
                    if self._dispatcher is not None:
                        self._dispatcher.place(self._placement)
                case _:
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
        if now - self._reported > PROGRESS_S or done == total != self._loaded:
            self._reported, self._loaded = now, done
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
        if self._dispatcher is not None:
            self.emit(experts=self._dispatcher.report())
        self.emit(timing=timing)


def membership(command: pb.RankCommand) -> Membership:
    """What this rank proves to its peers, and what all of them must agree on, before the first tensor."""
    assignment = command.assign
    return Membership(
        session=command.session,
        epoch=command.epoch,
        rank=command.rank,
        size=assignment.size,
        secret=assignment.secret,
        agreement=_agreement(assignment),
    )


def group_membership(command: pb.RankCommand) -> Membership:
    """The same among the workers of an expert host's group."""
    group = command.assign.group
    agreed = pb.Group(host=group.host, slices=group.slices, ranks=group.ranks)
    return Membership(
        session=f"{command.session}.h{group.host}",
        epoch=command.epoch,
        rank=group.member,
        size=len(group.ranks),
        secret=group.secret,
        agreement=_agreement(command.assign, agreed),
    )


def with_hosts(trunk: Membership) -> Membership:
    """What trunk ranks and expert hosts prove to each other: there is room for hosts that are still to join."""
    return replace(trunk, size=MAX_RANKS)


def _agreement(assignment: pb.Assignment, group: pb.Group | None = None) -> bytes:
    agreed = pb.Assignment()
    agreed.CopyFrom(assignment)
    # These may differ from rank to rank.
    for own in ("secret", "tls", "plain", "engine", "engine_options", "threads", "hosts", "group"):
        agreed.ClearField(own)
    if assignment.hosts:  # others may have joined: that there are some is agreed on
        agreed.hosts.add()
    agreed.model.ClearField("source")  # the fingerprint tells whether the files are equal
    if group is not None:
        agreed.group.CopyFrom(group)
    return hashlib.sha256(agreed.SerializeToString(deterministic=True)).digest()


def protection(assignment: pb.Assignment) -> Tls | Plain:
    """How the links are protected: by the session's certificates unless plain ones were asked for by name.

    Raises:
        UsageError: the certificates cannot be used.
    """
    return _protection(assignment.tls, plain=assignment.WhichOneof("links") == "plain")


def _protection(mine: pb.Credentials, *, plain: bool) -> Tls | Plain:
    return Plain() if plain else Tls(mine.certificate, mine.key, mine.authority)


def failure_of(error: Exception) -> pb.Failure:
    """Put an error in the form of the control plane: a stable code, a message, and the rank to blame."""
    match error:
        case TransportError():
            code = {PeerLost: "peer_lost", PeerTimeout: "peer_timeout"}.get(type(error), "transport_error")
            return pb.Failure(code=code, message=str(error), lost_rank=0 if error.rank is None else error.rank + 1)
        case OrderError():
            return pb.Failure(code="timeout", message=str(error))
        case ExpertsMissing():
            return pb.Failure(code="experts_missing", message=str(error))
        case StepError() | SummaryError() | SamplingError():
            return pb.Failure(code="step_error", message=str(error))
        case ConfigError() | ShareError() | CheckpointError() | ShareFileError() | ModelNotFound() | LoadError():
            return pb.Failure(code="load_failed", message=str(error))
        case GpuFull():
            return pb.Failure(code="insufficient_memory", message=str(error))
        case GateError():
            return pb.Failure(code="wrong_results", message=str(error))
        case EngineMemoryError():
            return pb.Failure(code="out_of_memory", message=str(error))
        case EngineError():
            return pb.Failure(code="engine_error", message=str(error))
        case MemoryError():
            return pb.Failure(code="out_of_memory", message="this rank ran out of memory; give it a smaller share")
    return pb.Failure(code="internal_error", message=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
