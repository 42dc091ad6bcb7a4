"""The planner: shares tile, fit, follow speed, and more memory never hurts."""

from __future__ import annotations

import re
import time
from itertools import pairwise

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from motley.daemon.models.cutting.share import kv_heads
from motley.daemon.models.description.axes import Heads
from motley.orchestrator.planning.cutting.shares import (
    Candidate,
    PlanError,
    RankPlan,
    _Costs,
    trunk_profile,
    usable,
)
from motley.orchestrator.planning.cutting.shares import plan_shares as plan_unlike
from motley.protocol.mesh_pb2 import ModelProfile
from tests.orchestrator.planning.seven import seven_billion

GB = 10**9


def plan_shares(profile: ModelProfile, candidates: list[Candidate], context: int) -> list[RankPlan]:
    """Where all hold the model alike."""
    return plan_unlike([profile] * len(candidates), candidates, context)


def bytes_of(plans: list[RankPlan]) -> list[int]:
    return [plan.weight_bytes for plan in plans]


def assert_tiles(profile: ModelProfile, plans: list[RankPlan]) -> None:
    split = plans[0].attention_split
    assert split in profile.attention_splits
    for kind, total in (
        ("attention", profile.kv_groups * split),
        ("mlp", profile.mlp_units),
        ("vocabulary", profile.vocabulary_units),
    ):
        ranges = [getattr(plan, kind) for plan in plans]
        assert ranges[0].start == 0
        assert ranges[-1].stop == total
        assert all(one.stop == other.start for one, other in pairwise(ranges))
        assert all(own.start <= own.stop for own in ranges)


profiles = st.builds(
    ModelProfile,
    name=st.just("model"),
    kv_groups=st.integers(1, 9),
    attention_splits=st.sampled_from([[1], [1, 2], [1, 2, 4], [1, 3], [1, 7]]),
    mlp_units=st.integers(1, 60),
    vocabulary_units=st.integers(1, 60),
    attention_query_bytes=st.integers(1, 3000),
    attention_kv_bytes=st.integers(0, 1000),
    mlp_unit_bytes=st.integers(1, 500),
    vocabulary_unit_bytes=st.integers(1, 500),
    cache_bytes_per_token=st.integers(0, 20),
    fixed_bytes=st.integers(0, 1000),
    context_length=st.just(4096),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelProfile, list[Candidate], int]:
    """A model, 1 to 16 nodes with memory around what they need, and a context."""
    profile, context = draw(profiles), draw(st.integers(1, 300))
    (whole,) = plan_shares(profile, [Candidate("node", 1.0, 10**9)], context)
    ranks = draw(st.integers(1, 16))
    fair = (whole.memory_bytes - profile.fixed_bytes) / ranks
    offers = [
        Candidate(
            "node",
            draw(st.floats(0.5, 100) if rank == 0 else st.floats(0.5, 100) | st.just(0.0)),
            profile.fixed_bytes + int(fair * draw(st.floats(0, 4))),
        )
        for rank in range(ranks)
    ]
    return profile, offers, context


def feasible(profile: ModelProfile, offers: list[Candidate], context: int) -> bool:
    try:
        plan_shares(profile, offers, context)
    except PlanError:
        return False
    return True


@given(cases())
def test_any_plan_tiles_and_fits(case: tuple[ModelProfile, list[Candidate], int]) -> None:
    profile, offers, _ = case
    try:
        plans = plan_shares(*case)
    except PlanError:
        event("does not fit")
        return
    assert_tiles(profile, plans)
    for plan, offer in zip(plans, offers, strict=True):
        assert profile.fixed_bytes + plan.weight_bytes <= plan.memory_bytes <= offer.memory
        if offer.speed == 0:
            assert plan.weight_bytes == 0


@given(cases(), st.data())
def test_more_memory_never_makes_a_plan_impossible(
    case: tuple[ModelProfile, list[Candidate], int], data: st.DataObject
) -> None:
    profile, offers, context = case
    more = [Candidate(offer.name, offer.speed, offer.memory + data.draw(st.integers(0, 3000))) for offer in offers]
    assert feasible(profile, more, context) or not feasible(profile, offers, context)


@given(cases())
def test_a_node_that_becomes_large_enough_to_take_part_does_not_make_a_plan_impossible(
    case: tuple[ModelProfile, list[Candidate], int],
) -> None:
    profile, offers, context = case
    grown = [*offers, Candidate("grown", 1.0, profile.fixed_bytes)]
    assert feasible(profile, grown, context) or not feasible(profile, offers, context)


