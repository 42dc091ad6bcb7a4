"""Memory that a plan was made with, when others have been promised some of it meanwhile."""

from __future__ import annotations

from motley.orchestrator.mesh.links import LinkTable
from motley.orchestrator.mesh.nodes import Node, NodeTable
from motley.orchestrator.planning.cutting.shares import RankPlan
from motley.orchestrator.planning.setup import Setup
from motley.orchestrator.serving.plans.memory import JITTER_BYTES, Memory
from motley.orchestrator.session_request import SessionRequest
from motley.orchestrator.sessions.session import Session
from motley.orchestrator.sessions.table import SessionTable
from motley.orchestrator.workers import Rank, Worker
from motley.protocol import GPU_RESERVE
from motley.protocol.mesh_pb2 import Capabilities, Gpu, Hello

GB = 10**9


class Planned(Worker):
    """A worker that gets so many bytes."""

    memory_bytes = host_bytes_taken = 0


class Mesh:
    """A node that offers 16 GB, of which its other programs leave 6."""

    def __init__(self) -> None:
        self.nodes, self.sessions = NodeTable(lambda: 0.0), SessionTable()
        hello = Hello(name="pc", address="pc", capabilities=Capabilities(memory_bytes=16 * GB, memory_bandwidth=1e9))
        self.node: Node = self.nodes.join(hello)
        self.nodes.heartbeat(self.node.id, 6 * GB)
        self.memory = Memory(self.nodes, self.sessions, LinkTable(lambda: 0.0))

    def promise(self, size: int) -> Planned:
        """A worker of another session, which has taken nothing yet."""
        worker = Planned(0, self.node.id, "pc", size)
        worker.memory_bytes = size
        session = Session("other", SessionRequest("other"), "other", 0.0)
        session.ranks.append(worker)
        self.sessions.add(session)
        return worker

    def has(self, size: int) -> bool:
        return self.memory.has([(self.node.id, size)])


def test_what_is_free_there_is_not_promised_twice_though_more_is_offered() -> None:
    mesh = Mesh()
    planned = mesh.memory.free(mesh.node)
    assert planned == 6 * GB
    assert mesh.has(planned)
    worker = mesh.promise(5 * GB)
    assert not mesh.has(planned)
    assert mesh.has(GB)
    worker.gone = True
    assert mesh.has(planned)


def test_what_is_offered_is_not_promised_twice_though_more_is_free() -> None:
    mesh = Mesh()
    mesh.nodes.heartbeat(mesh.node.id, 64 * GB)
    mesh.promise(5 * GB)
    assert mesh.has(11 * GB)
    assert not mesh.has(11 * GB + 1)


def test_a_plan_is_not_made_anew_for_what_other_programs_take_in_a_second() -> None:
    mesh = Mesh()
    mesh.nodes.heartbeat(mesh.node.id, 6 * GB - JITTER_BYTES)
    assert mesh.has(6 * GB)
    mesh.nodes.heartbeat(mesh.node.id, 6 * GB - JITTER_BYTES - 1)
    assert not mesh.has(6 * GB)


def test_a_node_that_has_gone_has_nothing() -> None:
    mesh = Mesh()
    assert not mesh.memory.has([("gone", 1)])
    assert mesh.memory.has([("gone", 0)])


def test_experts_of_an_engine_on_the_gpu_need_room_there_too() -> None:
    mesh = Mesh()
    node = mesh.node
    node.capabilities.engines.add(name="onnxruntime")
    node.capabilities.engines.add(name="webgpu", on_gpu=True)
    mesh.nodes.heartbeat(node.id, 6 * GB, [Gpu(memory_bytes=4 * GB, free_bytes=3 * GB)])
    assert mesh.memory.beside("onnxruntime")(node.id) == 6 * GB
    assert mesh.memory.beside("webgpu")(node.id) == 3 * GB - GPU_RESERVE
    plan = RankPlan(1, range(1), range(1), range(1), weight_bytes=GB, memory_bytes=GB, fixed_bytes=GB // 2)
    setup = Setup("webgpu", "fp32", on_gpu=True, on_host_memory=False)
    rank = Rank(0, node.id, "pc", 3 * GB, plan, setup)
    assert mesh.memory.beside("webgpu", [rank])(node.id) == 2 * GB - GPU_RESERVE
    assert mesh.memory.beside("onnxruntime", [rank])(node.id) == 6 * GB - GB // 2
