"""A real orchestrator on free ports, and nodes that speak the protocol to it over real TLS sockets.

A `ScriptedNode` has no engine: it answers what a daemon must answer, and what a test tells it to.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

from motley.orchestrator.app import Orchestrator, OrchestratorConfig
from motley.protocol.mesh_pb2 import (
    AdapterEvent,
    AdapterOrder,
    Assignment,
    Budget,
    BudgetOrder,
    Capabilities,
    Delta,
    Describe,
    Described,
    Done,
    Empty,
    Engine,
    ExpertReport,
    Failure,
    Generate,
    Gpu,
    Heartbeat,
    Hello,
    HostedExperts,
    Involved,
    JobEvent,
    JobOrder,
    Lease,
    LeaseOrder,
    Lend,
    Lent,
    Loading,
    ModelProfile,
    NodeMessage,
    OrchestratorMessage,
    Probed,
    RankCommand,
    RankEvent,
    Ready,
    Relay,
    Relayed,
    Sampling,
    Timing,
)
from motley.protocol.mesh_pb2_grpc import MeshStub
from motley.protocol.versions import PROTOCOL, VERSION
from tests.e2e.processes import in_thread, motley

GB = 10**9
DEADLINE_S = 120.0


def small_profile(name: str = "bard") -> ModelProfile:
    return ModelProfile(
        name=name,
        fingerprint="0123456789abcdef",
        sampling=Sampling(top_k=40),
        layers=4,
        kv_groups=4,
        attention_splits=[1, 2],
        mlp_units=16,
        vocabulary_units=8,
        attention_query_bytes=4_000,
        attention_kv_bytes=1_000,
        mlp_unit_bytes=2_000,
        vocabulary_unit_bytes=1_000,
        cache_bytes_per_token=64,
        fixed_bytes=10_000,
        context_length=2048,
        family="llama",
        parameters=123_456,
        chats=True,
    )


def expert_profile(name: str = "mix", layers: int = 4, experts: int = 8) -> ModelProfile:
    """Every layer has experts, of which a token reads two; an expert with its host needs a few kB."""
    profile = small_profile(name)
    profile.family = "mixtral"
    profile.hidden = 64
    profile.expert_layers.extend(range(layers))
    profile.expert_count, profile.experts_per_token, profile.expert_bytes = experts, 2, 1_000
    profile.trunk_mlp_unit_bytes, profile.trunk_fixed_bytes, profile.host_fixed_bytes = 0, 9_000, 8_000
    return profile


async def say(generate: Generate) -> AsyncIterator[Delta]:
    """The answer of a node that was told nothing else."""
    for text in ("Hello", ", ", "world"):
        yield Delta(text=text, ids=[1])
    yield Delta(finish="stop", prompt_tokens=5, completion_tokens=3, prefill_s=0.25, cached_tokens=4, accepted_drafts=2)


def brought(order: AdapterOrder) -> AdapterEvent:
    """What a leader says that has brought an adapter to all ranks; it finds none that is called nothing."""
    source = order.adapter.source
    event = AdapterEvent(id=order.id, fingerprint=hashlib.sha256(source.encode()).hexdigest(), rank=8, bytes=4000)
    if source == "nothing":
        event.failure.CopyFrom(Failure(code="invalid_adapter", message="no folder 'nothing'"))
    return event


def hosted(wanted: HostedExperts, order: Assignment) -> HostedExperts:
    """What an expert host, or a worker of its group, says that holds what it should."""
    slices = range(max(1, order.expert_slices))
    if order.HasField("group"):
        first = sum(order.group.slices[: order.group.member])
        slices = slices[first : first + order.group.slices[order.group.member]]
    names = [f"{own.layer}.{index}.{number}" for own in wanted.sets for index in own.indices for number in slices]
    return HostedExperts(sets=wanted.sets, digests=[hashlib.sha256(name.encode()).digest() for name in names])


class ScriptedNode:
    """One node's end of the control plane.

    Attributes:
        answer: yields the deltas of a request.
        on_describe, on_rank: replace what the node answers.
        commands: every rank command received.
        generated: every request received.
        cancelled: request ids cancelled.
        held: the requests that are held now.
        involved: what it was told of requests that its ranks compute without leading them.
        lends: every order to lend a model.
        asked_to_leave: whether it was.
        orders: every order about a lease or a budget, which it carries out.
        relays: every relay that it has opened.
        job_orders: every order about a training.
        jobs: what it says of trainings' workers when it joins, and of which it keeps files.
        refuses_to_lend: why it does not; empty: it does.
        key: by which the orchestrator lets it in again; "": it has shown one.
        ways: by the name of another node, what this one finds of its way there; it measures no others.
    """

    def __init__(self, name: str = "pc", memory: int = GB, bandwidth: float = 10e9, zone: str = "") -> None:
        self.name = name
        self.address = "127.0.0.1"
        self.protocol = VERSION
        self.process = ""
        self.gpus_now: list[Gpu] = []
        self.capabilities = Capabilities(
            platform="linux",
            cpu="a CPU",
            cores=4,
            memory_bytes=memory,
            memory_bandwidth=bandwidth,
            engines=[Engine(name="onnxruntime")],
            expert_engines=["onnxruntime", "reference"],
            zone=zone,
        )
        self.heartbeats = True
        self.answer: Callable[[Generate], AsyncIterator[Delta]] = say
        self.on_describe: Callable[[Describe], Described | None] = lambda _: Described(profile=small_profile())
        self.lends: list[Lend] = []
        self.job_orders: list[JobOrder] = []
        self.jobs: tuple[list[JobEvent], list[str]] = [], []
        self.refuses_to_lend = ""
        self.orders: list[LeaseOrder | BudgetOrder] = []
        self.relays: list[Relay] = []
        self.leased = Lease()
        self.asked_to_leave = False
        self.on_rank: Callable[[RankCommand], Awaitable[None]] = self.obey
        self.commands: list[RankCommand] = []
        self.generated: list[Generate] = []
        self.cancelled: asyncio.Queue[str] = asyncio.Queue()
        self.held: set[str] = set()
        self.involved: list[Involved] = []
        self.ways: dict[str, Probed] = {}
        self.node_id = self.key = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing = asyncio.Lock()
        self._heard = asyncio.Event()

    async def join(self, target: str, token: str) -> None:
        """Dial as a daemon does: pin the certificate, then show the token. Raises what the server answers."""
        host, _, port = target.rpartition(":")
        secret, _, fingerprint = token.partition(".")
        pem = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))
        assert hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest() == fingerprint
        self._channel = grpc.aio.secure_channel(
            target,
            grpc.ssl_channel_credentials(root_certificates=pem.encode()),
            options=[("grpc.ssl_target_name_override", "motley")],
        )
        self._call = MeshStub(self._channel).Join(metadata=[(PROTOCOL, str(VERSION)), ("motley-token", secret)])
        try:
            if "motley-address" not in await self._call.initial_metadata():
                await self._call.read()  # raises why it is not let in
            await self.send(
                hello=Hello(
                    protocol=self.protocol,
                    process=self.process,
                    version="0.1.0",
                    name=self.name,
                    address=self.address,
                    capabilities=self.capabilities,
                    lease=self.leased,
                    jobs=self.jobs[0],
                    kept_jobs=self.jobs[1],
                )
            )
            welcome = await self._call.read()
            if welcome is grpc.aio.EOF:
                raise grpc.aio.AioRpcError(await self._call.code(), None, None, await self._call.details())
        except BaseException:
            await self._channel.close()
            raise
        self.node_id, self.key = welcome.welcome.node_id, welcome.welcome.key
        self._start(self._beat(welcome.welcome.heartbeat_s))
        self._start(self._listen())

    async def send(self, **body: Any) -> None:
        async with self._writing:  # a gRPC stream takes one write at a time
            await self._call.write(NodeMessage(**body))

    async def lease(self, device: str) -> None:
        """Say that somebody has taken a device back, or, of none, that it is given again."""
        until = time.time() + 3600
        self.leased = Lease(state="leased", device=device, holder="game", expires_at=until) if device else Lease()
        if self.node_id:
            await self.send(lease=self.leased)

    async def event(self, command: RankCommand, **body: Any) -> None:
        """Say something as the rank that `command` is for."""
        await self.send(rank=RankEvent(session=command.session, epoch=command.epoch, rank=command.rank, **body))

    async def obey(self, command: RankCommand) -> None:
        """What a healthy rank worker, expert host or cache holder does."""
        match command.WhichOneof("body"):
            case "assign":
                await self.event(command, listening=f"127.0.0.1:{5000 + command.rank}")
            case "peers":
                await self.event(command, loading=Loading(done_bytes=50, total_bytes=100))
                await self.event(command, loading=Loading(done_bytes=100, total_bytes=100))
                assign = self._assigned(command)
                if command.rank >= assign.size and not assign.cache_holders:
                    host = assign.group.host if assign.HasField("group") else command.rank - assign.size
                    await self.event(command, hosted=hosted(assign.hosts[host], assign))
                await self.event(command, ready=Ready(share_bytes=100, rss_bytes=300, load_s=0.5))
            case "host":
                await self.event(command, hosted=hosted(command.host, self._assigned(command)))
            case "adapter":
                await self.event(command, adapter=brought(command.adapter))
            case "release":
                await self.event(command, released=Empty())

    def _assigned(self, command: RankCommand) -> Assignment:
        mine = [c for c in self.commands if (c.session, c.rank) == (command.session, command.rank)]
        return [c.assign for c in mine if c.WhichOneof("body") == "assign"][-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what the orchestrator says to make a condition true."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await self._heard.wait()

    async def leave(self) -> None:
        """Break off, as a process that dies does."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def ended(self) -> grpc.StatusCode:
        """Wait until the orchestrator ends the stream."""
        code: grpc.StatusCode = await self._call.code()
        return code

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat(self, every_s: float) -> None:
        while True:
            if self.heartbeats:
                available = self.capabilities.memory_bytes
                await self.send(heartbeat=Heartbeat(memory_available_bytes=available, gpus=self.gpus_now))
            await asyncio.sleep(every_s)

    async def _listen(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (message := await self._call.read()) is not grpc.aio.EOF:
                await self._on_message(message)
                self._heard.set()
                self._heard = asyncio.Event()

    async def _on_message(self, message: OrchestratorMessage) -> None:
        match message.WhichOneof("body"):
            case "describe":
                if described := self.on_describe(message.describe):
                    described.request_id = message.describe.request_id
                    await self.send(described=described)
            case "leave":
                self.asked_to_leave = True
                await self.send(leaving=Empty())
            case "relay":
                self.relays.append(message.relay)
                await self.send(relayed=Relayed(id=message.relay.id, listening=f"{self.name}:7000"))
            case "lease_order":
                self.orders.append(message.lease_order)
                await self.lease("" if message.lease_order.give else message.lease_order.device)
                await self.send(done=Done(id=message.lease_order.id))
            case "budget_order":
                order = message.budget_order
                self.orders.append(order)
                await self.send(budget=Budget(memory_bytes=order.memory_bytes, gpu_bytes=order.gpu_bytes))
                await self.send(done=Done(id=order.id))
            case "job":
                self.job_orders.append(message.job)
            case "lend":
                self.lends.append(message.lend)
                refused = self.refuses_to_lend
                where = {} if refused else {"listening": f"{self.name}:5000", "files": "f1"}
                await self.send(lent=Lent(id=message.lend.id, failure=refused, **where))
            case "probe" if not message.probe.address:
                await self.send(probed=Probed(id=message.probe.id, listening=f"{self.name}:4000"))
            case "probe":
                found = self.ways.get(message.probe.address.removesuffix(":4000"))
                if found is not None:
                    found.id = message.probe.id
                    await self.send(probed=found)
            case "rank":
                self.commands.append(message.rank)
                await self.on_rank(message.rank)
            case "generate":
                self.generated.append(message.generate)
                self._start(self._answer(message.generate))
            case "involved":
                self.involved.append(message.involved)
            case "cancel":
                self.cancelled.put_nowait(message.cancel.request_id)
            case "hold":
                (self.held.add if message.hold.held else self.held.discard)(message.hold.request_id)

    async def _answer(self, generate: Generate) -> None:
        async for delta in self.answer(generate):
            delta.request_id = generate.request_id
            await self.send(delta=delta)
        ready = next(command for command in self.commands if command.WhichOneof("body") == "peers")
        await self.event(ready, timing=Timing(tokens=2, compute_s=0.02, wire_s=0.004, step_ms=[12.0, 12.0]))


class Mesh:
    """An orchestrator with nodes, and an HTTP client to it."""

    def __init__(self, orchestrator: Orchestrator, http: aiohttp.ClientSession) -> None:
        self.orchestrator = orchestrator
        self.http = http
        self.nodes: list[ScriptedNode] = []

    async def join(self, node: ScriptedNode) -> ScriptedNode:
        await node.join(self.orchestrator.local_target, self.orchestrator.join_token)
        self.nodes.append(node)
        return node

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        async with self.http.request(method, path, json=body) as response:
            return response.status, await response.json()

    async def serve(self, **request: Any) -> dict[str, Any]:
        """A ready session."""
        status, session = await self.call("POST", "/api/sessions?wait=ready", {"model": "bard", **request})
        assert status == 201, session
        assert session["state"] == "ready"
        return dict(session)

    async def poll(self, path: str, condition: Callable[[Any], bool]) -> Any:
        """The body at `path`, once it meets a condition."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                _, body = await self.call("GET", path)
                if condition(body):
                    return body
                await asyncio.sleep(0.01)

    async def session(self, session_id: str, state: str) -> dict[str, Any]:
        """The session once it is in `state`."""
        return dict(await self.poll(f"/api/sessions/{session_id}", lambda body: body["state"] == state))


def of_kind(node: Any, body: str) -> list[RankCommand]:
    """The commands of one kind that a node was sent."""
    return [command for command in node.commands if command.WhichOneof("body") == body]


async def report(node: Any, **values: Any) -> None:
    """Say something as the trunk's only rank."""
    await node.event(of_kind(node, "assign")[0], experts=ExpertReport(**values))


async def join_able(mesh: Any, new_node: Any, **memory: int) -> dict[str, Any]:
    """Nodes with so much memory, which describe a model with experts alike in every quantisation."""

    def describe(order: Any) -> Described:
        return Described(profile=expert_profile(), beside=[expert_profile() for _ in order.model.beside])

    joined = {}
    for name, size in memory.items():
        joined[name] = await mesh.join(new_node(name, memory=size))
        joined[name].on_describe = describe
    return joined


@pytest.fixture
async def mesh(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    """Its parameter, if it has one, is what idle sessions must save to be planned anew."""
    # Orchestrator, nodes and clients are one process here, which may be busy for long where other processes are, too.
    monkeypatch.setattr("motley.orchestrator.mesh.nodes.SILENCE_S", 60.0)
    where = {"grpc_port": 0, "http_port": 0, "state_dir": tmp_path / "state"}
    config = OrchestratorConfig(host="127.0.0.1", rebalance_at=getattr(request, "param", 0.0), **where)
    orchestrator = Orchestrator(config)
    await orchestrator.start()
    async with aiohttp.ClientSession(orchestrator.http_url) as http:
        mesh = Mesh(orchestrator, http)
        yield mesh
    await asyncio.gather(*(node.leave() for node in mesh.nodes))
    await orchestrator.stop()


@pytest.fixture(name="motley")
def _motley(mesh: Any) -> Callable[..., Awaitable[tuple[int, str, str]]]:
    """Runs a command against the mesh: status, stdout, stderr."""

    async def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
        environment = {"MOTLEY_URL": mesh.orchestrator.http_url, **environment}
        # How wide its tables are, it finds out while it starts.
        return await (motley if "COLUMNS" in environment else in_thread)(*arguments, **environment)

    return run


@pytest.fixture
async def bard(mesh: Mesh) -> ScriptedNode:
    """The only node of `mesh`, which serves a model named "bard"."""
    node = await mesh.join(ScriptedNode())
    await mesh.serve()
    return node


@pytest.fixture
def new_node() -> type[ScriptedNode]:
    return ScriptedNode


@pytest.fixture
def profile() -> ModelProfile:
    return small_profile()


@pytest.fixture
def moe() -> ModelProfile:
    """Of a model with experts."""
    return expert_profile()


@pytest.fixture
async def nodes(mesh: Any, new_node: Any, moe: ModelProfile) -> list[Any]:
    """Three nodes that know a model with experts; the first is the fastest."""
    joined = []
    for number, name in enumerate(["pc", "laptop", "box"]):
        node = new_node(name, bandwidth=(10 - number) * 1e9, zone="attic" if name == "box" else "")
        node.on_describe = lambda _: Described(profile=moe)
        joined.append(await mesh.join(node))
    return joined
