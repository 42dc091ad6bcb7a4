"""What is known of links: which are to be measured, who cannot reach whom."""

from __future__ import annotations

from dataclasses import replace

from motley.orchestrator.mesh.links import AGAIN_S, RETRY_S, UNKNOWN_BANDWIDTH, UNKNOWN_LATENCY_S, LinkTable, Pair
from motley.orchestrator.mesh.nodes import Node
from motley.protocol.mesh_pb2 import Capabilities


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def node(name: str) -> Node:
    return Node(name, name.upper(), "10.0.0.1", "1", Capabilities(), 0, 0.0, 0.0)


A, B, C = map(node, "abc")


def test_every_pair_is_measured_both_ways_and_again_when_both_are_idle() -> None:
    clock = Clock()
    table = LinkTable(clock)
    assert list(table.due([A, B], lambda _: False)) == [Pair("a", "b"), Pair("b", "a")]
    table.measured(Pair("a", "b"), 1e-4, 1e8)
    assert not table.all_known([A, B])
    table.failed(Pair("b", "a"), "nothing answers")
    assert table.all_known([A, B])
    assert not list(table.due([A, B], lambda _: True))
    clock.now = RETRY_S + 1
    assert list(table.due([A, B], lambda _: False)) == [Pair("b", "a")]
    clock.now = AGAIN_S + 1
    assert list(table.due([A, B], lambda _: True)) == [Pair("a", "b"), Pair("b", "a")]
    assert list(table.due([A, B], lambda node: node is A)) == [Pair("b", "a")]
    table.left(B, [A])
    assert list(table.due([A, B], lambda _: False)) == [Pair("a", "b"), Pair("b", "a")]


def test_who_comes_back_has_the_links_of_before_until_they_are_measured_anew() -> None:
    clock = Clock()
    table = LinkTable(clock)
    table.measured(Pair("a", "b"), 1e-4, 1e8)
    table.failed(Pair("b", "a"), "nothing answers")
    again, elsewhere = replace(B, id="b2"), replace(B, id="b3", address="10.0.0.2")
    table.left(B, [A])
    table.back(elsewhere, [A])
    assert table.of(A, elsewhere) is None, "it has another address, so perhaps another network"
    table.back(again, [A])
    assert table.between(A, again) == (1e-4, 1e8)
    assert not table.fails(again, A), "that may have been why it was restarted"
    both = [Pair("a", "b2"), Pair("b2", "a")]
    assert sorted(table.due([A, again], lambda _: False)) == both
    table.measured(Pair("a", "b2"), 2e-4, 1e8)
    assert list(table.due([A, again], lambda _: False)) == both[1:]
    table.left(again, [A])
    clock.now = AGAIN_S + 1
    table.back(replace(again, id="b4"), [A])
    assert table.of(A, replace(again, id="b4")) is None, "too long ago"


def test_a_link_is_as_its_slower_direction() -> None:
    table = LinkTable(Clock())
    assert table.between(A, B) == (UNKNOWN_LATENCY_S, UNKNOWN_BANDWIDTH)
    table.measured(Pair("a", "b"), 1e-4, 1e8)
    table.measured(Pair("b", "a"), 3e-4, 2e8)
    assert table.between(A, B) == table.between(B, A) == (3e-4, 1e8)
    assert table.between(A, A)[0] < 1e-4


def test_two_that_are_apart_meet_by_whom_both_reach_and_are_reached_by() -> None:
    table = LinkTable(Clock())
    table.failed(Pair("a", "b"), "nothing answers")
    table.measured(Pair("b", "a"), 1e-4, 1e9)
    d = node("d")
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
    table.left(d, [A, B, C])
    table.failed(Pair("c", "b"), "nothing answers")
    assert table.relay(A, B) is None
    assert table.broken([A, B]) == ["A cannot reach B: nothing answers"]
    assert table.are_apart(A, B)


def test_one_direction_is_enough_to_be_apart() -> None:
    table = LinkTable(Clock())
    table.measured(Pair("a", "b"), 1e-4, 1e8)
    table.failed(Pair("b", "a"), "nothing answers at 10.0.0.7:4000")
    assert table.are_apart(A, B)
    assert table.are_apart(B, A)
    assert not table.are_apart(A, C)
    assert table.broken([A, B, C]) == ["B cannot reach A: nothing answers at 10.0.0.7:4000"]
