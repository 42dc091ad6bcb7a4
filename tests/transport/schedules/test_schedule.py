from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.transport.schedules.forecast import FRAME_S, SUM_S, Choice, Crowd, Network, choose, cost
from motley.transport.schedules.progress import NOW, Duty, Progress
from motley.transport.schedules.schedule import (
    ALGORITHMS,
    Algorithm,
    Goal,
    Operation,
    Schedule,
    Transfer,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    build,
    even_parts,
    one_shot,
    reduce_scatter,
    ring,
    tile,
    two_shot,
)

RANKS = st.integers(1, 16)


def uniform(ranks: int, value: float) -> list[list[float]]:
    return [[value] * ranks for _ in range(ranks)]


@st.composite
def goals(draw: st.DrawFn, ranks: st.SearchStrategy[int] = RANKS) -> Goal:
    """Any collective of up to 16 ranks, with unequal and empty parts."""
    size = draw(ranks)
    length = st.integers(0, 40)
    lengths = draw(st.lists(length, min_size=size, max_size=size))
    match draw(st.sampled_from(Operation)):
        case Operation.ALL_REDUCE:
            return all_reduce(draw(length), size)
        case Operation.REDUCE_SCATTER:
            return reduce_scatter(lengths)
        case Operation.ALL_GATHER:
            return all_gather(lengths)
        case Operation.BROADCAST:
            return broadcast(draw(length), size, draw(st.integers(0, size - 1)))
        case Operation.ALL_TO_ALL:
            return all_to_all([[(a * b + b) % 4 for b in lengths] for a in range(size)])


@st.composite
def schedules(draw: st.DrawFn, ranks: st.SearchStrategy[int] = RANKS) -> Schedule:
    """Any algorithm for any goal, in segments of any size; two-shot with unequal and empty parts."""
    goal = draw(goals(ranks))
    segment = draw(st.integers(1, 50))
    match draw(st.sampled_from(ALGORITHMS[goal.operation])):
        case Algorithm.ONE_SHOT:
            return one_shot(goal, segment)
        case Algorithm.TWO_SHOT:
            cuts = st.integers(0, goal.elements)
            bounds = sorted(draw(st.lists(cuts, min_size=goal.ranks - 1, max_size=goal.ranks - 1)))
            ends = [0, *bounds, goal.elements]
            return two_shot(goal, [range(a, b) for a, b in pairwise(ends)], segment)
        case Algorithm.RING:
            return ring(goal, segment)


@given(RANKS, st.integers(0, 300))
def test_even_parts_tile_and_differ_by_at_most_one(ranks: int, elements: int) -> None:
    parts = even_parts(elements, ranks)
    assert [index for part in parts for index in part] == list(range(elements))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(schedules())
def test_every_schedule_reaches_its_goal(schedule: Schedule) -> None:
    schedule.check()


@given(goals(), st.sampled_from([1, 4, 8]), st.data())
def test_every_built_schedule_reaches_its_goal(goal: Goal, itemsize: int, data: st.DataObject) -> None:
    build(goal, data.draw(st.sampled_from(ALGORITHMS[goal.operation])), itemsize).check()


@given(schedules(st.integers(1, 8)), st.randoms())
def test_no_order_of_delivery_deadlocks_or_changes_what_arrives(schedule: Schedule, random: Random) -> None:
    """Links deliver in any order, each its own frames in order, as TCP does. Values are the terms they sum, in order.

    What is sent is what the rank's array holds when the frame may leave: the dependencies must make it the right thing.
    """
    ranks = schedule.goal.ranks
    duties = [Duty(schedule, rank) for rank in range(ranks)]
    progress = [Progress(duty) for duty in duties]
    arrays: list[list[tuple[int, ...]]] = [[()] * schedule.goal.elements for _ in range(ranks)]
    for piece in schedule.goal.pieces:
        for rank in piece.givers:
            arrays[rank][piece.part.start : piece.part.stop] = [(rank,)] * len(piece.part)
    wires: dict[tuple[int, int], list[list[tuple[int, ...]]]] = {}
    received: dict[tuple[int, int], list[list[tuple[int, ...]]]] = {}

    def send(rank: int, sends: Iterable[int]) -> None:
        for index in sends:
            t = duties[rank].sends[index]
            wires.setdefault((rank, t.target), []).append(arrays[rank][t.part.start : t.part.stop])

    lanes = {
        (source, rank): [index for index, t in enumerate(duties[rank].receives) if t.source == source]
        for rank in range(ranks)
        for source in range(ranks)
    }
    for rank in random.sample(range(ranks), ranks):
        send(rank, progress[rank].start())
    while any(wires.values()):
        source, rank = random.choice([pair for pair, frames in wires.items() if frames])
        receive = lanes[source, rank].pop(0)
        t = duties[rank].receives[receive]
        values = wires[source, rank].pop(0)
        assert len(values) == len(t.part)
        gate = progress[rank].arrived(receive)
        received.setdefault((rank, duties[rank].receive_gates[receive]), []).append(values)
        if gate == NOW:
            continue
        opened, part = duties[rank].gates[gate], slice(t.part.start, t.part.stop)
        terms = received.pop((rank, gate))
        if opened.summed:
            terms.append(arrays[rank][part])
            arrays[rank][part] = [sum(sorted(column), ()) for column in zip(*terms, strict=True)]
        else:
            (arrays[rank][part],) = terms
        send(rank, progress[rank].released(gate))

    assert not any(lanes.values())  # nothing is still awaited
    for piece in schedule.goal.pieces:
        for rank in piece.takers:
            assert arrays[rank][piece.part.start : piece.part.stop] == [tuple(piece.givers)] * len(piece.part)


