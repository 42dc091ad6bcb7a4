"""Sessions as clients make, see and end them: what is served, by whom, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from aiohttp import web

from motley.orchestrator.api.errors import UNSERVABLE, ApiError
from motley.orchestrator.api.mesh.adapters import adapters_json
from motley.orchestrator.api.mesh.plans import forecast_json
from motley.orchestrator.api.mesh.session_parameters import session_request
from motley.orchestrator.api.schema import read_json
from motley.orchestrator.experts.hosts import ExpertHost
from motley.orchestrator.planning.choosing.arrangement import kind_of
from motley.orchestrator.serving.errors import ServingError
from motley.orchestrator.serving.lifecycle import Lifecycle
from motley.orchestrator.serving.replanning.rearranging import GAIN, Rearranging
from motley.orchestrator.sessions.facts import State
from motley.orchestrator.sessions.losses import Loss
from motley.orchestrator.sessions.missed_nodes import missed_nodes
from motley.orchestrator.sessions.session import Session
from motley.orchestrator.sessions.table import SessionTable
from motley.orchestrator.usual_sampling import usual
from motley.orchestrator.workers import CacheHolder, Rank, Worker, decode_steps
from motley.protocol.mesh_pb2 import Activity, FarTier, Timing


class SessionsApi:
    def __init__(self, sessions: SessionTable, lifecycle: Lifecycle, rearranging: Rearranging) -> None:
        self._sessions = sessions
        self._lifecycle = lifecycle
        self._rearranging = rearranging

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/sessions", self.sessions),
            web.post("/api/sessions", self.create),
            web.get("/api/sessions/{id}", self.session),
            web.delete("/api/sessions/{id}", self.delete),
            web.post("/api/sessions/{id}/rebalance", self.rebalance),
        ]

    async def sessions(self, _: web.Request) -> web.Response:
        return web.json_response({"sessions": [session_json(session) for session in self._sessions]})

    async def session(self, request: web.Request) -> web.Response:
        return web.json_response(session_json(find_session(self._sessions, request), steps=True))

    async def create(self, request: web.Request) -> web.Response:
        """Plan and start a session: 201 once it is accepted; with ``?wait=ready``, once it is ready."""
        wait = request.query.get("wait")
        if wait not in (None, "ready"):
            raise ApiError(400, f"wait can be 'ready', not {wait!r}", param="wait", code="invalid_value")
        wanted = session_request(await read_json(request))
        try:
            session = await self._lifecycle.create(wanted)
        except ServingError as error:
            raise ApiError.of(error, UNSERVABLE) from error
        if wait:
            await self._lifecycle.wait_ready(session)
        return web.json_response(session_json(session), status=201)

    async def rebalance(self, request: web.Request) -> web.Response:
        """Plan a session anew if that makes it quicker, or, with ``?force=true``, in any case; answers when it is ready
        again."""
        session, force = find_session(self._sessions, request), request.query.get("force", "false")
        if force not in ("true", "false"):
            raise ApiError(400, f"force can be 'true' or 'false', not {force!r}", param="force", code="invalid_value")
        told = await self._rearranging.rebalance(session, -1.0 if force == "true" else GAIN)
        body = {"changed": told.changed, "before_ms": told.before_ms, "after_ms": told.after_ms}
        return web.json_response({**body, "session": session_json(session)})

    async def delete(self, request: web.Request) -> web.Response:
        """Release all ranks; answers when they are gone."""
        session = find_session(self._sessions, request)
        await self._lifecycle.close_for_good(session)
        return web.json_response(session_json(session))


def find_session(sessions: SessionTable, request: web.Request) -> Session:
    """The session whose id is in the path of a request.

    Raises:
        ApiError: 404, there is none.
    """
    session_id = request.match_info["id"]
    session = sessions.get(session_id)
    if session is None:
        raise ApiError(404, f"there is no session {session_id!r}", code="session_not_found")
    return session


def session_json(session: Session, steps: bool = False) -> dict[str, Any]:
    """A session as clients see it: what was asked for, what was made of it, and how that is going.

    Args:
        steps: tell the leader's latest decode steps too, and where the time of the latest ones went on every rank.
    """
    request, profile, failure = session.request, session.profile, session.failure
    hosts = session.experts.hosts if session.experts else []
    weights = sum(rank.plan.weight_bytes for rank in session.ranks) + sum(map(_held_bytes, hosts))
    body: dict[str, Any] = {
        **request.to_json(),
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
        "epoch": session.epoch,
        "interrupted_by": _interrupted_by(session),
        "missed_nodes": missed_nodes(session),
        "no_part": [each._asdict() for each in session.no_part],
        "losses": [_loss_json(loss) for loss in session.losses.last],
        "created": int(session.created),
        "family": profile.family,
        "parameters": profile.parameters,
        "fingerprint": profile.fingerprint,
        "chats": profile.chats,
        "sampling": usual(profile.sampling),
        "matrices": profile.matrices,
        "context": session.caches.context,
        "cache_tokens": session.caches.tokens,
        "cache_disk_tokens": session.caches.disk_tokens,
        "cache_node_tokens": session.caches.node_tokens,
        "experts": _layout(session),
        "weight_bytes": weights,
        "kind": kind_of([rank.plan for rank in session.ranks]) if session.ranks else None,
        "ranks": [_rank_json(rank, weights) for rank in session.ranks],
        "hosts": [_host_json(host, weights) for host in hosts],
        "cache_holders": [_holder_json(holder) for holder in session.holders],
        "known_adapters": adapters_json(session),
        "waiting_for": session.waiting_for,
        "activity": _activity_json(session),
        "forecast": session.forecast and forecast_json(session.forecast),
        **_measured_json(session),
    }
    if steps:
        timing = session.ranks[0].timing if session.ranks else None
        body["step_ms"] = list(timing.step_ms) if timing else []
        for rank, told in zip(session.ranks, body["ranks"], strict=True):
            told["steps"] = asdict(rank.steps)
    return body


def _interrupted_by(session: Session) -> str | None:
    """Why a session is planned anew now, or paused; None: it is not."""
    if session.state is State.PAUSED and session.pause:
        return session.pause.why.message
    return session.interruption.why.message if session.state is State.RECOVERING and session.interruption else None


def _loss_json(loss: Loss) -> dict[str, Any]:
    """A rank that was lost, after which the session got another plan, or is to get one."""
    return {"epoch": loss.epoch, "node": loss.node or None, "code": loss.why.code, "message": loss.why.message}


def _measured_json(session: Session) -> dict[str, float | None]:
    """What the leader's latest steps have taken in the mean, and what that is for each token of a request: a step gives
    it one, and as many more as were guessed rightly. The forecast is of a step without guesses. None: there were none.
    """
    timing = session.ranks[0].timing if session.ranks else None
    if not (timing and timing.step_ms):
        return {"measured_ms_per_step": None, "measured_ms_per_token": None, "tokens_per_step": None}
    step_ms = mean(timing.step_ms)
    guessed = session.activity.accepted_drafts if session.activity else 0
    tokens = 1 + guessed / max(1, timing.tokens)
    measured = {"measured_ms_per_step": step_ms, "measured_ms_per_token": step_ms / tokens, "tokens_per_step": tokens}
    return {name: round(value, 3) for name, value in measured.items()}


def _layout(session: Session) -> str | None:
    """How the experts are laid out; None: the model has none, or the session is not planned yet."""
    if not session.ranks or not session.profile.expert_layers:
        return None
    return "parallel" if session.experts else "sliced"


def _activity_json(session: Session) -> dict[str, Any] | None:
    """The fields of `Activity`, those that are 0 too; None: it answers nobody, or nobody has asked it yet."""
    activity = session.activity
    if activity is None or session.state is not State.READY:
        return None
    return {**_fields(activity), "adapters": list(activity.adapters), "far_tiers": [*map(_fields, activity.far_tiers)]}


def _fields(message: Activity | FarTier) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


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
    body["device"], body["chosen"] = "gpu" if rank.setup.on_gpu else "cpu", rank.setup.chosen or None
    body["share"] = {
        "fraction": plan.weight_bytes / weights if weights else 0.0,
        "weight_bytes": plan.weight_bytes,
        "layers": [plan.layers.start, plan.layers.stop] if plan.layers else None,
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


def _holder_json(holder: CacheHolder) -> dict[str, Any]:
    return {**_worker_json(holder), "of_rank": holder.rank, "bytes": holder.blocks_bytes, "lost": holder.lost or None}


def _summed(bodies: Sequence[dict[str, int | None]]) -> dict[str, int | None]:
    """Key by key; None where one is not known."""
    columns = {key: [body[key] for body in bodies] for key in bodies[0]}
    return {key: None if None in values else sum(filter(None, values)) for key, values in columns.items()}


def _held_bytes(host: ExpertHost) -> int:
    return 0 if host.gone else host.weight_bytes * len(host.ordered)


def _timing_json(timing: Timing) -> dict[str, Any]:
    """Means of a decode step, since the session was planned: one for all requests that were being answered then."""
    steps = decode_steps(timing)
    return {
        "tokens": timing.tokens,
        "steps": steps,
        "compute_ms": 1e3 * timing.compute_s / max(1, steps),
        "wire_ms": 1e3 * timing.wire_s / max(1, steps),
        "wait_ms": 1e3 * timing.wait_s / max(1, steps),
        "collectives": timing.collectives / max(1, steps),
    }
