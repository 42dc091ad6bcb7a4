"""Pairs of nodes are told to measure, one at a time for each node, and what they say is taken in."""

from __future__ import annotations

import pytest

from motley.orchestrator.control import Control
from motley.orchestrator.mesh.links import LinkTable
from motley.orchestrator.mesh.nodes import Node, NodeTable
from motley.orchestrator.serving.probes import PATIENCE_S, Probes
from motley.orchestrator.sessions.table import SessionTable
from motley.protocol.mesh_pb2 import Capabilities, Hello, OrchestratorMessage, Probe, Probed
from tests.orchestrator.mesh.test_links import Clock


class Post(Control):
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Probe]] = []

    def send(self, node_id: str, message: OrchestratorMessage) -> None:
        self.sent.append((node_id, message.probe))


class House:
    """Nodes, and what they are asked to measure."""

    def __init__(self, count: int) -> None:
        self.clock, self.post = Clock(), Post()
        table = NodeTable(self.clock)
        self.nodes: list[Node] = [
            table.join(Hello(name=f"n{n}", address="10.0.0.1", capabilities=Capabilities(memory_bandwidth=1e9)))
            for n in range(count)
        ]
        self.links = LinkTable(self.clock)
        self.probes = Probes(table, self.links, SessionTable(), self.post, self.clock)
        for node in self.nodes:
            self.probes.on_joined(node)

    def named(self, node_id: str) -> Node:
        return next(node for node in self.nodes if node.id == node_id)

    def answer(self, failure: str = "") -> tuple[Node, Node]:
        """Have the pair that was asked first do what it was asked; who it was: the one that dials first."""
        listener, probe = self.post.sent.pop(0)
        assert not probe.address
        self.probes.on_probed(self.named(listener), Probed(id=probe.id, listening="10.0.0.1:4000"))
        dialler, told = self.post.sent.pop()
        assert (told.id, told.address, told.secret) == (probe.id, "10.0.0.1:4000", probe.secret)
        assert told.tls.authority == probe.tls.authority
        assert told.tls.key != probe.tls.key
        found = Probed(id=probe.id, failure=failure) if failure else Probed(id=probe.id, latency_s=1e-4, bandwidth=1e8)
        self.probes.on_probed(self.named(listener), Probed(id=probe.id, failure=failure))
        self.probes.on_probed(self.named(dialler), found)
        return self.named(dialler), self.named(listener)


def test_all_pairs_measure_one_after_the_other() -> None:
    house = House(3)
    house.probes.begin()
    assert len(house.post.sent) == 1, "three nodes, of which each measures one link at a time"
    house.probes.begin()
    assert len(house.post.sent) == 1
    for _ in range(6):
        house.answer()
    assert not house.post.sent
    assert house.links.all_known(house.nodes)


def test_who_cannot_reach_whom_is_known_at_once(caplog: pytest.LogCaptureFixture) -> None:
    house = House(2)
    house.probes.begin()
    house.answer(failure="nothing answers at 10.0.0.1:4000 within 2.5 s")
    assert not house.links.broken(house.nodes), "one failure may be that of a busy machine"
    dialler, listener = house.answer(failure="nothing answers at 10.0.0.1:4000 within 2.5 s")
    why = f"{dialler.name} cannot reach {listener.name}: nothing answers at 10.0.0.1:4000 within 2.5 s"
    assert house.links.broken(house.nodes) == [why]
    assert house.links.are_apart(*house.nodes)
    assert f"node {dialler.name} cannot reach node {listener.name}" in caplog.text


def test_a_node_that_says_nothing_holds_up_nobody() -> None:
    house = House(3)
    house.probes.begin()
    first = house.post.sent[0][1].id
    house.clock.now = PATIENCE_S + 1
    house.probes.begin()
    _, (listener, second) = house.post.sent
    assert second.id != first, "it is another pair's turn"
    house.probes.on_lost(house.named(listener))
    house.probes.on_probed(house.named(listener), Probed(id=second.id, listening="10.0.0.1:4000"))
    assert len(house.post.sent) == 2


def test_what_nobody_was_asked_is_ignored() -> None:
    house = House(2)
    house.probes.begin()
    dialled = house.post.sent[0][1].id
    house.probes.on_probed(house.nodes[0], Probed(id="probe-of-another", latency_s=1.0, bandwidth=1.0))
    stranger = Node("x", "x", "10.0.0.9", "1", Capabilities(), 0, 0.0, 0.0)
    house.probes.on_probed(stranger, Probed(id=dialled, latency_s=1.0, bandwidth=1.0))
    assert not house.links.all_known(house.nodes)
    assert not house.links.broken(house.nodes)
