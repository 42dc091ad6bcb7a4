"""Nodes as clients see them: who is in the mesh, or was until lately, what each offers and does."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.links import LinkTable
from motley.orchestrator.nodes import Node, NodeTable
from motley.orchestrator.serving.errors import ServingError
from motley.orchestrator.serving.rearranging import Rearranging
from motley.orchestrator.session_table import SessionTable


class NodesApi:
    def __init__(self, nodes: NodeTable, sessions: SessionTable, links: LinkTable, rearranging: Rearranging) -> None:
        self._nodes = nodes
        self._sessions = sessions
        self._links = links
        self._rearranging = rearranging

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/api/nodes", self.nodes), web.post("/api/nodes/{name}/leave", self.leave)]

    async def leave(self, request: web.Request) -> web.Response:
        """Have a node leave the mesh once its sessions go on without it; answers when it has been told to."""
        name = request.match_info["name"]
        try:
            moved = await self._rearranging.leave(name)
        except ServingError as error:
            raise ApiError.from_failure(error.failure) from error
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
            "no_gpu": capabilities.no_gpu or None,
            "memory_bandwidth": capabilities.memory_bandwidth,
            "speeds": [
                {"format": each.format, "bytes_per_s": each.bytes_per_s, "row_bytes_per_s": each.row_bytes_per_s}
                for each in capabilities.speeds
            ],
            "links": self._links_json(node),
            "memory_bytes": capabilities.memory_bytes,
            "memory_available_bytes": node.memory_available or None,
            "memory_reserved_bytes": self._sessions.reserved(node.id),
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

    def _links_json(self, node: Node) -> list[dict[str, Any]]:
        """What a node has found of its ways to the others."""
        ways = [(other.name, self._links.of(node, other)) for other in self._nodes if other.alive]
        return [
            {
                "to": name,
                "latency_ms": None if way.failure else 1e3 * way.latency_s,
                "bandwidth": None if way.failure else way.bandwidth,
                "failure": way.failure or None,
            }
            for name, way in ways
            if way is not None
        ]