@given(schedules())
def test_progress_starts_anew_every_time(schedule: Schedule) -> None:
    for rank in range(schedule.goal.ranks):
        progress = Progress(Duty(schedule, rank))
        runs = []
        for _ in range(2):
            sent = list(progress.start())
            for receive in range(len(Duty(schedule, rank).receives)):
                gate = progress.arrived(receive)
                if gate != NOW:
                    sent += progress.released(gate)
            runs.append(sent)
        assert runs[0] == runs[1]
        assert sorted(runs[0]) == list(range(len(Duty(schedule, rank).sends)))


@given(schedules())
def test_ring_is_between_neighbours_and_frames_of_a_pair_have_steps_of_their_own(schedule: Schedule) -> None:
    if schedule.algorithm is Algorithm.RING:
        assert all((t.source + 1) % schedule.goal.ranks == t.target for t in schedule.transfers)
    pairs = [(t.step, t.source, t.target) for t in schedule.transfers]
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize("ranks", [3, 7])
def test_ring_loads_every_link_with_at_most_twice_the_payload(ranks: int) -> None:
    for source in range(ranks):
        transfers = ring(all_reduce(1000, ranks), 10).transfers
        assert sum(len(t.part) for t in transfers if t.source == source) <= 2000


@given(schedules(st.integers(2, 6)).filter(lambda schedule: any(t.part for t in schedule.transfers)), st.data())
def test_check_finds_any_missing_or_doubled_transfer(schedule: Schedule, data: st.DataObject) -> None:
    some = [index for index, t in enumerate(schedule.transfers) if t.part]
    index = data.draw(st.sampled_from(some))
    lost = replace(schedule, transfers=[t for i, t in enumerate(schedule.transfers) if i != index])
    again = [*schedule.transfers, schedule.transfers[index]._replace(step=max(t.step for t in schedule.transfers) + 1)]
    for broken in (lost, replace(schedule, transfers=again)):
        with pytest.raises(ValueError, match=r".+"):
            broken.check()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda ts: [t._replace(source=(t.source + 1) % 3, target=(t.target + 1) % 3) for t in ts], "holds the sum"),
        (lambda ts: [t._replace(part=range(4, 12)) for t in ts], "outside the 8 elements"),
        (lambda ts: list(reversed(ts)), "order of steps"),
        (lambda ts: [ts[0], *ts], "two transfers between the same ranks"),
    ],
)
def test_check_says_what_is_wrong(change: Callable[[list[Transfer]], list[Transfer]], text: str) -> None:
    schedule = ring(all_reduce(8, 3), 8)
    with pytest.raises(ValueError, match=text):
        replace(schedule, transfers=change(list(schedule.transfers))).check()


def test_check_refuses_sums_out_of_rank_order() -> None:
    goal = all_reduce(1, 3)
    schedule = ring(goal, 1)
    backwards = [
        t._replace(source=2 - t.source, target=2 - t.target, terms=range(3 - t.terms.stop, 3 - t.terms.start))
        for t in schedule.transfers
    ]
    with pytest.raises(ValueError, match="rank order"):
        replace(schedule, transfers=backwards).check()


def test_a_schedule_prints_as_a_table() -> None:
    text = str(build(all_reduce(5, 2), Algorithm.TWO_SHOT, 4))
    assert text.splitlines() == [
        "all_reduce of 5 elements over 2 ranks, two-shot: 4 transfers in 2 steps",
        "step  from    to        elements  sum of ranks",
        "   0     0     1             2:5  0",
        "   0     1     0             0:2  1",
        "   3     0     1             0:2  0 to 1",
        "   3     1     0             2:5  0 to 1",
    ]
    assert "and 16 more" in str(one_shot(all_reduce(5, 8), 5))


