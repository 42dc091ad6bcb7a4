"""A rank, an expert host or a cache holder that this node holds."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from motley.daemon.node.answering.rendering import TemplateApart
from motley.daemon.node.workers.worker import RankWorker
from motley.daemon.text.generation import Generation
from motley.daemon.text.tokenizer import Tokenizer
from motley.protocol import mesh_pb2 as pb

RankKey = tuple[str, int]
"""A session, and the number of a rank in it."""


@dataclass
class HeldRank:
    """A rank, an expert host or a cache holder, that this node holds, from its assignment to the end of its worker.

    Attributes:
        command: the assignment.
        tokenizer: of the session's model, on the node of rank 0, once that is ready.
        template: of the tokenizer, which a process of its own runs; None: there is none.
        tokenising: held while a request of the session is turned into tokens.
        generations: requests under way on rank 0, by id.
        knows_words: whether rank 0's worker has been told the vocabulary, which constraints need.
        ready: whether it computes, as its worker has said.
        involved: requests that this rank, which does not lead, computes: what clients call each, and how often.
        releasing: whether it was asked to end.
        taken_away: why it was ended though nobody in the mesh has asked for that; None: it was not.
    """

    command: pb.RankCommand
    worker: RankWorker | None = None
    tokenizer: Tokenizer | None = None
    template: TemplateApart | None = None
    tokenising: asyncio.Lock = field(default_factory=asyncio.Lock)
    generations: dict[str, Generation] = field(default_factory=dict)
    knows_words: bool = False
    ready: bool = False
    involved: Counter[str] = field(default_factory=Counter)
    releasing: bool = False
    taken_away: pb.Failure | None = None

    @property
    def role(self) -> str:
        """What it is on this node, for people."""
        rank, assigned = self.command.rank, self.command.assign
        if rank < assigned.size:
            return f"rank {rank}"
        return f"caches of rank {rank - assigned.size}" if assigned.cache_holders else "experts"

    def places(self, capabilities: pb.Capabilities) -> set[bool]:
        """Where it computes: on the node's GPU (True), on its processor (False), or on both, as with a draft model."""
        on_gpu = {engine.name for engine in capabilities.engines if engine.on_gpu}
        assigned = self.command.assign
        orders = [assigned, *([assigned.draft] if assigned.HasField("draft") else [])]
        return {one.engine in on_gpu or one.engine_options.get("device") == "cuda" for one in orders}

    def event(self, **body: Any) -> pb.RankEvent:
        """What the orchestrator is told of it: a field of `RankEvent`, by name."""
        command = self.command
        return pb.RankEvent(session=command.session, epoch=command.epoch, rank=command.rank, **body)
