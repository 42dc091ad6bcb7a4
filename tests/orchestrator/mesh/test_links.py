"""What is known of links: which are to be measured, who cannot reach whom."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from motley.orchestrator.mesh.links import AGAIN_S, RETRY_S, UNKNOWN_BANDWIDTH, UNKNOWN_LATENCY_S, Link, LinkTable, Pair
from motley.orchestrator.mesh.nodes import Node
from motley.protocol.mesh_pb2 import Capabilities


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def node(name: str) -> Node:
    return Node(name, name.upper(), "10.0.0.1", "1", Capabilities(), 0, 0.0, 0.0)


A, B, C = map(node, "abc")
IDS = ["a", "b", "b2", "b3", "b4", "c"]


def table_of(*nodes: Node, clock: Clock | None = None) -> LinkTable:
    table = LinkTable(clock or Clock())
    for each in nodes:
        table.joined(each)
    return table


def test_every_pair_is_measured_both_ways_and_again_when_both_are_idle() -> None:
    clock = Clock()
    table = table_of(A, B, clock=clock)
    assert list(table.due("ab", "")) == [Pair("a", "b"), Pair("b", "a")]
    table.measured(Pair("a", "b"), 1e-4, 1e8)
    assert not table.all_known([A, B])
    table.failed(Pair("b", "a"), "nothing answers")
    assert table.all_known([A, B])
    assert not list(table.due("ab", "ab"))
    clock.now = RETRY_S + 1
    assert list(table.due("ab", "")) == [Pair("b", "a")]
    clock.now = AGAIN_S + 1
    assert list(table.due("ab", "ab")) == [Pair("b", "a"), Pair("a", "b")]
    assert list(table.due("ab", "a")) == [Pair("b", "a")]
    table.left(B)
    assert not list(table.due("ab", "ab"))
    table.joined(replace(B, id="b2"))
    assert list(table.due(IDS, "")) == [Pair("a", "b2"), Pair("b2", "a")]


def test_who_comes_back_has_the_links_of_before_until_they_are_measured_anew() -> None:
    clock = Clock()
    table = table_of(A, B, clock=clock)
    table.measured(Pair("a", "b"), 1e-4, 1e8)
    table.failed(Pair("b", "a"), "nothing answers")
    again, elsewhere = replace(B, id="b2"), replace(B, id="b3", address="10.0.0.2")
    table.left(B)
    table.joined(elsewhere)
    assert table.of(A, elsewhere) is None, "it has another address, so perhaps another network"
    table.left(elsewhere)
    table.joined(again)
    assert table.between(A, again) == (1e-4, 1e8)
    assert not table.fails(again, A), "that may have been why it was restarted"
    both = [Pair("a", "b2"), Pair("b2", "a")]
    assert list(table.due(IDS, "")) == both
    table.measured(Pair("a", "b2"), 2e-4, 1e8)
    assert list(table.due(IDS, "")) == both[1:]
    table.left(again)
    clock.now = AGAIN_S + 1
    table.joined(replace(again, id="b4"))
    assert table.of(A, replace(again, id="b4")) is None, "too long ago"


def test_a_link_is_as_its_slower_direction() -> None:
    table = table_of(A, B)
    assert table.between(A, B) == (UNKNOWN_LATENCY_S, UNKNOWN_BANDWIDTH)
    table.measured(Pair("a", "b"), 1e-4, 1e8)
    table.measured(Pair("b", "a"), 3e-4, 2e8)
    assert table.between(A, B) == table.between(B, A) == (3e-4, 1e8)
    assert table.between(A, A)[0] < 1e-4


def test_two_that_are_apart_meet_by_whom_both_reach_and_are_reached_by() -> None:
    d = node("d")
    table = table_of(A, B, C, d)
    table.failed(Pair("a", "b"), "nothing answers")
    table.measured(Pair("b", "a"), 1e-4, 1e9)
    for one in "ab":
        for third, latency in (("c", 3e-4), ("d", 2e-4)):
            table.measured(Pair(one, third), latency, 1e8)
            if (one, third) != ("a", "d"):
                table.measured(Pair(third, one), 1e-4, 2e8)
    assert table.relay(A, B) == "c", "d does not reach a, as far as is known"
    assert table.broken([A, B, C, d]) == []
    assert table.between(A, B) == (6e-4, 1e8)
    table.measured(Pair("d", "a"), 1e-4, 2e8)
    assert table.relay(A, B) == "d"
    table.left(d)
    table.failed(Pair("c", "b"), "nothing answers")
    assert table.relay(A, B) is None
    assert table.broken([A, B]) == ["A cannot reach B: nothing answers"]
    assert table.are_apart(A, B)


def test_one_direction_is_enough_to_be_apart() -> None:
    table = table_of(A, B, C)
    table.measured(Pair("a", "b"), 1e-4, 1e8)
    table.failed(Pair("b", "a"), "nothing answers at 10.0.0.7:4000")
    assert table.are_apart(A, B)
    assert table.are_apart(B, A)
    assert not table.are_apart(A, C)
    assert table.broken([A, B, C]) == ["B cannot reach A: nothing answers at 10.0.0.7:4000"]


class Plain:
    """What `LinkTable` is to tell, by a look at all pairs each time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.nodes: list[Node] = []
        self.links: dict[Pair, Link] = {}

    def due(self, free: Collection[str], resting: Collection[str]) -> set[Pair]:
        found = set()
        for one, other in permutations((node.id for node in self.nodes), 2):
            link = self.links.get(Pair(one, other))
            age = 0.0 if link is None else self.clock.now - link.measured
            if link is None or link.before or (link.failure and age > RETRY_S):
                if {one, other} <= set(free):
                    found.add(Pair(one, other))
            elif age > AGAIN_S and {one, other} <= set(resting):
                found.add(Pair(one, other))
        return found


