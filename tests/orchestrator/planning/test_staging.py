"""Which stages nodes form, and of how many layers: against brute force, within everyone's memory, and soon."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterator
from itertools import accumulate, combinations, permutations, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.daemon.models.cutting.profile import profile as profile_of
from motley.orchestrator.known_models.shapes import SHAPES
from motley.orchestrator.planning.choosing.arrangement import Groups
from motley.orchestrator.planning.choosing.choice import Chooser
from motley.orchestrator.planning.choosing.stages import layer_runs, plans_of_stage, stage_profile
from motley.orchestrator.planning.choosing.staging import spread
from motley.orchestrator.planning.cost import Workload, forecast
from motley.orchestrator.planning.cutting.quickest import quickest_shares
from motley.orchestrator.planning.cutting.shares import Candidate, PlanError, RankPlan
from motley.protocol.mesh_pb2 import LayerCosts, ModelProfile
from motley.transport.schedules.forecast import Network
from tests.models.configs import read
from tests.orchestrator.planning.seven import layered, seven_billion
from tests.orchestrator.planning.test_choice import GB, ROOMY, drawn, network, node


def seven(count: int) -> list[ModelProfile]:
    return [layered(seven_billion())] * count


def in_runs(profile: ModelProfile, begins: Collection[int]) -> ModelProfile:
    """A model of layers that are alike, but that all follow those that are in `begins`, which has 0."""
    each = profile.layer_costs.pop()
    for layer in range(profile.layers):
        each.layers, each.follows = 1, layer not in begins
        profile.layer_costs.append(each)
    return profile


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=4),
    st.integers(1, 4),
)
@settings(deadline=None)
def test_layers_are_spread_as_best_as_can_be(layers: int, stages: list[tuple[int, int, int]], waves: int) -> None:
    each, besides, most = ([float(own[at]) for own in stages] for at in range(3))
    caps = [int(cap) for cap in most]

    def taken(given: tuple[int, ...]) -> float:
        seconds = [count * one + other for count, one, other in zip(given, each, besides, strict=True)]
        return max(sum(seconds), waves * max(seconds))

    ways = [given for given in product(*(range(1, cap + 1) for cap in caps)) if sum(given) == layers]
    found = spread(layers, each, besides, caps, waves)
    assert (found is None) == (not ways)
    if found is not None:
        assert tuple(found) in ways
        assert taken(tuple(found)) == pytest.approx(min(map(taken, ways)))


def test_what_a_stage_costs() -> None:
    profile = seven_billion()
    profile.layer_costs.append(LayerCosts(layers=30, attention_query_bytes=10, cache_bytes_per_token=3, fixed_bytes=7))
    profile.layer_costs.append(LayerCosts(layers=2, attention_query_bytes=100, mlp_unit_bytes=5))
    assert stage_profile(profile, range(32)) == profile
    first, last = stage_profile(profile, range(29)), stage_profile(profile, range(29, 32))
    assert (first.layers, first.attention_query_bytes, first.cache_bytes_per_token) == (29, 290, 87)
    assert (last.layers, last.attention_query_bytes, last.cache_bytes_per_token) == (3, 210, 3)
    assert (first.mlp_unit_bytes, last.mlp_unit_bytes) == (0, 10)
    assert (first.vocabulary_units, last.vocabulary_units) == (0, profile.vocabulary_units)
    assert first.fixed_bytes - last.fixed_bytes == 28 * 7
    assert first.mlp_units == profile.mlp_units


def test_layers_that_follow_another_are_in_a_run_with_it() -> None:
    assert layer_runs(seven(1)[0]) == [range(layer, layer + 1) for layer in range(32)]
    profile = seven_billion()
    for layers, follows in ((2, False), (3, True), (1, False), (26, True)):
        profile.layer_costs.append(LayerCosts(layers=layers, follows=follows))
    assert layer_runs(profile) == [range(1), range(1, 5), range(5, 32)]


def partitions(members: list[int]) -> Iterator[Groups]:
    """Every way to put all of some numbers in groups, one after another."""
    for row in permutations(members):
        for cuts in range(1 << (len(row) - 1)):
            ends = [at + 1 for at in range(len(row) - 1) if cuts >> at & 1]
            groups = tuple(row[one:other] for one, other in zip([0, *ends], [*ends, len(row)], strict=True))
            if all(list(group) == sorted(group) for group in groups):
                yield groups


def by_brute_force(chooser: Chooser) -> float:
    """Seconds of a token in the best of all stages, with the best of all ways to spread layers; infinite: none fits."""
    best, layers, work = float("inf"), chooser.profiles[0].layers, chooser.work
    everybody, begins = range(len(chooser.candidates)), {run.start for run in layer_runs(chooser.profiles[0])}
    for members in (own for size in range(1, len(everybody) + 1) for own in combinations(everybody, size)):
        for groups in partitions(list(members)):
            waves = min(len(groups), work.rows)
            own_work = Workload(-(-work.rows // waves), work.position, work.prompt, work.wire)
            for counts in product(range(1, layers + 1), repeat=len(groups)):
                if sum(counts) != layers or not begins.issuperset(accumulate(counts[:-1])):
                    continue
                plans: list[RankPlan] = []
                try:
                    for at, group in enumerate(groups):
                        own = range(sum(counts[:at]), sum(counts[: at + 1]))
                        candidates = [chooser.candidates[number] for number in group]
                        plans += plans_of_stage(
                            [chooser.profiles[number] for number in group],
                            own,
                            lambda each: quickest_shares(each, candidates, chooser.cache_tokens, own_work),  # noqa: B023
                        )
                except PlanError:
                    continue
                row = [number for group in groups for number in group]
                there = chooser.network.among(row)
                profiles = [chooser.profiles[number] for number in row]
                offers = [chooser.candidates[number] for number in row]
                best = min(best, forecast(profiles, offers, plans, there, work).token_s)
    return best


@st.composite
def meshes(draw: st.DrawFn) -> Chooser:
    count = draw(st.integers(2, 3))
    profile = layered(
        ModelProfile(
            name="small",
            layers=draw(st.integers(2, 6)),
            hidden=512,
            kv_groups=2,
            attention_splits=[1],
            mlp_units=4,
            vocabulary_units=2,
            attention_query_bytes=draw(st.integers(1, 40)) * 120_000,
            mlp_unit_bytes=draw(st.integers(1, 40)) * 120_000,
            vocabulary_unit_bytes=draw(st.integers(1, 20)) * 100_000,
            cache_bytes_per_token=1200,
            fixed_bytes=1_000_000,
            context_length=4096,
        )
    )
    if draw(st.booleans()):
        in_runs(profile, {0, *draw(st.sets(st.integers(1, 5)))})
    tight = draw(st.booleans())
    candidates = [
        Candidate(
            f"n{number}",
            draw(st.integers(1, 20)) * 1e9,
            draw(st.integers(1, 30)) * 1_000_000 if tight else ROOMY,
            row_speed=draw(st.sampled_from([0.0, 4e9, 4e10])),
            call_s=draw(st.sampled_from([0.0, 3e-6])),
        )
        for number in range(count)
    ]
    latency = [[0.0] * count for _ in range(count)]
    for one, other in combinations(range(count), 2):
        latency[one][other] = latency[other][one] = draw(st.sampled_from([1e-5, 1e-4, 1e-3, 5e-3]))
    wires = Network(latency, [[1e8] * count for _ in range(count)])
    return Chooser([profile] * count, candidates, 100, wires, Workload(rows=draw(st.sampled_from([1, 2, 8]))))


@given(meshes())
@settings(deadline=None, max_examples=25)
def test_the_best_stages_are_found(chooser: Chooser) -> None:
    best = by_brute_force(chooser)
    try:
        found = chooser.best()
    except PlanError:
        assert best == float("inf")
        return
    assert best <= found.forecast.token_s * (1 + 1e-9)
    assert found.forecast.token_s <= 1.02 * best
    for number, plan in zip(found.members, found.plans, strict=True):
        assert plan.memory_bytes <= chooser.candidates[number].memory


def test_slow_links_are_between_stages() -> None:
    """Two pairs of machines, each on a switch, and a radio between; memory wants all four."""
    near, far = 1e-4, 4e-3
    latency = [
        [0.0 if one == other else near if one // 2 == other // 2 else far for other in range(4)] for one in range(4)
    ]
    candidates = [node(number, 40e9, 2 * GB) for number in range(4)]
    links = Network(latency, [[1.2e8] * 4 for _ in range(4)])
    chooser = Chooser(seven(4), candidates, 4096, links)
    best = chooser.best()
    assert (best.kind, best.arrangement) == ("mixed", ((0, 1), (2, 3)))
    assert [plan.layers for plan in best.plans] == [range(best.plans[0].layers.stop)] * 2 + [best.plans[2].layers] * 2
    assert sum(len(plan.vocabulary) for plan in best.plans[:2]) == 0
    everybody = Chooser(seven(4), candidates, 4096, links, stages=1).best()
    assert everybody.kind == "tensor"
    assert everybody.forecast.token_s > 2 * best.forecast.token_s
    assert "tensor" in [other.kind for other in chooser.others(best, 10)]


def test_stages_as_they_are_asked_for() -> None:
    candidates = [node(0, 20e9), node(1, 40e9), node(2, 30e9)]
    for rows in (1, 8):
        asked = Chooser(seven(3), candidates, 512, network(3), Workload(rows=rows), stages=3).best()
        assert (asked.kind, len(asked.members)) == ("pipeline", 3)
    own = Chooser(seven(3), candidates, 512, network(3), required=(0, 1, 2), stages=(1, 2)).best()
    assert (own.arrangement, own.members) == (((0,), (1, 2)), (0, 1, 2))
    led = Chooser(seven(3), candidates, 512, network(3), required=(0,), stages=2).best()
    assert led.members[0] == 0
    with pytest.raises(PlanError, match="does not fit in 4 stages"):
        Chooser(seven(3), candidates, 512, network(3), stages=4).best()
    unknown = seven_billion()
    with pytest.raises(PlanError, match="does not fit in 2 stages"):
        Chooser([unknown] * 3, candidates, 512, network(3), stages=2).best()


@given(
    st.sets(st.integers(1, 31)),
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 25)), min_size=2, max_size=3),
    st.integers(0, 3),
    st.sampled_from([1, 8]),
)
@settings(deadline=None)
def test_no_stage_begins_with_a_layer_that_follows_another(
    begins: set[int], offers: list[tuple[int, int]], stages: int, rows: int
) -> None:
    """However little room there is."""
    profile = in_runs(layered(seven_billion()), {0, *begins})
    nodes = [node(at, speed * 10e9, memory * GB // 5) for at, (speed, memory) in enumerate(offers)]
    chooser = Chooser([profile] * len(nodes), nodes, 512, network(len(nodes), 4e-3), Workload(rows=rows), stages=stages)
    try:
        best = chooser.best()
    except PlanError:
        return
    cuts = list(dict.fromkeys(plan.layers or range(profile.layers) for plan in best.plans))
    assert [layer for layers in cuts for layer in layers] == [*range(profile.layers)]
    assert {0, *begins}.issuperset(layers.start for layers in cuts)
    assert stages in (0, len(cuts))
    for number, plan in zip(best.members, best.plans, strict=True):
        assert plan.memory_bytes <= nodes[number].memory


def test_as_many_stages_as_there_are_runs_and_no_more() -> None:
    nodes = [node(0, 20e9), node(1, 40e9), node(2, 30e9)]
    for begins in ({0, 5, 9}, {0, 1, 5, 6, 9}, {0, 30, 31}):
        profile = in_runs(layered(seven_billion()), begins)
        best = Chooser([profile] * 3, nodes, 512, network(3), stages=3).best()
        assert len({plan.layers for plan in best.plans}) == 3
        assert begins.issuperset(plan.layers.start for plan in best.plans if plan.layers)
    with pytest.raises(PlanError, match="does not fit in 3 stages"):
        Chooser([in_runs(layered(seven_billion()), {0, 16})] * 3, nodes, 512, network(3), stages=3).best()


def test_a_stage_with_little_room_has_few_runs() -> None:
    """The quick machine would take nearly all layers; it has room for eleven, so it takes two runs of four."""
    profile = in_runs(layered(seven_billion()), range(0, 32, 4))
    nodes = [node(0, 40e9, 9 * GB // 5), node(1, 20e9)]
    best = Chooser([profile] * 2, nodes, 512, network(2, 4e-3), stages=2).best()
    assert {number: len(plan.layers or ()) for number, plan in zip(best.members, best.plans, strict=True)} == {
        0: 8,
        1: 24,
    }


def test_hy4_whose_layers_share_indexers_is_in_stages_if_it_fits(tmp_path: Path) -> None:
    told = profile_of(read(tmp_path, SHAPES["hy4-preview"]), "int4", 32)
    assert [len(run) for run in layer_runs(told)] == [1, *[4] * 19, 1]

    def chooser(*memory: int) -> Chooser:
        nodes = [node(at, 100e9, own * GB) for at, own in enumerate(memory)]
        return Chooser([told] * 3, nodes, 4096, network(3, 4e-3))

    assert sorted(len(plan.layers or ()) for plan in chooser(210, 170, 130).best().plans) == [20, 25, 33]
    with pytest.raises(PlanError, match="does not fit"):
        chooser(200, 160, 120).best()


def test_all_residual_streams_go_from_stage_to_stage() -> None:
    candidates, links = [node(0, 20e9), node(1, 40e9)], network(2)
    one = Chooser(seven(2), candidates, 512, links, stages=2).best()
    profiles = seven(2)
    for profile in profiles:
        profile.further_streams = 3
    four = forecast(profiles, candidates, one.plans, links, Workload())
    assert four.token_s - one.forecast.token_s == pytest.approx(3 * 4 * profiles[0].hidden / 1.2e8)


@pytest.mark.parametrize("count", [4, 7])
def test_nodes_that_are_named_keep_their_order(count: int) -> None:
    candidates = [node(number, (1 + number * 5 % 7) * 10e9) for number in range(count)]
    asked = Chooser(seven(count), candidates, 512, network(count, 4e-3), required=range(count), stages=2).best()
    assert (asked.members, len(asked.arrangement)) == (tuple(range(count)), 2)
    free = Chooser(seven(count), candidates, 512, network(count, 4e-3), stages=2).best()
    assert free.forecast.token_s <= asked.forecast.token_s


def test_requests_at_a_time_are_balanced_over_stages() -> None:
    """One wave has the quicker machine take nearly all; as many waves as stages have both take as long."""
    candidates = [node(0, 20e9), node(1, 40e9)]
    alone = Chooser(seven(2), candidates, 512, network(2, 5e-3), stages=2).best()
    assert sorted(len(plan.layers or ()) for plan in alone.plans) == [1, 31]
    both = Chooser(seven(2), candidates, 512, network(2, 5e-3), Workload(rows=8), stages=2).best()
    first, second = both.plans
    assert 18 <= max(len(first.layers or ()), len(second.layers or ())) <= 24


@pytest.mark.parametrize(("count", "within_s"), [(8, 0.4), (64, 2.5)])
def test_the_choice_is_soon(count: int, within_s: float) -> None:
    chooser = drawn(random.Random(count), count)
    chooser.profiles = seven(count)
    began = time.process_time()
    assert chooser.best().members
    assert time.process_time() - began < within_s
