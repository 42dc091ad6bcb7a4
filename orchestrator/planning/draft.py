"""A draft model beside rank 0: what it holds, and what it takes of that rank's node. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from motley.orchestrator.planning.caches import Blocks, Caches, with_tables
from motley.orchestrator.planning.cutting.shares import Candidate, RankPlan, plan_shares
from motley.orchestrator.planning.setup import Setup
from motley.protocol.mesh_pb2 import Assignment, Loan, ModelProfile, ModelSpec


@dataclass(frozen=True)
class Draft:
    """A model that guesses tokens on rank 0, planned as the only rank of a session of its own.

    Attributes:
        spec: the model.
        profile: what it costs.
        setup: its engine, and whether that computes on the GPU.
        plan: all of it as one rank's share.
        context: the longest text that it can go on with, in tokens.
        blocks: of its caches: they have room for as many tokens as those of the session.
        loan: where it is read, if its node has no files of it.
    """

    spec: ModelSpec
    profile: ModelProfile
    setup: Setup
    plan: RankPlan
    context: int
    blocks: Blocks
    loan: Loan | None = field(default=None, repr=False)

    @property
    def host_bytes(self) -> int:
        """Bytes that it takes of its node's own memory."""
        return self.plan.fixed_bytes if self.setup.on_gpu else self.plan.memory_bytes

    @property
    def gpu_bytes(self) -> int:
        """Bytes that it takes of its node's GPU."""
        return self.plan.memory_bytes if self.setup.on_gpu else 0

    def assignment(self) -> Assignment:
        """What rank 0 is told of it, but for what it has in common with the session."""
        return Assignment(
            model=self.spec,
            fingerprint=self.profile.fingerprint,
            size=1,
            shares=[self.plan.to_share()],
            context=self.context,
            engine=self.setup.engine,
            cache_blocks=self.blocks.count,
            cache_block_tokens=self.blocks.tokens,
            loan=self.loan,
        )


def plan_draft(spec: ModelSpec, profile: ModelProfile, setup: Setup, caches: Caches) -> Draft:
    """Plan a draft model for a session with such caches."""
    context = min(caches.context, profile.context_length)
    blocks = Caches(context, max(context, caches.tokens)).blocks(setup.has_whole_caches)
    plenty = Candidate("", speed=1.0, memory=1 << 62)  # whether its node has it is seen when the ranks are planned
    (plan,) = plan_shares([with_tables(profile, context)], [plenty], blocks.room)
    return Draft(spec, profile, setup, plan, context, blocks)
