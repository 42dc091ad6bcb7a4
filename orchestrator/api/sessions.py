"""Sessions and nodes: what is served, by whom, and where the time goes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from aiohttp import web

from motley.orchestrator.api.body import Fields, is_number, is_text, read_json
from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.api.experts import experts_json
from motley.orchestrator.expert_hosts import ExpertHost
from motley.orchestrator.planning.layout import LAYOUTS
from motley.orchestrator.serving import Serving, ServingError
from motley.orchestrator.sessions import Session, SessionRequest
from motley.orchestrator.workers import Rank, Worker
from motley.protocol import BLOCKS, MAX_RANKS, MAX_TRUNK
from motley.protocol.mesh_pb2 import Timing

UNSERVABLE = 422
"""A model that a node cannot describe."""
QUANTISATIONS = ("fp32", "fp16", "int8", "int4", "stored")
INEXACT = ("cuda", "reference", "tensorrt", "tensorrt-whole")
"""Engines that cannot keep exact=true. One of somebody else's says so itself, when its ranks start."""


class SessionsApi:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/sessions", self.sessions),
            web.post("/api/sessions", self.create),
            web.get("/api/sessions/{id}", self.session),
            web.delete("/api/sessions/{id}", self.delete),
            web.get("/api/sessions/{id}/experts", self.experts),
            web.post("/api/sessions/{id}/experts/rebalance", self.rebalance),
        ]

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

    async def experts(self, request: web.Request) -> web.Response:
        """Which hosts have which experts, by groups of layers; with ``?layers=each``, every layer by itself."""
        layers = request.query.get("layers")
        if layers not in (None, "each"):
            raise ApiError(400, f"layers can be 'each', not {layers!r}", param="layers", code="invalid_value")
        session = self._find(request)
        if session.experts is None:
            message = f"the experts of {session.name!r} are not on hosts: it has none, or they are in its ranks' shares"
            raise ApiError(409, message, code="no_expert_hosts")
        return web.json_response(experts_json(session, session.experts, each=layers == "each"))

    async def rebalance(self, request: web.Request) -> web.Response:
        """Move experts where that shortens the longest time that a host is busy; answers when that was decided."""
        try:
            answer = await self._serving.rebalance(self._find(request))
        except ServingError as error:
            raise ApiError.from_failure(error.failure) from error
        moved = answer.fetches if answer.worthwhile else 0
        after = answer.placement.seconds_per_token if answer.worthwhile else answer.cost_now
        return web.json_response({"moves": moved, "busy_ms": 1e3 * answer.cost_now, "busy_ms_after": 1e3 * after})

    def _find(self, request: web.Request) -> Session:
        session_id = request.match_info["id"]
        session = self._serving.sessions.get(session_id)
        if session is None:
            raise ApiError(404, f"there is no session {session_id!r}", code="session_not_found")
        return session


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
    quantisation = fields.string("quantisation", choices=QUANTISATIONS) or "stored"
    quantisations = _by_node(fields, "quantisations", QUANTISATIONS)
    engines = _by_node(fields, "engines")
    block = fields.integer("block", BLOCKS[0], BLOCKS[-1])
    if block is not None and block not in BLOCKS:
        fields.refuse("block", f"must be one of {', '.join(map(str, BLOCKS))}, not {block}")
    if block is not None and {quantisation, *quantisations.values()} <= {"fp32", "fp16"}:
        fields.refuse("block", f"is for quantised weights: quantisation {quantisation!r} has no blocks; leave it out")
    request = SessionRequest(
        model=model,
        name=name or "",
        quantisation=quantisation,
        block=block or SessionRequest.block,
        nodes=tuple(nodes or ()),
        shares=tuple(map(float, shares or ())),
        context=fields.integer("context", 1, 2**31) or 0,
        engine=fields.string("engine") or SessionRequest.engine,
        quantisations=quantisations,
        engines=engines,
        engine_options=_strings(fields, "engine_options", "names of settings", "device"),
        wire=fields.string("wire", choices=("fp32", "bf16", "int8")) or "fp32",
        threads=fields.integer("threads", 1, 1024) or 0,
        exact=fields.boolean("exact"),
        experts=fields.string("experts", choices=LAYOUTS) or "auto",
        replicas=fields.integer("replicas", 1, MAX_RANKS) or 1,
        trunk=fields.integer("trunk", 1, MAX_TRUNK) or 1,
    )
    if request.experts == "sliced":
        for field in ("replicas", "trunk"):
            if getattr(request, field) > 1:
                fields.refuse(field, "is for experts on nodes of their own: leave out experts 'sliced'")
    if request.shares and (request.experts == "parallel" or request.replicas > 1 or request.trunk > 1):
        fields.refuse("shares", "are of sliced experts; where experts are on nodes of their own, leave them out")
    if request.exact and request.wire != "fp32":
        fields.refuse("wire", f"{request.wire!r} rounds sums by rank, which exact=true forbids: leave it out")
    if request.exact and request.engine in INEXACT:
        fields.refuse("engine", f"{request.engine!r} cannot keep exact=true; use engine 'onnxruntime'")
    for field, whole, own in (
        ("quantisations", request.quantisation, request.quantisations),
        ("engines", request.engine, request.engines),
    ):
        for node, unlike in own.items():
            if request.exact and unlike != whole:
                fields.refuse(
                    field,
                    f"of node {node!r} is {unlike!r}, of others {whole!r}: exact=true needs the same on all",
                )
    fields.finish()
    return request


