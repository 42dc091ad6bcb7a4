"""Sessions and nodes: what is served, by whom, and where the time goes."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from motley.orchestrator.api.body import Fields, is_number, is_text, read_json
from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.nodes import Node
from motley.orchestrator.serving import Serving, ServingError
from motley.orchestrator.sessions import Rank, Session, SessionRequest
from motley.protocol import BLOCKS, MAX_RANKS
from motley.protocol.mesh_pb2 import Timing

UNSERVABLE = 422
"""A model that a node cannot describe."""
INEXACT = ("cuda", "reference", "tensorrt")
"""Engines that cannot keep exact=true. One of somebody else's says so itself, when its ranks start."""


class SessionsApi:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/nodes", self.nodes),
            web.get("/api/sessions", self.sessions),
            web.post("/api/sessions", self.create),
            web.get("/api/sessions/{id}", self.session),
            web.delete("/api/sessions/{id}", self.delete),
        ]

    async def nodes(self, _: web.Request) -> web.Response:
        return web.json_response({"nodes": [self._node_json(node) for node in self._serving.nodes]})

    async def sessions(self, _: web.Request) -> web.Response:
        return web.json_response({"sessions": [session_json(session) for session in self._serving.sessions]})

    async def session(self, request: web.Request) -> web.Response:
        return web.json_response(session_json(self._find(request), steps=True))

    async def create(self, request: web.Request) -> web.Response:
        """Plan and start a session: 201 once it is accepted; with ``?wait=ready``, once it is ready."""
        wait = request.query.get("wait")
        if wait not in (None, "ready"):
            raise ApiError(400, f"wait can be 'ready', not {wait!r}", param="wait", code="invalid_value")
        wanted = session_request(await read_json(request))
        try:
            session = await self._serving.create(wanted)
        except ServingError as error:
            raise ApiError.from_failure(error.failure, UNSERVABLE) from error
        if wait:
            try:
                await self._serving.wait_ready(session)
            except ServingError as error:
                raise ApiError.from_failure(error.failure) from error
        return web.json_response(session_json(session), status=201)

    async def delete(self, request: web.Request) -> web.Response:
        """Release all ranks; answers when they are gone."""
        session = self._find(request)
        await self._serving.close(session)
        return web.json_response(session_json(session))

    def _find(self, request: web.Request) -> Session:
        session_id = request.match_info["id"]
        session = self._serving.sessions.get(session_id)
        if session is None:
            raise ApiError(404, f"there is no session {session_id!r}", code="session_not_found")
        return session

    def _node_json(self, node: Node) -> dict[str, Any]:
        capabilities = node.capabilities
        return {
            "id": node.id,
            "name": node.name,
            "state": "alive" if node.alive else "lost",
            "lost": node.lost or None,
            "address": node.address,
            "version": node.version,
            "platform": capabilities.platform,
            "cpu": capabilities.cpu,
            "cores": capabilities.cores,
            "engines": list(capabilities.engines),
            "gpus": [
                {
                    "name": gpu.name,
                    "memory_bytes": gpu.memory_bytes,
                    "free_bytes": gpu.free_bytes,
                    "driver": gpu.driver,
                    "compute_capability": gpu.compute_capability,
                }
                for gpu in capabilities.gpus
            ],
            "memory_bandwidth": capabilities.memory_bandwidth,
            "memory_bytes": capabilities.memory_bytes,
            "memory_available_bytes": node.memory_available or None,
            "memory_reserved_bytes": self._serving.sessions.reserved(node.id),
            "silence_s": round(self._serving.nodes.silence_s(node), 3),
            "ranks": [
                {"session": session.id, "model": session.name, "rank": rank.index}
                for session in self._serving.sessions
                for rank in session.ranks
                if rank.node_id == node.id and not rank.gone
            ],
        }


