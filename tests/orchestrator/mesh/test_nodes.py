"""The table of nodes, under a clock of our own."""

from __future__ import annotations

import math

import pytest

from motley.orchestrator.mesh.nodes import (
    COLOURS,
    FORGET_LEFT_S,
    FORGET_S,
    LEFT,
    SILENCE_S,
    HelloError,
    NameTakenError,
    NodeTable,
)
from motley.protocol.mesh_pb2 import Capabilities, Engine, FormatSpeed, Hello


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def hello(name: str = "pc", address: str = "10.0.0.2", bandwidth: float = 1e9, zone: str = "") -> Hello:
    capabilities = Capabilities(memory_bandwidth=bandwidth, zone=zone)
    return Hello(name=name, address=address, capabilities=capabilities)


def test_a_node_is_overdue_only_after_silence() -> None:
    clock = Clock()
    table = NodeTable(clock)
    node = table.join(hello())
    clock.now += SILENCE_S
    assert table.overdue() == []
    clock.now += 0.1
    assert table.overdue() == [node]
    table.show_life(node.id)
    table.heartbeat(node.id, 7)
    assert table.overdue() == []
    assert node.memory_available == 7
    assert table.silence_s(node) == 0


def test_our_own_standstill_is_not_the_nodes_silence() -> None:
    clock = Clock()
    table = NodeTable(clock)
    node = table.join(hello())
    assert table.overdue() == []
    clock.now += 3600
    assert table.overdue() == []
    table.lose(node.id, "its connection ended")
    assert (
        node.lost == "its connection ended, after the orchestrator itself had stood still for 3600 s (was it asleep?)"
    )


def test_a_node_that_is_lost_later_is_not_lost_by_our_standstill() -> None:
    clock = Clock()
    table = NodeTable(clock)
    node = table.join(hello())
    table.overdue()
    clock.now += 3600
    for _ in range(2 * int(SILENCE_S) + 2):
        clock.now += 0.5
        table.overdue()
    table.lose(node.id, "its connection ended")
    assert node.lost == "its connection ended"


def test_a_name_is_taken_while_its_node_lives() -> None:
    table = NodeTable(Clock())
    first = table.join(hello())
    with pytest.raises(NameTakenError, match=r"'pc' is in the mesh already.*--name"):
        table.join(hello())
    table.lose(first.id, "its connection ended")
    assert not first.alive
    second = table.join(hello())
    assert second.id != first.id
    assert list(table) == [second]


def test_a_lost_node_is_forgotten_when_nobody_names_it() -> None:
    clock = Clock()
    table = NodeTable(clock)
    box, pc, alive = (table.join(hello(name)) for name in ("box", "pc", "laptop"))
    table.lose(box.id, "unplugged")
    table.lose(pc.id, "unplugged")
    clock.now += FORGET_S
    table.forget([])
    assert list(table) == [box, pc, alive]
    clock.now += 0.1
    table.forget(["pc"])
    assert list(table) == [pc, alive]
    table.forget([])
    assert list(table) == [alive]


def test_a_node_that_has_left_is_forgotten_sooner_than_one_that_is_lost() -> None:
    clock = Clock()
    table = NodeTable(clock)
    left, lost, named = (table.join(hello(name)) for name in ("left", "lost", "named"))
    table.lose(left.id, LEFT)
    table.lose(named.id, LEFT)
    table.lose(lost.id, "unplugged")
    assert [node.state for node in table] == ["left", "lost", "left"]
    clock.now += FORGET_LEFT_S
    assert table.gone_s(left) == FORGET_LEFT_S
    table.forget([])
    assert list(table) == [left, lost, named]
    clock.now += 0.1
    table.forget(["named"])
    assert list(table) == [lost, named]


@pytest.mark.parametrize("reason", [LEFT, "unplugged"])
def test_a_node_that_returns_takes_its_old_place(reason: str) -> None:
    table = NodeTable(Clock())
    first, second, third = (table.join(hello(name)) for name in ("box", "pc", "laptop"))
    table.lose(second.id, reason)
    again = table.join(hello("pc", zone="attic"))
    assert list(table) == [first, again, third]
    assert (again.state, again.capabilities.zone, again.colour) == ("alive", "attic", second.colour)


def test_a_colour_is_the_nodes_own() -> None:
    """It depends on neither who else is there nor when they came, as long as there are enough for all."""
    clock = Clock()
    one, other = NodeTable(clock), NodeTable(clock)
    names = ["box", "laptop", "attic-box"]  # that ask for different ones
    in_one = {name: one.join(hello(name)).colour for name in names}
    assert len(set(in_one.values())) == 3
    assert {name: other.join(hello(name)).colour for name in reversed(names)} == in_one
    many = {one.join(hello(f"node-{index}")).colour for index in range(COLOURS - 3)}
    assert many == set(range(COLOURS)) - set(in_one.values())
    assert 0 <= one.join(hello("one-too-many")).colour < COLOURS
    for node in list(one):
        if node.name != "laptop":
            one.lose(node.id, LEFT)
    clock.now += FORGET_LEFT_S + 1
    one.forget([])
    assert [(node.name, node.colour) for node in one] == [("laptop", in_one["laptop"])]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (hello(name=""), "1 to 64 printable"),
        (hello(name="a\nb"), "1 to 64 printable"),
        (hello(name="pc+laptop"), "none of them"),
        (hello(name="me@pc"), "none of them"),
        (hello(name="."), r"not \. or \.\."),
        (hello(name=".."), r"not \. or \.\."),
        (hello(name="x" * 65), "1 to 64 printable"),
        (hello(address=""), "no address"),
        (hello(zone="attic\n"), "zone has up to 64 printable"),
        (hello(zone="x" * 65), "zone has up to 64 printable"),
        (hello(bandwidth=0), "bandwidth"),
        (hello(bandwidth=math.nan), "bandwidth"),
        (hello(bandwidth=math.inf), "bandwidth"),
    ],
)
def test_a_hello_that_makes_no_sense_is_refused(wrong: Hello, match: str) -> None:
    table = NodeTable(Clock())
    with pytest.raises(HelloError, match=match):
        table.join(wrong)
    assert list(table) == []


@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_a_speed_that_cannot_be_is_refused(speed: float) -> None:
    nodes = NodeTable(Clock())
    said = hello()
    said.capabilities.speeds.append(FormatSpeed(format="int4", bytes_per_s=1e9, row_bytes_per_s=speed))
    with pytest.raises(HelloError, match="int4"):
        nodes.join(said)
    said = hello()
    measured = FormatSpeed(format="int8", bytes_per_s=speed, row_bytes_per_s=1e9)
    said.capabilities.engines.append(Engine(name="webgpu", speeds=[measured]))
    with pytest.raises(HelloError, match="int8"):
        nodes.join(said)
    said = hello()
    said.capabilities.call_s = speed if speed != 0 else 2.0
    with pytest.raises(HelloError, match="small operation"):
        nodes.join(said)
    for field in ("layer_s", "host_s"):
        said = hello()
        said.capabilities.engines.append(Engine(name="cuda", **{field: speed or -0.5}))
        with pytest.raises(HelloError, match="a way to the host take engine 'cuda' is not below 0 s"):
            nodes.join(said)
