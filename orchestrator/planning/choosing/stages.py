"""Stages: some layers of a model, cut for some ranks as a whole model is. Pure.

What a stage costs is told as a model's profile, so that everything that gives a model's units to ranks, and says how
long these take, does it for the layers of a stage as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise

from motley.orchestrator.planning.cutting.shares import RankPlan
from motley.protocol.mesh_pb2 import LayerCosts, ModelProfile


def can_be_staged(profile: ModelProfile) -> bool:
    """Whether it is known what each layer costs."""
    return bool(profile.layer_costs)


def stage_profile(profile: ModelProfile, layers: range) -> ModelProfile:
    """What some layers of a model cost, and the head if the last one is among them.

    Args:
        profile: of the whole model, with the costs of its layers.
    """
    if layers == range(profile.layers):
        return profile
    whole, own = _summed(profile, range(profile.layers)), _summed(profile, layers)
    stage = ModelProfile()
    stage.CopyFrom(profile)
    stage.layers = len(layers)
    stage.attention_query_bytes = own.attention_query_bytes
    stage.attention_kv_bytes = own.attention_kv_bytes
    stage.mlp_unit_bytes = own.mlp_unit_bytes
    stage.cache_bytes_per_token = own.cache_bytes_per_token
    stage.windowed_bytes_per_token = own.windowed_bytes_per_token
    stage.state_bytes = own.state_bytes
    stage.shared_kv_bytes = own.shared_kv_bytes
    stage.shared_cache_bytes_per_token = own.shared_cache_bytes_per_token
    stage.trunk_mlp_unit_bytes = own.trunk_mlp_unit_bytes
    stage.fixed_bytes = max(0, profile.fixed_bytes - whole.fixed_bytes) + own.fixed_bytes
    if layers.stop < profile.layers:
        stage.vocabulary_units = 0
    return stage


def layer_runs(profile: ModelProfile) -> list[range]:
    """The layers in runs that no stage may have a part of: each begins with a layer that needs nothing of those before
    it but a residual, and has the layers that follow that one."""
    begins, end = {0}, 0
    for costs in profile.layer_costs:
        begins.update(() if costs.follows else range(end, end + costs.layers))
        end += costs.layers
    return [range(*bounds) for bounds in pairwise([*sorted(begins), end])]


def own_profile(profile: ModelProfile, plan: RankPlan) -> ModelProfile:
    """What the layers cost that a rank has a share of."""
    return stage_profile(profile, plan.layers) if plan.layers else profile


def ranks_by_stage(plans: Sequence[RankPlan]) -> list[range]:
    """The ranks of every stage, in order, of ranks with such shares."""
    counts = [len([*alike]) for _, alike in groupby(plan.layers for plan in plans)]
    return [range(*bounds) for bounds in pairwise(accumulate(counts, initial=0))]


def plans_of_stage(
    profiles: Sequence[ModelProfile],
    layers: range,
    plan: Callable[[Sequence[ModelProfile]], list[RankPlan]],
) -> list[RankPlan]:
    """The shares of a stage's ranks.

    Args:
        profiles: of the whole model, as each of these ranks would hold it.
        layers: of the stage.
        plan: gives ranks their shares of a model with such profiles.

    Raises:
        PlanError: as `plan`.
    """
    plans = plan([stage_profile(profile, layers) for profile in profiles])
    return plans if layers == range(profiles[0].layers) else [replace(own, layers=layers) for own in plans]


def _summed(profile: ModelProfile, layers: range) -> LayerCosts:
    """What some layers cost together."""
    total = LayerCosts()
    begin = 0
    for costs in profile.layer_costs:
        end = begin + costs.layers
        count = max(0, min(end, layers.stop) - max(begin, layers.start))
        for field, value in costs.ListFields():
            if field.name == "follows":
                continue
            setattr(total, field.name, getattr(total, field.name) + count * value)
        begin = end
    return total