def session_request(body: object) -> SessionRequest:
    """The body of ``POST /api/sessions``.

    Raises:
        ApiError: 400, naming the field.
    """
    fields = Fields(body)
    model = fields.string("model")
    if not model:
        fields.refuse("model", "is missing: a local folder or a hub id", "missing_parameter")
    nodes = fields.take("nodes")
    if nodes is not None and not (_is_list(nodes) and all(is_text(name) for name in nodes)):
        fields.refuse("nodes", f"must be a list of 1 to {MAX_RANKS} node names, one per rank")
    shares = fields.take("shares")
    if shares is not None and not (
        _is_list(shares) and all(is_number(share) and 0 <= share <= 1e9 for share in shares) and any(shares)
    ):
        fields.refuse("shares", "must be a list of weights from 0 to 1e9, one per rank, not all 0")
    name = fields.string("name")
    if name is not None and (not name.strip() or "/" in name):
        fields.refuse("name", f"must not be blank or have a / in it, as {name!r} is; leave it out for the model's own")
    quantisation = fields.string("quantisation", choices=("fp32", "int8", "int4", "stored")) or "stored"
    block = fields.integer("block", BLOCKS[0], BLOCKS[-1])
    if block is not None and block not in BLOCKS:
        fields.refuse("block", f"must be one of {', '.join(map(str, BLOCKS))}, not {block}")
    if block is not None and quantisation == "fp32":
        fields.refuse("block", "is for quantised weights: quantisation 'fp32' has no blocks; leave it out")
    request = SessionRequest(
        model=model,
        name=name or "",
        quantisation=quantisation,
        block=block or SessionRequest.block,
        nodes=tuple(nodes or ()),
        shares=tuple(map(float, shares or ())),
        context=fields.integer("context", 1, 2**31) or 0,
        engine=fields.string("engine") or "onnxruntime",
        wire=fields.string("wire", choices=("fp32", "bf16", "int8")) or "fp32",
        threads=fields.integer("threads", 1, 1024) or 0,
        exact=fields.boolean("exact"),
    )
    if request.exact and request.wire != "fp32":
        fields.refuse("wire", f"{request.wire!r} rounds sums by rank, which exact=true forbids: leave it out")
    if request.exact and request.engine in INEXACT:
        fields.refuse("engine", f"{request.engine!r} cannot keep exact=true; use engine 'onnxruntime'")
    fields.finish()
    return request


def session_json(session: Session, steps: bool = False) -> dict[str, Any]:
    """A session as clients see it; with `steps`, the leader's latest decode steps too."""
    request, profile, failure = session.request, session.profile, session.failure
    weights = sum(rank.plan.weight_bytes for rank in session.ranks)
    body: dict[str, Any] = {
        "id": session.id,
        "name": session.name,
        "state": session.state,
        "failure": failure
        and {
            "code": failure.code,
            "message": failure.message,
            "rank": failure.lost_rank - 1 if failure.lost_rank else None,
        },
        "created": int(session.created),
        "model": request.model,
        "family": profile.family,
        "parameters": profile.parameters,
        "fingerprint": profile.fingerprint,
        "quantisation": request.quantisation,
        "matrices": profile.matrices,
        "block": request.block,
        "context": session.context,
        "engine": request.engine,
        "wire": request.wire,
        "exact": request.exact,
        "threads": request.threads,
        "weight_bytes": weights,
        "ranks": [_rank_json(rank, weights) for rank in session.ranks],
    }
    if steps:
        timing = session.ranks[0].timing if session.ranks else None
        body["step_ms"] = list(timing.step_ms) if timing else []
    return body


def _rank_json(rank: Rank, weights: int) -> dict[str, Any]:
    plan, ready, timing = rank.plan, rank.ready, rank.timing
    state = "gone" if rank.gone else "ready" if ready else "listening" if rank.address else "starting"
    return {
        "rank": rank.index,
        "node": rank.node_name,
        "state": state,
        "address": rank.address or None,
        "share": {
            "fraction": plan.weight_bytes / weights if weights else 0.0,
            "weight_bytes": plan.weight_bytes,
            "attention_split": plan.attention_split,
            "attention": len(plan.attention),
            "mlp": len(plan.mlp),
            "vocabulary": len(plan.vocabulary),
        },
        "loading": {"done_bytes": rank.loading.done_bytes, "total_bytes": rank.loading.total_bytes},
        "load_s": ready.load_s if ready else None,
        "memory": {
            "limit_bytes": rank.memory_limit,
            "planned_bytes": plan.memory_bytes,
            "share_bytes": ready.share_bytes if ready else None,
            "rss_bytes": ready.rss_bytes if ready else None,
            "peak_rss_bytes": timing.peak_rss_bytes if timing else None,
        },
        "timing": timing and _timing_json(timing),
    }


def _timing_json(timing: Timing) -> dict[str, Any]:
    """Means per decoded token since the session began."""
    tokens = max(1, timing.tokens)
    return {
        "tokens": timing.tokens,
        "compute_ms": 1e3 * timing.compute_s / tokens,
        "wire_ms": 1e3 * timing.wire_s / tokens,
        "wait_ms": 1e3 * timing.wait_s / tokens,
        "collectives": timing.collectives / tokens,
    }


def _is_list(value: object) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= MAX_RANKS
