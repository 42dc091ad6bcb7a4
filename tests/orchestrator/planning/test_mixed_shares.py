"""The planner where ranks hold the model in different encodings, on devices of different speed and memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from motley.orchestrator.planning.cutting.shares import Candidate, PlanError, RankPlan, _Costs, plan_shares
from motley.protocol.mesh_pb2 import ModelProfile

GB = 10**9
KINDS = ("attention", "mlp", "vocabulary")
Case = tuple[list[ModelProfile], list[Candidate], int]

sizes = st.tuples(st.integers(1, 3000), st.integers(0, 1000), st.integers(1, 500), st.integers(1, 500))
"""Of a query group, a key and value group, a unit of the MLP and one of the vocabulary."""


def held(units: ModelProfile, query: int, key_value: int, mlp: int, vocabulary: int) -> ModelProfile:
    """A model of the same units in an encoding of these sizes."""
    profile = ModelProfile()
    profile.CopyFrom(units)
    profile.attention_query_bytes, profile.attention_kv_bytes = query, key_value
    profile.mlp_unit_bytes, profile.vocabulary_unit_bytes = mlp, vocabulary
    return profile


@st.composite
def encodings(draw: st.DrawFn) -> list[ModelProfile]:
    """A model of one to three encodings, whose sizes need not be in proportion; one for each of some ranks."""
    units = ModelProfile(
        name="model",
        kv_groups=draw(st.integers(1, 9)),
        attention_splits=draw(st.sampled_from([[1], [1, 2], [1, 2, 4], [1, 3]])),
        mlp_units=draw(st.integers(1, 60)),
        vocabulary_units=draw(st.integers(1, 60)),
        cache_bytes_per_token=draw(st.integers(0, 20)),
        fixed_bytes=draw(st.integers(0, 1000)),
    )
    known = [held(units, *own) for own in draw(st.lists(sizes, min_size=1, max_size=3))]
    return draw(st.lists(st.sampled_from(known), min_size=1, max_size=8))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """With memory around what each rank would need for an equal part."""
    profiles, context = draw(encodings()), draw(st.integers(1, 300))
    offers = []
    for rank, profile in enumerate(profiles):
        (whole,) = plan_shares([profile], [Candidate("node", 1.0, GB)], context)
        fair = (whole.memory_bytes - profile.fixed_bytes) / len(profiles)
        speed = draw(st.floats(0.5, 100) if rank == 0 else st.floats(0.5, 100) | st.just(0.0))
        offers.append(Candidate(f"node {rank}", speed, profile.fixed_bytes + int(fair * draw(st.floats(0, 4)))))
    return profiles, offers, context


def assert_tiles(profile: ModelProfile, plans: list[RankPlan]) -> None:
    split = plans[0].attention_split
    for kind, total in zip(
        KINDS, (profile.kv_groups * split, profile.mlp_units, profile.vocabulary_units), strict=True
    ):
        ranges = [getattr(plan, kind) for plan in plans]
        assert (ranges[0].start, ranges[-1].stop) == (0, total)
        assert all(one.stop == other.start for one, other in pairwise(ranges))


@given(cases())
def test_any_plan_tiles_and_fits_every_rank_in_its_own_bytes(case: Case) -> None:
    profiles, offers, context = case
    try:
        plans = plan_shares(*case)
    except PlanError as error:
        event("does not fit")
        refusal = str(error)
        assert all(f"  {offer.name}: " in refusal for offer in offers)
        assert refusal.count(" available, ") == refusal.count(" needed") == len(offers)
        return
    assert_tiles(profiles[0], plans)
    for profile, plan, offer in zip(profiles, plans, offers, strict=True):
        costs = _Costs(profile, plan.attention_split, context)
        fill = len(plan.mlp) * profile.mlp_unit_bytes + len(plan.vocabulary) * profile.vocabulary_unit_bytes
        assert plan.memory_bytes == profile.fixed_bytes + costs.attention_memory(plan.attention) + fill
        assert plan.memory_bytes <= offer.memory
        assert offer.speed or not plan.weight_bytes


@given(cases(), st.data())
def test_more_memory_never_makes_a_plan_impossible(case: Case, data: st.DataObject) -> None:
    profiles, offers, context = case
    try:
        plan_shares(*case)
    except PlanError:
        return
    more = [Candidate(offer.name, offer.speed, offer.memory + data.draw(st.integers(0, 3000))) for offer in offers]
    assert_tiles(profiles[0], plan_shares(profiles, more, context))


@given(encodings(), st.data())
def test_without_memory_limits_every_kind_takes_all_ranks_as_long(
    profiles: list[ModelProfile], data: st.DataObject
) -> None:
    """Units go by bytes of the rank's encoding over bandwidth of its device, to the unit."""
    speeds = [data.draw(st.floats(0.1, 100)) for _ in profiles]
    plans = plan_shares(profiles, [Candidate("node", speed, GB) for speed in speeds], 1)
    split = plans[0].attention_split
    for kind in KINDS:
        each = [
            {
                "attention": _Costs(profile, split, 1).attention_bytes(range(profile.kv_groups * split)),
                "mlp": profile.mlp_unit_bytes,
                "vocabulary": profile.vocabulary_unit_bytes,
            }[kind]
            for profile in profiles
        ]
        rates = [speed / size for speed, size in zip(speeds, each, strict=True)]
        counts = [len(getattr(plan, kind)) for plan in plans]
        for count, rate in zip(counts, rates, strict=True):
            assert abs(count - sum(counts) * rate / sum(rates)) < 1 + 1e-9


