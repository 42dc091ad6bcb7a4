"""Nodes as clients see them: who is in the mesh, or was until lately, what each offers and does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from aiohttp import web
from pydantic import AfterValidator, Field, TypeAdapter

from motley.orchestrator.api.access.guard import CALLER
from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.api.schema import Body, Text, read, read_json
from motley.orchestrator.mesh.links import LinkTable
from motley.orchestrator.mesh.nodes import Node, NodeTable
from motley.orchestrator.serving.orders import Orders
from motley.orchestrator.serving.replanning.rearranging import Rearranging
from motley.orchestrator.sessions.table import SessionTable
from motley.orchestrator.store.keys import Scope
from motley.protocol.devices import ALL, GPU, is_device
from motley.protocol.mesh_pb2 import BudgetOrder, FormatSpeed, LeaseOrder


def _device(text: str) -> str:
    if not is_device(text):
        raise ValueError("it is all, cpu, or gpu: and a number")
    return text


class LeaseBody(Body):
    """What ``PUT /api/nodes/{name}/lease`` takes."""

    device: Annotated[Text, AfterValidator(_device)] = ALL
    """`all`, `cpu`, or `gpu:0`."""
    holder: Annotated[Text, Field(min_length=1, max_length=200)]
    """Who takes it, for people."""
    reason: Annotated[Text, Field(max_length=200)] = ""
    """What for, for people."""
    seconds: Annotated[float, Field(gt=0, le=1e6)] = 7200.0
    """After which it ends by itself; a node has a limit."""


class BudgetBody(Body):
    """What ``PUT /api/nodes/{name}/budget`` takes. A key that is left out stays as it is."""

    memory_bytes: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    """That ranks may have there; 0: what is available."""
    gpu_bytes: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    """That ranks may have of its first GPU; 0: what is free."""


LEASE = TypeAdapter(LeaseBody)
BUDGET = TypeAdapter(BudgetBody)


class NodesApi:
    def __init__(
        self,
        nodes: NodeTable,
        sessions: SessionTable,
        links: LinkTable,
        rearranging: Rearranging,
        orders: Orders,
    ) -> None:
        self._nodes = nodes
        self._sessions = sessions
        self._links = links
        self._rearranging = rearranging
        self._orders = orders

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/nodes", self.nodes),
            web.post("/api/nodes/{name}/leave", self.leave),
            web.put("/api/nodes/{name}/lease", self.lease),
            web.delete("/api/nodes/{name}/lease", self.end_lease),
            web.put("/api/nodes/{name}/budget", self.budget),
        ]

    async def lease(self, request: web.Request) -> web.Response:
        """Take a device of a node back for a while; answers when that is written there, and sessions make way then."""
        name = _checked_owner(request, "take")
        asked = read(LEASE, await read_json(request))
        order = LeaseOrder(device=asked.device, holder=asked.holder, reason=asked.reason, seconds=asked.seconds)
        return web.json_response(self._node_json(await self._orders.lease(name, order)))

    async def end_lease(self, request: web.Request) -> web.Response:
        """End the lease of a node's machine, whoever has it."""
        name = _checked_owner(request, "give back")
        return web.json_response(self._node_json(await self._orders.lease(name, LeaseOrder(give=True))))

    async def budget(self, request: web.Request) -> web.Response:
        """Let ranks have so much of a node's memory, or of its GPU's, from now on; sessions that have more make way."""
        name = _checked_owner(request, "say what ranks may have of")
        asked = read(BUDGET, await read_json(request))
        order = BudgetOrder(memory_bytes=asked.memory_bytes, gpu_bytes=asked.gpu_bytes)
        return web.json_response(self._node_json(await self._orders.budget(name, order)))

    async def leave(self, request: web.Request) -> web.Response:
        """Have a node leave the mesh once its sessions go on without it; answers when it has been told to."""
        name = _checked_owner(request, "send away")
        moved = await self._rearranging.leave(name)
        return web.json_response({"node": name, "moved": moved})

    async def nodes(self, _: web.Request) -> web.Response:
        return web.json_response({"nodes": [self._node_json(node) for node in self._nodes]})

    def _node_json(self, node: Node) -> dict[str, Any]:
        capabilities = node.capabilities
        return {
            "id": node.id,
            "name": node.name,
            "zone": node.capabilities.zone or None,
            "state": node.state,
            "lost": node.lost or None,
            "gone_s": None if node.alive else round(self._nodes.gone_s(node), 3),
            "colour": node.colour,
            "address": node.address,
            "version": node.version,
            "platform": capabilities.platform,
            "cpu": capabilities.cpu,
            "cores": capabilities.cores,
            "engines": [
                {
                    "name": engine.name,
                    "on_gpu": engine.on_gpu,
                    "lacking": engine.lacking or None,
                    "memory_bandwidth": engine.memory_bandwidth or None,
                    "layer_us": round(1e6 * engine.layer_s, 1) or None,
                    "host_us": round(1e6 * engine.host_s, 1) or None,
                    "speeds": _speeds_json(engine.speeds),
                }
                for engine in capabilities.engines
            ],
            "expert_engines": list(capabilities.expert_engines),
            "gpus": [
                {
                    "name": gpu.name,
                    "kind": gpu.kind or None,
                    "memory_bytes": gpu.memory_bytes,
                    "free_bytes": gpu.free_bytes,
                    "driver": gpu.driver,
                    "compute_capability": gpu.compute_capability,
                    "multiprocessors": gpu.multiprocessors or None,
                    "memory_bandwidth": gpu.memory_bandwidth or None,
                    "users": [
                        {"pid": user.pid, "name": user.name or None, "bytes": user.bytes or None} for user in gpu.users
                    ],
                }
                for gpu in node.gpus
            ],
            "cannot_train": capabilities.cannot_train or None,
            "no_gpu": capabilities.no_gpu or None,
            "memory_bandwidth": capabilities.memory_bandwidth,
            "speeds": _speeds_json(capabilities.speeds),
            "links": self._links_json(node),
            "aside_s": round(self._nodes.aside_s(node), 3) or None,
            "lease": _lease_json(node),
            "memory_bytes": capabilities.memory_bytes,
            "gpu_budget_bytes": capabilities.gpu_bytes or None,
            "memory_available_bytes": node.memory_available or None,
            "memory_reserved_bytes": self._sessions.reserved(node.id),
            "memory_used_bytes": self._sessions.held(node.id),
            "silence_s": round(self._nodes.silence_s(node), 3),
            "ranks": [
                {"session": session.id, "model": session.name, "rank": rank.index}
                for session in self._sessions
                for rank in session.ranks
                if rank.node_id == node.id and not rank.gone
            ],
            "expert_hosts": [
                {"session": session.id, "model": session.name, "host": host.number}
                for session in self._sessions
                for host in (session.experts.hosts if session.experts else ())
                if not host.gone and any(worker.node_id == node.id for worker in host.group)
            ],
        }

    def _relay_name(self, node: Node, other: Node) -> str | None:
        """The node by which two meet that are apart; None: there is none."""
        relay = self._links.relay(node, other)
        return next((each.name for each in self._nodes if each.id == relay), None)

    def _links_json(self, node: Node) -> list[dict[str, Any]]:
        """What a node has found of its ways to the others."""
        ways = [(other, self._links.of(node, other)) for other in self._nodes if other.alive]
        return [
            {
                "to": other.name,
                "latency_ms": None if way.failure else 1e3 * way.latency_s,
                "bandwidth": None if way.failure else way.bandwidth,
                "failure": way.failure or None,
                "relay": self._relay_name(node, other) if way.failure else None,
            }
            for other, way in ways
            if way is not None
        ]


def _speeds_json(speeds: Iterable[FormatSpeed]) -> list[dict[str, Any]]:
    return [
        {"format": each.format, "bytes_per_s": each.bytes_per_s, "row_bytes_per_s": each.row_bytes_per_s}
        for each in speeds
    ]


def _lease_json(node: Node) -> dict[str, Any]:
    """Whether somebody has taken a device of a node back."""
    lease = node.lease
    return {
        "state": lease.state or "normal",
        "device": lease.device or None,
        "words": node.taken_back(on_gpu=lease.device.startswith(GPU)) or None,
        "holder": lease.holder or None,
        "reason": lease.reason or None,
        "expires_at": lease.expires_at or None,
        "trouble": lease.trouble or None,
    }


def _checked_owner(request: web.Request, what: str) -> str:
    """The name of the node that a request is about.

    Raises:
        ApiError: 403, the caller is neither that node itself nor an admin.
    """
    caller, name = request[CALLER], request.match_info["name"]
    if caller.scope is not Scope.ADMIN and caller.name != f"node {name}":
        message = f"{caller.name} may not {what} {name!r}: that takes a key of scope admin, or is done on that machine"
        raise ApiError(403, message, code="insufficient_scope")
    return name
