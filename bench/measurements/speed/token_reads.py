"""What the ranks of a session read of their memory to compute one token: what bounds its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from motley.orchestrator.planning.choosing.stages import own_profile
from motley.orchestrator.planning.cutting.shares import RankPlan, cached_bytes
from motley.protocol.mesh_pb2 import ModelProfile


@dataclass(frozen=True)
class TokenReads:
    """Bytes of all ranks together.

    Attributes:
        weights: of all matrices but the experts that the token has not chosen, and the embedding tables, of which it
            reads a row.
        caches: the keys and values of the tokens before.
        states: of recurrent layers; each is read and written, and counts twice.
    """

    weights: float
    caches: float
    states: float

    @property
    def whole(self) -> float:
        """All of it."""
        return self.weights + self.caches + self.states


def token_reads(profile: ModelProfile, plans: Sequence[RankPlan], share_bytes: int, position: float) -> TokenReads:
    """What a token reads.

    Args:
        profile: of the model, all of whose experts the ranks hold.
        plans: of the ranks.
        share_bytes: of the weights of all ranks.
        position: tokens that the sequence has already.
    """
    unread = profile.expert_count - profile.experts_per_token
    weights = share_bytes - len(profile.expert_layers) * unread * profile.expert_weight_bytes
    caches = states = 0.0
    for plan in plans:
        own = own_profile(profile, plan)
        cached = cached_bytes(own, plan.attention, plan.attention_split)
        everywhere = cached_bytes(own, plan.attention, plan.attention_split, without_windows=True)
        caches += everywhere * position + (cached - everywhere) * min(position, own.window or position)
        states += 2 * own.state_bytes * len(plan.attention) / plan.attention_split
    return TokenReads(weights, caches, states)