@given(profiles, st.integers(1, 300))
def test_one_node_gets_everything_and_needs_not_a_byte_more(profile: ModelProfile, context: int) -> None:
    (plan,) = plan_shares(profile, [Candidate("node", 1.0, 10**9)], context)
    assert_tiles(profile, [plan])
    (exact,) = plan_shares(profile, [Candidate("node", 1.0, plan.memory_bytes)], context)
    assert exact == plan
    with pytest.raises(PlanError):
        plan_shares(profile, [Candidate("node", 1.0, plan.memory_bytes - 1)], context)


@given(profiles, st.lists(st.floats(0.1, 100), min_size=1, max_size=16))
def test_without_memory_limits_every_kind_follows_speed_to_the_unit(profile: ModelProfile, speeds: list[float]) -> None:
    plans = plan_shares(profile, [Candidate("node", speed, 10**9) for speed in speeds], 1)
    for kind in ("attention", "mlp", "vocabulary"):
        counts = [len(getattr(plan, kind)) for plan in plans]
        for count, speed in zip(counts, speeds, strict=True):
            assert abs(count - sum(counts) * speed / sum(speeds)) < 1 + 1e-9


@pytest.mark.parametrize("ranks", range(1, 17))
def test_every_rank_count_gets_a_fair_share_of_a_real_shape(ranks: int) -> None:
    speeds = [10.0 + 7 * rank for rank in range(ranks)]
    plans = plan_shares(seven_billion(), [Candidate("node", speed, 64 * GB) for speed in speeds], 4096)
    assert_tiles(seven_billion(), plans)
    slowest = max(len(plan.mlp) / speed for plan, speed in zip(plans, speeds, strict=True))
    assert slowest <= 1.08 * seven_billion().mlp_units / sum(speeds)


@pytest.mark.parametrize(("ranks", "split"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 4), (32, 4), (40, 4)])
def test_the_attention_split_is_the_smallest_that_gives_every_rank_a_unit(ranks: int, split: int) -> None:
    plans = plan_shares(seven_billion(), [Candidate("node", 1.0, 64 * GB)] * ranks, 4096)
    assert {plan.attention_split for plan in plans} == {split}
    assert sum(len(plan.attention) > 0 for plan in plans) == min(ranks, 8 * split)


def test_explicit_weights_are_followed() -> None:
    plans = plan_shares(seven_billion(), [Candidate("node", weight, 64 * GB) for weight in (3, 2, 1)], 4096)
    whole = sum(bytes_of(plans))
    assert [own / whole for own in bytes_of(plans)] == pytest.approx([3 / 6, 2 / 6, 1 / 6], abs=0.02)


def test_a_small_fast_node_gets_what_fits_and_the_others_the_rest() -> None:
    offers = [Candidate("gpu", 500.0, 2 * GB), Candidate("big", 30.0, 32 * GB), Candidate("mid", 10.0, 8 * GB)]
    plans = plan_shares(seven_billion(), offers, 4096)
    assert 1.8 * GB < plans[0].memory_bytes <= 2 * GB
    assert plans[1].weight_bytes / plans[2].weight_bytes == pytest.approx(3, rel=0.1)


def test_where_memory_binds_the_experts_give_way_and_what_every_token_reads_follows_speed() -> None:
    profile = seven_billion()
    profile.mlp_unit_bytes = 400_000_000  # of many experts; a token reads a few of them
    offers = [Candidate("fast", 30.0, 12 * GB), Candidate("roomy", 10.0, 64 * GB)]
    fast, roomy = plan_shares(profile, offers, 4096)
    assert 11 * GB < fast.memory_bytes <= 12 * GB
    assert len(fast.mlp) < len(roomy.mlp)
    assert (len(fast.attention), len(roomy.attention)) == (6, 2)
    assert len(fast.vocabulary) == pytest.approx(0.75 * profile.vocabulary_units, abs=1)


