"""The ranks, expert hosts and cache holders that this node holds, and what becomes of their workers.

They outlive the node's stays in the mesh: ranks compute over links of their own, so an orchestrator that is away for a
while costs no session. Those that are ready when a stay ends are kept, and told of in the next Hello; what was being
answered is not computed further, as the orchestrator asks again for what it still wants of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

from motley.daemon.lending.mirror import borrowed_place
from motley.daemon.lending.wire import LendingError
from motley.daemon.loading.fetching import LoadError, found
from motley.daemon.models.files import load_tokenizer
from motley.daemon.node.answering.rendering import TemplateApart
from motley.daemon.node.answering.requests import Answering
from motley.daemon.node.network.address import listening_host
from motley.daemon.node.settings import NodeSettings
from motley.daemon.node.workers.held_rank import HeldRank, RankKey
from motley.daemon.node.workers.worker import RankWorker, WorkerError, end_start_of_workers
from motley.daemon.text.tokenizer import Tokenizer, TokenizerError
from motley.daemon.weights.hub import ModelNotFound
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp
from motley.protocol.address import join_address

logger = logging.getLogger(__name__)

RankObserver = Callable[[str, pb.RankEvent], None]
"""Called with what a rank is on this node (`HeldRank.role`), and what the orchestrator is told of it."""
FAILURES_KEPT, WORDS_KEPT = 20, 300
"""So many failures are told again at the beginning of a stay, the latest ones, and so many characters of each: what a
node says first may not be long."""
PASSED_ON = {"peers", "placement", "host", "adapter"}
"""Commands to a rank that go to its worker as they come."""


class Talk(Protocol):
    """The conversation with the orchestrator, while there is one."""

    def say(self, **body: Any) -> None:
        """Send the orchestrator a message: a field of `NodeMessage`, by name."""

    def heartbeat(self) -> pb.Heartbeat:
        """What is free on this machine now."""


class Ranks:
    """What this node holds, of all sessions."""

    def __init__(self, settings: NodeSettings, observe: RankObserver) -> None:
        self._settings = settings
        self._observe = observe
        self._held: dict[RankKey, HeldRank] = {}
        self._talk: Talk | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed: deque[pb.RankEvent] = deque(maxlen=FAILURES_KEPT)
        """The latest failures that were not told at the beginning of a stay. Of some the orchestrator may have heard
        nothing: a stay has ended before that is noticed."""
        self.answering = Answering(self._held, self.say)
        """The requests under way."""

    @property
    def told(self) -> list[pb.HeldRank]:
        """What the orchestrator is told at the beginning of a stay: the ranks that it can go on with."""
        return [
            pb.HeldRank(session=key[0], epoch=rank.command.epoch, rank=key[1])
            for key, rank in self._held.items()
            if rank.ready and not rank.releasing
        ]

    def attach(self, talk: Talk, settings: NodeSettings) -> None:
        """A stay has begun.

        Args:
            settings: the node's, with the address that this orchestrator knows.
        """
        self._talk, self._settings = talk, settings

    def heard(self, told: Iterable[pb.RankEvent]) -> None:
        """The orchestrator has heard of some failures for certain."""
        for each in told:
            with contextlib.suppress(ValueError):
                self.failed.remove(each)

    async def detach(self) -> None:
        """A stay has ended: end the ranks that were not ready, and what was being answered."""
        self._talk = None
        self.answering.abandon()
        for rank in self._held.values():
            rank.involved.clear()
        await asyncio.gather(*(self._end(rank) for rank in self._held.values() if not rank.ready))

    async def end(self) -> None:
        """End all ranks."""
        await asyncio.gather(*map(self._end, self._held.values()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await end_start_of_workers()

    def places(self) -> dict[RankKey, set[bool]]:
        """Where each rank computes whose worker has not ended, see `HeldRank.places`."""
        capabilities = self._settings.capabilities
        return {key: rank.places(capabilities) for key, rank in self._held.items()}

    async def take_away(self, key: RankKey, why: pb.Failure) -> None:
        """End a rank that the mesh has not released in time, and tell why."""
        if (rank := self._held.get(key)) is not None and not rank.releasing:
            rank.taken_away = why
            await self._end(rank)

    def processes(self) -> list[int]:
        """The numbers of all workers' processes."""
        return [rank.worker.pid for rank in self._held.values() if rank.worker is not None]

    def say(self, **body: Any) -> None:
        """Tell the orchestrator; nobody, between two stays: at the next one it hears what is left."""
        if self._talk is not None:
            self._talk.say(**body)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def command(self, command: pb.RankCommand) -> None:
        """Do to a rank what the orchestrator wants."""
        key = (command.session, command.rank)
        body = command.WhichOneof("body")
        if body == "assign" and key in self._held and self._held[key].command.epoch == command.epoch:
            message = f"node {self._settings.name!r} holds rank {command.rank} of session {command.session} already"
            failure = pb.Failure(code="internal_error", message=message)
            self.say(rank=pb.RankEvent(session=key[0], epoch=command.epoch, rank=key[1], failed=failure))
        elif body == "assign":
            before = self._held.get(key)
            self._held[key] = HeldRank(command)
            self._spawn(self._hold(key, self._held[key], before))
        elif (rank := self._held.get(key)) is None or rank.command.epoch != command.epoch:
            if body == "release":
                gone = pb.RankEvent(session=key[0], epoch=command.epoch, rank=key[1], released=pb.Empty())
                self.say(rank=gone)
        elif body == "release":
            self._spawn(self._end(rank))
        elif rank.worker is not None and body in PASSED_ON:
            rank.worker.send(wp.WorkerCommand(**{body: getattr(command, body)}))

    def involve(self, told: pb.Involved) -> None:
        """A rank here, which does not lead its session, begins to compute a request, or has ended with it."""
        rank = self._held.get((told.session, told.rank))
        if rank is None:
            return
        rank.involved[told.name] += -1 if told.ended else 1
        rank.involved += Counter[str]()  # forgets what is 0
        does = "has ended with it" if told.ended else "computes its part of it"
        about = {"request": told.name, "session": told.session, "rank": told.rank}
        logger.info("request %s: rank %d of session %s %s", told.name, told.rank, told.session, does, extra=about)

    async def _hold(self, key: RankKey, rank: HeldRank, before: HeldRank | None) -> None:
        """See a rank's worker through its life, then report its end, whatever ended it.

        Args:
            before: the same rank in an epoch before, which must end first.
        """
        command = rank.command
        try:
            if before is not None:
                await self._end(before)
            failure = await self._serve(rank)
        except (WorkerError, TokenizerError, ModelNotFound, LendingError, LoadError) as error:
            failure = pb.Failure(code="load_failed", message=str(error))
        except Exception as error:
            logger.exception("rank %d of session %s", command.rank, command.session)
            failure = pb.Failure(code="internal_error", message=f"{type(error).__name__}: {error}")
        finally:
            asked = rank.releasing
            if rank.template is not None:
                await asyncio.to_thread(rank.template.close)
            if rank.worker is not None:
                await rank.worker.stop()
            if self._held.get(key) is rank:
                del self._held[key]
        if self._talk is not None:
            self._talk.say(heartbeat=self._talk.heartbeat())  # what is planned next counts on memory that is free now
        failure, asked = rank.taken_away or failure, asked and rank.taken_away is None
        if failure is None or asked:
            self._rank_event(rank, rank.event(released=pb.Empty()))
        else:
            for name in {*rank.involved, *(each.name for each in rank.generations.values())}:
                about = {"request": name, "session": command.session, "rank": command.rank}
                logger.info(
                    "request %s: rank %d, which computes it, failed: %s",
                    name,
                    command.rank,
                    failure.message,
                    extra=about,
                )
            self._rank_event(rank, rank.event(failed=failure))  # the orchestrator asks another rank 0 for its requests

    async def _serve(self, rank: HeldRank) -> pb.Failure | None:
        """Start a rank's worker and pass on what it says until it is gone; why it ended, if it was not asked to."""
        settings, command = self._settings, rank.command
        worker = rank.worker = await RankWorker.start(
            cache=settings.cache,
            models=settings.models,
            host=listening_host(settings.address),
            ports=settings.ports,
            threads=settings.threads,
        )
        if rank.releasing:
            return None
        start = wp.Start(session=command.session, epoch=command.epoch, rank=command.rank, assignment=command.assign)
        worker.send(wp.WorkerCommand(start=start))
        async for event in worker.events():
            match event.WhichOneof("body"):
                case None:
                    pass
                case "tokens":
                    self.answering.on_tokens(rank, event.tokens)
                case "failed":
                    return event.failed
                case "released":
                    return None
                case "listening":
                    self._rank_event(rank, rank.event(listening=join_address(settings.address, event.listening)))
                case body:
                    if body == "ready" and command.rank == 0:
                        tokenizer = await asyncio.to_thread(_load_tokenizer, command.assign, settings)
                        if tokenizer.template is not None:
                            rank.template = await asyncio.to_thread(TemplateApart, tokenizer.template)
                            tokenizer.template = rank.template
                        if tokenizer.notice:
                            logger.warning("session %s: %s", command.session, tokenizer.notice)
                        rank.tokenizer = tokenizer
                    rank.ready = rank.ready or body == "ready"
                    self._rank_event(rank, rank.event(**{body: getattr(event, body)}))
        await worker.stop()  # it hung up: nothing more can come
        status = await worker.exit_status()
        return pb.Failure(code="worker_died", message=_how_died(status))

    async def _end(self, rank: HeldRank) -> None:
        """Have a rank's worker end; `_hold` reports it."""
        rank.releasing = True
        if rank.worker is not None:
            await rank.worker.stop()

    def _rank_event(self, rank: HeldRank, event: pb.RankEvent) -> None:
        self._observe(rank.role, event)
        if event.HasField("failed"):
            told = pb.RankEvent()
            told.CopyFrom(event)
            told.failed.message = told.failed.message[:WORDS_KEPT]
            self.failed.append(told)
        self.say(rank=event)


def _load_tokenizer(assigned: pb.Assignment, settings: NodeSettings) -> Tokenizer:
    """The tokenizer of a model whose rank 0 is here: that may have borrowed it."""
    if assigned.HasField("loan"):
        return load_tokenizer(borrowed_place(settings.cache.folder, assigned.loan.files))
    with found(assigned.model.source, settings.models, settings.cache, lambda done, total: None) as (place, _):
        return load_tokenizer(place)


def _how_died(status: int) -> str:
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"its worker process {how}"