@given(encodings(), st.data())
def test_shares_by_hand_are_of_the_model_whatever_it_takes(profiles: list[ModelProfile], data: st.DataObject) -> None:
    shares = [data.draw(st.floats(0.1, 100)) for _ in profiles]
    plans = plan_shares(profiles, [Candidate("node", 1e9, GB, share) for share in shares], 1)
    for kind in KINDS:
        counts = [len(getattr(plan, kind)) for plan in plans]
        for count, share in zip(counts, shares, strict=True):
            assert abs(count - sum(counts) * share / sum(shares)) < 1 + 1e-9


def seven(scale: int) -> ModelProfile:
    """7 billion parameters at so many quarters of a byte each, in whole units that are small."""
    return ModelProfile(
        name="seven",
        kv_groups=8,
        attention_splits=[1, 2, 4],
        mlp_units=448,
        vocabulary_units=250,
        attention_query_bytes=40_000_000 * scale,
        attention_kv_bytes=10_000_000 * scale,
        mlp_unit_bytes=3_000_000 * scale,
        vocabulary_unit_bytes=150_000 * scale,
        cache_bytes_per_token=2 * 128 * 4 * 32,
        fixed_bytes=300_000_000,
    )


def test_a_gpu_in_fp16_beside_a_cpu_in_int4() -> None:
    """Ten times the bandwidth, four times the bytes: 10/4 of the work, until its memory is full."""
    profiles = [seven(8), seven(2)]
    gpu, cpu = plan_shares(profiles, [Candidate("gpu", 400e9, 24 * GB), Candidate("cpu", 40e9, 32 * GB)], 4096)
    assert len(gpu.mlp) / len(cpu.mlp) == pytest.approx(2.5, rel=0.02)
    assert gpu.weight_bytes / cpu.weight_bytes == pytest.approx(10, rel=0.1)
    gpu, cpu = plan_shares(profiles, [Candidate("gpu", 400e9, 4 * GB), Candidate("cpu", 40e9, 32 * GB)], 4096)
    assert 3.9 * GB < gpu.memory_bytes <= 4 * GB
    assert len(gpu.mlp) < len(cpu.mlp)


def test_what_does_not_fit_is_told_in_each_ones_bytes() -> None:
    offers = [Candidate("gpu", 400e9, GB), Candidate("cpu", 40e9, 2 * GB)]
    with pytest.raises(PlanError) as caught:
        plan_shares([seven(8), seven(2)], offers, 1)
    message = str(caught.value)
    assert "does not fit: 6.75 GB are missing in total (as gpu would hold it)" in message
    assert "gpu: 1.00 GB available, 10.48 GB needed, 9.48 GB missing" in message
    assert "cpu: 2.00 GB available, 1.32 GB needed" in message
