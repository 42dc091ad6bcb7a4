"""A worker that is a rank: it meets the others, loads its share, and executes steps until it is told to end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from motley.daemon.caches.held_elsewhere import HeldElsewhere
from motley.daemon.experts.dispatch import Dispatcher
from motley.daemon.machine.memory import resident_bytes
from motley.daemon.pipe.daemon import Released
from motley.daemon.rank.executor import Executor
from motley.daemon.rank.guessing.draft_model import DraftModel
from motley.daemon.rank.guessing.drafting import Drafter
from motley.daemon.rank.guessing.handed_rows import HandedRows
from motley.daemon.rank.guessing.own_head import OwnHead
from motley.daemon.rank.loading import LoadedRank, cache_blocks, load_rank, planned_stages
from motley.daemon.rank.passage import Passage
from motley.daemon.rank.peers import Peers
from motley.daemon.rank.scheduling.request import Request
from motley.daemon.rank.scheduling.scheduler import Scheduler
from motley.daemon.rank.steps import Close, Stop, decode
from motley.daemon.worker.membership import membership, protection, with_hosts
from motley.daemon.worker.worker import CONNECT_S, Worker
from motley.protocol import mesh_pb2 as pb
from motley.transport import Communicator, Listener, Messenger, TransportError, WireFormat, connect_mesh, group_of

LOOK_S = 0.5
"""Seconds between two looks for what the daemon wants, while there is nothing to execute."""
KEEP_S = 2.0
"""Seconds that keeping prefixes may take when the session ends; a worker that takes long to end is killed."""
STEPS_S = 0.5
"""Seconds between two reports on the latest decode steps, on ranks that do not schedule them."""
PROGRESS_S = 0.2
"""Seconds between two reports on how far the loading is."""


class Rank:
    """The life of one rank, once it knows where its peers are."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._daemon = worker.daemon
        self._assignment = worker.start.assignment
        self._number = worker.start.rank
        self._dispatcher: Dispatcher | None = None
        self._holder: HeldElsewhere | None = None
        self._reported = 0.0
        self._loaded = 0
        self._told_steps = 0
        """Decode steps that were told of one by one."""

    def run(self, listener: Listener, addresses: Sequence[str]) -> None:
        """Load the share and execute steps until the end.

        Args:
            listener: where this rank's peers reach it; closed here, while the mesh goes on to listen.
            addresses: ``host:port`` of every rank, then of every expert host.

        Raises:
            Released, PipeClosed: the daemon is done with this worker, or is gone.
            Exception: anything that ends the session, see `motley.daemon.worker.failures.failure_of`.
        """
        worker, assignment, number = self._worker, self._assignment, self._number
        with contextlib.ExitStack() as stack:
            communicator = connect_mesh(
                listener,
                membership(worker.start),
                addresses[: assignment.size],
                timeout=CONNECT_S,
                security=protection(assignment),
                wire_format=WireFormat(assignment.wire),
                wrap=worker.wrap,
                all_listen=True,
            )
            stack.enter_context(communicator)
            stack.enter_context(worker.parting(communicator))
            listener.close()
            stages = planned_stages(assignment)
            own = next(stage for stage in stages if number in stage.ranks)
            passage = Passage(communicator, stages) if len(stages) > 1 else None
            peers = Peers(group_of(communicator, own.ranks), passage)
            if assignment.cache_holders:
                self._holder = peers.holder = self._way_to_holder(addresses[assignment.size + number])
                stack.callback(self._holder.close)
            guesses = number == 0 and assignment.HasField("draft")
            handed = HandedRows() if guesses and assignment.draft.model.ahead else None
            loaded = stack.enter_context(
                load_rank(
                    assignment,
                    number,
                    peers,
                    models=worker.models,
                    cache=worker.cache,
                    threads=worker.threads,
                    progress=self._progress,
                    holder=self._holder,
                    handed=handed,
                )
            )
            draft_model = self._load_draft_model(stack, loaded, handed) if guesses else None
            if number != 0:
                communicator.send(loaded.executor.able.encode(), 0)
            ready = pb.Ready(
                share_bytes=loaded.share_bytes,
                rss_bytes=resident_bytes().now,
                load_s=time.monotonic() - worker.began,
                pid=os.getpid(),
            )
            if assignment.hosts:
                peers.dispatcher = self._reach_hosts(loaded, communicator, addresses[assignment.size :])
                stack.callback(peers.dispatcher.close)
            self._daemon.tell(ready=ready)
            if number == 0:
                self._lead(loaded, communicator, draft_model, len(stages), len(own.ranks))
            else:
                self._follow(loaded.executor, communicator)

    def _load_draft_model(
        self, stack: contextlib.ExitStack, main: LoadedRank, handed: HandedRows | None
    ) -> Drafter[Request]:
        """Load the model that guesses tokens for `main`, as the only rank of a session of its own, or its own head,
        which reads what is handed; errors as `load_rank`."""
        worker, draft = self._worker, self._assignment.draft
        alone = stack.enter_context(Communicator(0, {}))
        loaded = stack.enter_context(
            load_rank(
                draft,
                0,
                Peers(alone),
                models=worker.models,
                cache=worker.cache,
                threads=worker.threads,
                progress=self._progress,
            )
        )
        if handed is not None:
            return OwnHead(
                loaded.engine,
                loaded.embed,
                handed,
                blocks=loaded.blocks,
                context=loaded.context,
                max_rows=loaded.max_rows,
                words=loaded.words,
                words_per_unit=loaded.words_per_unit,
            )
        return DraftModel(
            loaded.executor,
            blocks=loaded.blocks,
            context=loaded.context,
            same_tables=loaded.same_tables,
            max_rows=loaded.max_rows,
            vocabulary=loaded.vocabulary,
            known=main.vocabulary,
        )

    def _lead(
        self,
        loaded: LoadedRank,
        communicator: Communicator,
        draft_model: Drafter[Request] | None,
        stages: int,
        beside: int,
    ) -> None:
        """Be rank 0: schedule the steps of all ranks, which form so many stages, so many of them the first."""
        has_sums = stages < self._assignment.size
        scheduler = Scheduler(
            loaded.executor,
            communicator,
            blocks=loaded.blocks,
            vocabulary=loaded.vocabulary,
            sequences=self._assignment.sequences,
            max_rows=loaded.max_rows,
            halves=has_sums and not self._assignment.model.exact and not self._assignment.one_wave,
            same_tables=loaded.same_tables,
            tell=self._daemon.tell,
            together=self._daemon.together,
            check=lambda: self._check(communicator),
            report=lambda: self._report(loaded.executor, list(scheduler.step_ms)),
            tell_steps=lambda: self._tell_steps(loaded.executor),
            draft_model=draft_model,
            waves=1 if loaded.blocks.far else stages,
            beside=beside,
            adapters=self._assignment.adapters,
            recurrent=loaded.recurrent,
            embeds=bool(self._assignment.embeddings),
        )
        try:
            scheduler.run(self._daemon.commands)
        except Released:
            with contextlib.suppress(TransportError):
                scheduler.keep_prefixes(KEEP_S)
                scheduler.stop()
            raise

    def _follow(self, executor: Executor, communicator: Communicator) -> None:
        """Be any other rank: execute what rank 0 says."""
        due = time.monotonic() + STEPS_S
        while True:
            for _ in self._daemon.commands(0.0):
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
            elif (now := time.monotonic()) >= due:
                due = now + STEPS_S
                self._tell_steps(executor)

    def _check(self, communicator: Communicator) -> None:
        """Look whether everyone is still there, while nothing is expected of them; hosts may come and go."""
        communicator.check()
        if self._dispatcher is not None:
            self._dispatcher.attend()
        if self._holder is not None:
            self._holder.attend()

    def _way_to_holder(self, address: str) -> HeldElsewhere:
        """The way to the holder of this rank's far cache blocks which are not on its disk; it is at this address."""
        worker, assignment = self._worker, self._assignment
        messenger = Messenger(
            with_hosts(membership(worker.start)), protection(assignment), listener=None, wrap=worker.wrap
        )
        return HeldElsewhere(messenger, assignment.size + self._number, address, cache_blocks(assignment).held)

    def _reach_hosts(self, loaded: LoadedRank, communicator: Communicator, addresses: Sequence[str]) -> Dispatcher:
        """Meet all expert hosts; those that still load their experts are waited for."""
        daemon, assignment = self._daemon, self._assignment

        def look(seconds: float) -> None:
            communicator.check()
            daemon.keep_commands(seconds)

        if not daemon.placement.version:
            alive = [True] * len(addresses)
            daemon.placement = pb.Placement(hosts=assignment.hosts, addresses=addresses, alive=alive)
        dispatcher = Dispatcher(
            self._number,
            assignment.size,
            Messenger(
                with_hosts(membership(self._worker.start)),
                protection(assignment),
                listener=None,
                wrap=self._worker.wrap,
            ),
            daemon.placement,
            hidden=loaded.expert_width,
            wire_format=WireFormat(assignment.wire),
            look=look,
            tell=daemon.tell,
            adapters=loaded.experts,
        )
        self._dispatcher = dispatcher
        daemon.on_placement = dispatcher.place
        try:
            dispatcher.meet(lambda: self._progress(loaded.share_bytes, loaded.share_bytes))
        except BaseException:
            dispatcher.close()
            raise
        return dispatcher

    def _progress(self, done: int, total: int) -> None:
        """Tell how far the loading is; raises `Released` or `PipeClosed` if nobody waits for it any more."""
        for _ in self._daemon.commands(0.0):
            pass
        now = time.monotonic()
        if now - self._reported > PROGRESS_S or done == total != self._loaded:
            self._reported, self._loaded = now, done
            self._daemon.tell(loading=pb.Loading(done_bytes=done, total_bytes=total))

    def _tell_steps(self, executor: Executor) -> None:
        """Tell where the time of the decode steps went that have not been told of, one by one."""
        times, first = executor.times, self._told_steps
        fresh = list(times.steps)[-(times.count - first) :] if times.count > first else []
        if not fresh:
            return
        self._told_steps = times.count
        compute, wire, wait = ([1e3 * step[part] for step in fresh] for part in range(3))
        steps = pb.Steps(first=times.count - len(fresh), compute_ms=compute, wire_ms=wire, wait_ms=wait)
        self._daemon.tell(steps=steps)

    def _report(self, executor: Executor, step_ms: list[float]) -> None:
        """Tell where the time of this rank's decode steps went, and what it has asked of expert hosts.

        Args:
            step_ms: the latest steps, where this rank schedules them.
        """
        self._tell_steps(executor)
        times = executor.times
        timing = pb.Timing(
            tokens=times.tokens,
            compute_s=times.compute,
            wire_s=times.wire,
            wait_s=times.wait,
            collectives=times.collectives,
            steps=times.count,
            step_ms=step_ms,
            step_compute_ms=[1e3 * compute for compute, _, _ in times.steps],
            step_wire_ms=[1e3 * wire for _, wire, _ in times.steps],
            step_wait_ms=[1e3 * wait for _, _, wait in times.steps],
        )
        times.steps.clear()
        if self._dispatcher is not None:
            self._daemon.tell(experts=self._dispatcher.report())
        self._daemon.tell(timing=timing)