STEPS = st.one_of(
    st.tuples(st.just("join"), st.sampled_from("ABCD")),
    st.tuples(st.just("leave"), st.integers(0, 3)),
    st.tuples(st.sampled_from(["measured", "failed"]), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("wait"), st.sampled_from([1.0, RETRY_S / 2, RETRY_S + 1, AGAIN_S / 2, AGAIN_S + 1])),
)


@given(st.lists(STEPS, max_size=40), st.data())
def test_what_is_due_is_as_by_a_look_at_all_pairs(steps: list[tuple[Any, ...]], data: st.DataObject) -> None:
    clock = Clock()
    table, plain = LinkTable(clock), Plain(clock)
    for number, step in enumerate(steps):
        nodes = plain.nodes
        match step:
            case ("join", name) if name not in [one.name for one in nodes]:
                new = replace(node(name), id=f"{name}{number}")
                table.joined(new)
                for pair in permutations([*nodes, new], 2):  # what counts of before is tested above
                    if new in pair and (link := table.of(*pair)) is not None:
                        assert link.before
                        plain.links[Pair(pair[0].id, pair[1].id)] = link
                nodes.append(new)
            case ("leave", which) if which < len(nodes):
                gone = nodes.pop(which)
                table.left(gone)
                plain.links = {pair: link for pair, link in plain.links.items() if gone.id not in pair}
            case ("measured" | "failed" as what, one, other) if one != other and max(one, other) < len(nodes):
                pair_ids = Pair(nodes[one].id, nodes[other].id)
                failure = "nothing answers" if what == "failed" else ""
                plain.links[pair_ids] = Link(failure=failure, measured=clock.now)
                if failure:
                    table.failed(pair_ids, failure)
                else:
                    table.measured(pair_ids, 0.0, 0.0)
            case ("wait", seconds):
                clock.now += seconds
        some = [one for one in nodes if data.draw(st.booleans())]
        free = [one.id for one in some]
        resting = [one for one in free if data.draw(st.booleans())]
        due = list(table.due(free, resting))
        assert set(due) == plain.due(free, resting)
        assert len(due) == len(set(due))
        assert table.all_known(some) == all(pair in plain.links for pair in permutations(free, 2))
        assert {(a.id, b.id) for a, b in permutations(nodes, 2) if table.of(a, b) is not None} == set(plain.links)


def test_a_mesh_of_many_nodes_of_which_all_is_known_takes_no_time() -> None:
    nodes = [node(f"n{number}") for number in range(64)]
    table = table_of(*nodes)
    for one, other in permutations(nodes, 2):
        table.measured(Pair(one.id, other.id), 1e-4, 1e8)

    class Counted(list[str]):
        looks = 0

        def __iter__(self) -> Iterator[str]:
            for each in super().__iter__():
                Counted.looks += 1
                yield each

    ids = Counted(each.id for each in nodes)
    assert not list(table.due(ids, ids))
    assert Counted.looks <= 2 * len(nodes), "each of the nodes, not each of their pairs"