def test_an_operation_without_an_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="all_to_all has no ring algorithm"):
        build(all_to_all([[1]]), Algorithm.RING, 4)


def test_tiles_follow_each_other() -> None:
    assert tile([2, 0, 1]) == [range(2), range(2, 2), range(2, 3)]


def test_cost_is_latency_and_bytes_through_a_port_and_the_processor() -> None:
    seconds = cost(one_shot(all_reduce(1000, 3), 1000), 4, Network(uniform(3, 1e-3), uniform(3, 1e6), 1e-5))
    # The first frame is offered after frame_s; both leave, one after the other; the last one is received and summed.
    assert seconds == pytest.approx(1e-5 + 2 * 4000 / 1e6 + 1e-3 + 1e-5 + 2 * 4000 * SUM_S)


def test_ranks_of_a_crowd_work_one_after_the_other() -> None:
    goal, links = all_reduce(1000, 4), (uniform(4, 1e-6), uniform(4, 1e12))

    def seconds(*crowds: Crowd, byte_s: float = 0.0) -> float:
        return cost(one_shot(goal, 1000), 4, Network(*links, 1e-4, byte_s, crowds))

    sums = 3 * 4000 * SUM_S
    assert seconds() == pytest.approx(6 * 1e-4 + sums, rel=0.01)
    assert seconds(Crowd(range(4), 1)) == pytest.approx(24 * 1e-4 + 4 * sums, rel=0.01)
    assert seconds(Crowd(range(4), 2)) == pytest.approx(12 * 1e-4 + 2 * sums, rel=0.1)
    assert seconds(Crowd((0, 1), 1), Crowd((2, 3), 1)) == pytest.approx(12 * 1e-4 + 2 * sums, rel=0.2)
    assert seconds(Crowd(range(4), 1), byte_s=1e-8) == pytest.approx(24 * (1e-4 + 4e-5) + 4 * sums, rel=0.01)


def test_cost_of_a_pipeline_overlaps_its_segments() -> None:
    goal = all_reduce(1 << 20, 4)
    whole = two_shot(goal, even_parts(1 << 20, 4), 1 << 20)
    cut = two_shot(goal, even_parts(1 << 20, 4), 1 << 16)
    links = Network(uniform(4, 1e-4), uniform(4, 1e9))
    assert cost(cut, 4, links) < 0.95 * cost(whole, 4, links)


def test_choose_follows_latency_bandwidth_and_payload() -> None:
    slow_links = Network(uniform(4, 100e-6), uniform(4, 117e6))

    def chosen(elements: int, ranks: int, links: Network) -> Algorithm:
        return choose(all_reduce(elements, ranks), 4, links).schedule.algorithm

    assert chosen(128, 4, slow_links) is Algorithm.ONE_SHOT
    assert chosen(4096, 4, slow_links) is Algorithm.TWO_SHOT
    assert chosen(4096, 2, slow_links) is Algorithm.ONE_SHOT
    assert chosen(0, 4, slow_links) is Algorithm.ONE_SHOT
    slow_diagonals = [[117e6 if (a - b) % 4 in (1, 3) else 5e6 for b in range(4)] for a in range(4)]
    assert chosen(1 << 20, 4, Network(slow_links.latency, slow_diagonals)) is Algorithm.RING


@pytest.mark.parametrize(
    ("goal", "small", "large"),
    [
        (lambda elements: broadcast(elements, 8, 3), Algorithm.ONE_SHOT, Algorithm.TWO_SHOT),
        (lambda elements: all_gather([elements // 8] * 8), Algorithm.ONE_SHOT, Algorithm.ONE_SHOT),
        (lambda elements: reduce_scatter([elements // 8] * 8), Algorithm.ONE_SHOT, Algorithm.ONE_SHOT),
    ],
)
def test_choose_knows_every_operation(goal: Callable[[int], Goal], small: Algorithm, large: Algorithm) -> None:
    links = Network(uniform(8, 100e-6), uniform(8, 117e6))
    for elements, wanted in ((64, small), (1 << 18, large)):
        choice: Choice = choose(goal(elements), 4, links)
        assert choice.schedule.algorithm is wanted
        assert choice.seconds > FRAME_S


def test_a_narrow_wire_makes_a_schedule_cheaper() -> None:
    links = Network(uniform(2, 1e-4), uniform(2, 117e6))
    wide, narrow = (choose(all_reduce(1 << 20, 2), 4, links, wire_itemsize=size).seconds for size in (4, 1.0625))
    assert narrow < 0.35 * wide
