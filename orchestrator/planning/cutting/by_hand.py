"""Shares given by hand: kept to the unit, or refused with the nearest ones that fit. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from motley.orchestrator.planning.cutting.shares import Candidate, PlanError, RankPlan, plan_shares
from motley.protocol.mesh_pb2 import ModelProfile
from motley.protocol.wording import human_bytes

BOUNDLESS = 1 << 60
"""Bytes: more than any model needs."""
STEPS = 50
"""Shares that might fit are looked for in so many steps, from those that are wanted to those that memory is in."""


def keep_shares(profiles: Sequence[ModelProfile], candidates: Sequence[Candidate], cache_tokens: int) -> list[RankPlan]:
    """Give every candidate, in rank order, the share of the model that it was given by hand, in whole units.

    Args:
        profiles: of the model as each candidate would hold it; their units are the same.
        candidates: at least one, each with a share; at least one takes part.
        cache_tokens: that the KV caches have room for, on every rank.

    Raises:
        PlanError: somebody has no room for its share; the message says who, and which shares would do.
    """
    wanted = [candidate.share or 0.0 for candidate in candidates]
    plans = _plan(profiles, candidates, cache_tokens, wanted)
    if _fits(plans, candidates):
        return plans
    plan_shares(profiles, candidates, cache_tokens)  # raises, where it does not fit in any shares
    lines = [f"{profiles[0].name} with caches of {cache_tokens} tokens does not fit in shares {_told(wanted)}:"]
    for candidate, plan in zip(candidates, plans, strict=True):
        missing = plan.memory_bytes - candidate.memory
        lines.append(
            f"  {candidate.name}: {human_bytes(candidate.memory)} available, {human_bytes(plan.memory_bytes)} needed"
            + (f", {human_bytes(missing)} missing" if missing > 0 else "")
        )
    nearest = _nearest(profiles, candidates, cache_tokens, wanted)
    lines.append(f"The nearest that fit: `--shares {_told(nearest)}`." if nearest else "Leave the shares out.")
    raise PlanError("\n".join(lines))


def _plan(
    profiles: Sequence[ModelProfile], candidates: Sequence[Candidate], cache_tokens: int, shares: Sequence[float]
) -> list[RankPlan]:
    """What everyone would get, whatever memory there is."""
    boundless = [
        replace(candidate, share=share, memory=BOUNDLESS) for candidate, share in zip(candidates, shares, strict=True)
    ]
    return plan_shares(profiles, boundless, cache_tokens)


def _fits(plans: Sequence[RankPlan], candidates: Sequence[Candidate]) -> bool:
    return all(plan.memory_bytes <= offer.memory for plan, offer in zip(plans, candidates, strict=True))


def _nearest(
    profiles: Sequence[ModelProfile], candidates: Sequence[Candidate], cache_tokens: int, wanted: Sequence[float]
) -> list[float]:
    """Whole shares of a hundred that fit, the nearest to `wanted` on the way to shares by memory; empty: none do."""
    room = [
        max(0, candidate.memory - profile.fixed_bytes) if share else 0
        for candidate, profile, share in zip(candidates, profiles, wanted, strict=True)
    ]
    whole, roomy = math.fsum(wanted), sum(room)
    for step in range(1, STEPS + 1):
        part = step / STEPS
        shares = [
            float(round(100 * ((1 - part) * share / whole + part * free / roomy)))
            for share, free in zip(wanted, room, strict=True)
        ]
        if any(shares) and _fits(_plan(profiles, candidates, cache_tokens, shares), candidates):
            return shares
    return []


def _told(shares: Sequence[float]) -> str:
    return ",".join(f"{share:g}" for share in shares)