@pytest.mark.parametrize("dense_bytes", [0, 1_000_000])
def test_the_trunk_is_the_model_without_its_experts(dense_bytes: int) -> None:
    profile = seven_billion()
    profile.trunk_mlp_unit_bytes, profile.trunk_fixed_bytes = dense_bytes, 200_000_000
    trunk = trunk_profile(profile)
    assert profile.mlp_unit_bytes == 30_000_000
    for ranks in (1, 2, 3):
        plans = plan_shares(trunk, [Candidate("node", 1.0, 2 * GB)] * ranks, 64)
        assert_tiles(profile, plans)
        assert all(len(plan.mlp) >= profile.mlp_units // ranks for plan in plans)
    (whole,) = plan_shares(trunk, [Candidate("node", 1.0, 2 * GB)], 64)
    assert whole.weight_bytes == 8 * 105_000_000 + 112 * dense_bytes + 250 * 330_000


def test_attention_goes_where_its_cache_fits() -> None:
    """By speed the first node should hold half of the KV cache, and it has no room for that."""
    profile = seven_billion(context=131072)
    offers = [Candidate("fast", 40.0, 5 * GB), Candidate("roomy", 40.0, 64 * GB)]
    plans = plan_shares(profile, offers, 131072)
    assert plans[0].memory_bytes <= 5 * GB
    assert len(plans[0].attention) <= 1


def test_a_tight_fit_is_found_by_search() -> None:
    """Three attention units: by speed 1 + 2, and the fill only fits beside the one."""
    profile = ModelProfile(
        name="tight",
        kv_groups=3,
        attention_splits=[1],
        mlp_units=10,
        vocabulary_units=1,
        attention_query_bytes=1000,
        mlp_unit_bytes=50,
        vocabulary_unit_bytes=1,
    )
    plans = plan_shares(profile, [Candidate("a", 1.0, 1552), Candidate("b", 2.0, 2100)], 1)
    assert [len(plan.attention) for plan in plans] == [1, 2]
    assert [len(plan.mlp) for plan in plans] == [9, 1]


def test_what_does_not_fit_is_explained_per_node() -> None:
    offers = [Candidate("pc", 30.0, 2 * GB), Candidate("laptop", 10.0, GB)]
    with pytest.raises(PlanError) as caught:
        plan_shares(seven_billion(), offers, 4096)
    message = str(caught.value)
    assert "seven with caches of 4096 tokens does not fit: 2.96 GB are missing in total" in message
    assert "pc: 2.00 GB available, 4.32 GB needed, 2.32 GB missing" in message
    assert "laptop: 1.00 GB available, 1.64 GB needed, 639.06 MB missing" in message


def test_a_node_without_room_for_the_fixed_bytes_is_named() -> None:
    offers = [Candidate("pc", 30.0, 64 * GB), Candidate("toaster", 10.0, 100_000_000)]
    with pytest.raises(PlanError, match=r"toaster: 100\.00 MB available"):
        plan_shares(seven_billion(), offers, 4096)
    assert [offer.name for offer in usable([seven_billion()] * 2, offers)] == ["pc"]


def test_what_is_missing_in_total_is_what_is_missing_on_the_only_node() -> None:
    """One that has not even room for what every rank needs."""
    with pytest.raises(PlanError) as caught:
        plan_shares(seven_billion(), [Candidate("toaster", 10.0, 100_000_000)], 4096)
    total, own = re.findall(r"(\S+ GB) (?:are )?missing", str(caught.value))
    assert total == own


def test_the_search_is_quick_at_its_largest() -> None:
    """It runs on the orchestrator's event loop, which must answer heartbeats."""
    profile = seven_billion()
    profile.kv_groups = 32
    whole = plan_shares(profile, [Candidate("node", 1.0, 10**15)], 4096)[0].memory_bytes
    offers = [Candidate("node", 1.0, whole // 16 + 400_000_000)] * 15 + [Candidate("slow", 1e-3, whole)]
    started = time.thread_time()
    assert_tiles(profile, plan_shares(profile, offers, 4096))
    assert time.thread_time() - started < 2


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.data())
def test_the_planner_and_the_daemon_count_the_same_kv_heads(
    heads_of_a_layer: int, split: int, queries: int, shared_by: int, data: st.DataObject
) -> None:
    """The planner may not import the daemon's definition; it must still plan for what will be stored: of layers with a
    KV head for each group, and of those with one for several."""
    groups = heads_of_a_layer * shared_by
    start = data.draw(st.integers(0, groups * split))
    units = range(start, data.draw(st.integers(start, groups * split)))
    costs = _Costs(ModelProfile(kv_groups=groups, attention_splits=[1, split]), split, 1)
    heads = Heads(groups * split * queries, groups, 64)
    stored = kv_heads(range(units.start * queries, units.stop * queries), heads)
    assert costs.kv_heads(units) == len(stored)
    shared = Heads(groups * split * queries, heads_of_a_layer, 64)
    stored = kv_heads(range(units.start * queries, units.stop * queries), shared)
    assert costs.kv_heads(units, shared_by) == len(stored)