def _by_node(fields: Fields, name: str, choices: Collection[str] = ()) -> dict[str, str]:
    """A JSON object from node names to strings; empty if absent."""
    value = _strings(fields, name, "node names", "gaming-pc")
    for node, own in value.items():
        if choices and own not in choices:
            fields.refuse(name, f"of node {node!r} must be one of {', '.join(choices)}, not {own!r}")
    return value


def _strings(fields: Fields, name: str, keys: str, example: str) -> dict[str, str]:
    """A JSON object of strings; empty if absent. `keys` says what they are by."""
    value = fields.take(name)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(map(is_text, (*value, *value.values()))):
        fields.refuse(name, f'must be an object of strings by {keys}, like {{"{example}": ...}}, not {value!r}')
    return dict(value)


def session_json(session: Session, steps: bool = False) -> dict[str, Any]:
    """A session as clients see it; with `steps`, the leader's latest decode steps too."""
    request, profile, failure = session.request, session.profile, session.failure
    hosts = session.experts.hosts if session.experts else []
    weights = sum(rank.plan.weight_bytes for rank in session.ranks) + sum(map(_held_bytes, hosts))
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
        "explained": session.explained,
        "created": int(session.created),
        "model": request.model,
        "family": profile.family,
        "parameters": profile.parameters,
        "fingerprint": profile.fingerprint,
        "quantisation": request.quantisation,
        "matrices": profile.matrices,
        "block": request.block,
        "context": session.context,
        "nodes": list(request.nodes),
        "shares": list(request.shares),
        "engine": request.engine,
        "quantisations": dict(request.quantisations),
        "engines": dict(request.engines),
        "engine_options": dict(request.engine_options),
        "wire": request.wire,
        "exact": request.exact,
        "threads": request.threads,
        "weight_bytes": weights,
        "ranks": [_rank_json(rank, weights) for rank in session.ranks],
        "experts": _layout(session),
        "replicas": request.replicas,
        "hosts": [_host_json(host, weights) for host in hosts],
        "waiting_for": session.waiting_for,
    }
    if steps:
        timing = session.ranks[0].timing if session.ranks else None
        body["step_ms"] = list(timing.step_ms) if timing else []
    return body


def _layout(session: Session) -> str | None:
    """None: the model has no experts, or is not planned yet."""
    if not session.ranks or not session.profile.expert_layers:
        return None
    return "parallel" if session.experts else "sliced"


def _worker_json(worker: Worker) -> dict[str, Any]:
    ready, loading = worker.ready, worker.loading
    return {
        "rank": worker.index,
        "node": worker.node_name,
        "state": worker.state,
        "address": worker.address or None,
        "loading": {"done_bytes": loading.done_bytes, "total_bytes": loading.total_bytes},
        "load_s": ready.load_s if ready else None,
        "memory": {
            "limit_bytes": worker.memory_limit,
            "planned_bytes": worker.memory_bytes,
            "share_bytes": ready.share_bytes if ready else None,
            "rss_bytes": ready.rss_bytes if ready else None,
            "peak_rss_bytes": None,
        },
    }


def _rank_json(rank: Rank, weights: int) -> dict[str, Any]:
    plan, timing = rank.plan, rank.timing
    body = _worker_json(rank)
    body["memory"]["peak_rss_bytes"] = timing.peak_rss_bytes if timing else None
    body["engine"], body["quantisation"] = rank.setup.engine, rank.setup.quantisation
    body["device"] = "gpu" if rank.setup.on_gpu else "cpu"
    body["share"] = {
        "fraction": plan.weight_bytes / weights if weights else 0.0,
        "weight_bytes": plan.weight_bytes,
        "attention_split": plan.attention_split,
        "attention": len(plan.attention),
        "mlp": len(plan.mlp),
        "vocabulary": len(plan.vocabulary),
    }
    body["timing"] = timing and _timing_json(timing)
    return body


def _host_json(host: ExpertHost, weights: int) -> dict[str, Any]:
    held = _held_bytes(host)
    workers = [_worker_json(worker) for worker in host.group]
    slices = [{"node": worker.node_name, "slices": len(worker.slices)} for worker in host.group]
    return {
        **_worker_json(host),
        "node": host.name,
        "group": slices if host.others else None,
        "loading": _summed([worker["loading"] for worker in workers]),
        "memory": _summed([worker["memory"] for worker in workers]),
        "host": host.number,
        "zone": host.zones or None,
        "lost": host.lost or None,
        "experts": 0 if host.gone else len(host.ordered),
        "fraction": held / weights if weights else 0.0,
        "weight_bytes": held,
    }


def _summed(bodies: Sequence[dict[str, int | None]]) -> dict[str, int | None]:
    """Key by key; None where one is not known."""
    columns = {key: [body[key] for body in bodies] for key in bodies[0]}
    return {key: None if None in values else sum(filter(None, values)) for key, values in columns.items()}


def _held_bytes(host: ExpertHost) -> int:
    return 0 if host.gone else host.weight_bytes * len(host.ordered)


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
