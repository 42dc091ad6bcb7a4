"""Requests of sessions whose rank 0 this node holds: they become token ids here, and the tokens chosen become text, so
that the worker's one thread does nothing but steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from motley.daemon.node.workers.held_rank import HeldRank, RankKey
from motley.daemon.text.generation import Generation, RequestError, told_prompt
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp

logger = logging.getLogger(__name__)


class Say(Protocol):
    """Sends the orchestrator a message: a field of `NodeMessage`, by name."""

    def __call__(self, **body: Any) -> None: ...


class Answering:
    """The requests under way on this node."""

    def __init__(self, ranks: Mapping[RankKey, HeldRank], say: Say) -> None:
        """
        Args:
            ranks: those that the node holds at any time.
            say: tells the orchestrator.
        """
        self._ranks = ranks
        self._say = say
        self._preparing: set[str] = set()
        """Requests that are being turned into tokens; a cancelled one is taken out."""

    def begin(self, request_id: str) -> None:
        """Note that a request has come, which may be cancelled from now on; `answer` must follow."""
        self._preparing.add(request_id)

    async def answer(self, request: pb.Generate) -> None:
        """Turn a request that has begun into tokens, and hand it to rank 0's worker. That is done beside the event
        loop, for one request of each session at a time."""
        rank = self._ranks.get((request.session, 0))
        if rank is None or rank.tokenizer is None:
            self._preparing.discard(request.request_id)
            message = f"this node does not lead a ready session {request.session!r}"
            self._fail(request.request_id, pb.Failure(code="session_not_ready", message=message))
            return
        try:
            async with rank.tokenising:
                if request.only_prompt:
                    self._say(delta=await asyncio.to_thread(told_prompt, request, rank.tokenizer))
                    return
                generation = await asyncio.to_thread(Generation, request, rank.tokenizer, rank.command.assign.context)
        except RequestError as error:
            self._fail(request.request_id, pb.Failure(code=error.code, message=str(error), param=error.param))
            return
        except Exception as error:
            logger.exception("request %s", request.name, extra=_about(request.name, rank))
            failure = pb.Failure(code="internal_error", message=f"{type(error).__name__}: {error}")
            self._fail(request.request_id, failure)
            return
        finally:
            cancelled = request.request_id not in self._preparing
            self._preparing.discard(request.request_id)
        if cancelled:
            self._say(delta=pb.Delta(request_id=request.request_id, finish="cancelled"))
        elif rank.worker is None or self._ranks.get((request.session, 0)) is not rank:
            failure = pb.Failure(code="session_closed", message=f"session {request.session!r} was closed")
            self._fail(request.request_id, failure)
        else:
            rank.generations[request.request_id] = generation
            logger.info("request %s: rank 0 begins to answer", generation.name, extra=_about(generation.name, rank))
            if generation.words is not None and not rank.knows_words:
                rank.knows_words = True
                rank.worker.send(wp.WorkerCommand(vocabulary=generation.words))
            rank.worker.send(wp.WorkerCommand(decode=generation.start()))

    def on_tokens(self, rank: HeldRank, tokens: wp.Tokens) -> None:
        """Tell what the tokens mean that rank 0's worker has chosen for a request."""
        generation = rank.generations.get(tokens.request_id)
        if generation is None:
            return  # cancelled or stopped while these were under way
        try:
            delta = generation.on_tokens(tokens)
        except Exception as error:  # of the tokenizer: its trouble with these tokens is this request's alone
            about = _about(generation.name, rank)
            logger.exception("request %s: its tokens cannot be turned into text", generation.name, extra=about)
            why = f"the answer cannot be turned into text: {type(error).__name__}: {error}"
            self._fail(tokens.request_id, pb.Failure(code="internal_error", message=why))
            ended, running = True, not tokens.finish
        else:
            if delta is not None:
                self._say(delta=delta)
            ended, running = generation.finished, generation.cancel_worker
        if ended:
            logger.info("request %s: rank 0 has ended with it", generation.name, extra=_about(generation.name, rank))
            del rank.generations[tokens.request_id]
            if running and rank.worker is not None:
                rank.worker.send(wp.WorkerCommand(cancel=tokens.request_id))

    def cancel(self, request_id: str) -> None:
        """Answer a request no further, whether it is being prepared or answered, or is not known."""
        self._preparing.discard(request_id)
        self.to_worker_of(request_id, wp.WorkerCommand(cancel=request_id))

    def abandon(self) -> None:
        """Answer nothing further that has been asked for."""
        self._preparing.clear()
        for rank in self._ranks.values():
            for request_id in rank.generations:
                if rank.worker is not None:
                    rank.worker.send(wp.WorkerCommand(cancel=request_id))
            rank.generations.clear()

    def to_worker_of(self, request_id: str, command: wp.WorkerCommand) -> None:
        """Tell rank 0's worker something about a request, if that is being answered."""
        for rank in self._ranks.values():
            if request_id in rank.generations and rank.worker is not None:
                rank.worker.send(command)

    def _fail(self, request_id: str, failure: pb.Failure) -> None:
        self._say(delta=pb.Delta(request_id=request_id, finish="error", failure=failure))


def _about(name: str, rank: HeldRank) -> dict[str, Any]:
    """What a line in the log is about that is about a request of this name."""
    return {"request": name, "session": rank.command.session, "rank": rank.command.rank}
