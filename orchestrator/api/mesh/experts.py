"""The experts of a session as clients see and move them: the map of which host has which, and rebalancing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.api.mesh.sessions import find_session
from motley.orchestrator.experts.hosts import ExpertHost
from motley.orchestrator.experts.registry import ExpertMap
from motley.orchestrator.planning.placement.terms import ExpertKey
from motley.orchestrator.serving.upkeep import Upkeep
from motley.orchestrator.sessions.session import Session
from motley.orchestrator.sessions.table import SessionTable

GROUPS = 8
"""Groups of consecutive layers that are shown, at most."""


class ExpertsApi:
    def __init__(self, sessions: SessionTable, upkeep: Upkeep) -> None:
        self._sessions = sessions
        self._upkeep = upkeep

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/sessions/{id}/experts", self.experts),
            web.post("/api/sessions/{id}/experts/rebalance", self.rebalance),
        ]

    async def experts(self, request: web.Request) -> web.Response:
        """Which hosts have which experts, by groups of layers; with ``?layers=each``, every layer by itself."""
        layers = request.query.get("layers")
        if layers not in (None, "each"):
            raise ApiError(400, f"layers can be 'each', not {layers!r}", param="layers", code="invalid_value")
        session = find_session(self._sessions, request)
        if session.experts is None:
            message = f"the experts of {session.name!r} are not on hosts: it has none, or they are in its ranks' shares"
            raise ApiError(409, message, code="no_expert_hosts")
        return web.json_response(experts_json(session, session.experts, each=layers == "each"))

    async def rebalance(self, request: web.Request) -> web.Response:
        """Move experts where that shortens the longest time that a host is busy; answers when that was decided."""
        answer = await self._upkeep.rebalance(find_session(self._sessions, request))
        moved = answer.fetches if answer.worthwhile else 0
        after = answer.placement.seconds_per_token if answer.worthwhile else answer.cost_now
        return web.json_response({"moves": moved, "busy_ms": 1e3 * answer.cost_now, "busy_ms_after": 1e3 * after})


def experts_json(session: Session, experts: ExpertMap, each: bool = False) -> dict[str, Any]:
    """The map of a session's experts: by expert and group of layers, the hosts that have it.

    ``load`` of an expert is how often it is chosen lately, 1 being its even share; of a host, its part of all rows so
    far. A host has an expert in so many layers of a group, by state: ``serving``, ``fetching``, ``leaving``, or
    ``dead`` where a replica is missing that a lost host had.

    Args:
        each: show every layer by itself, as a group of its own.
    """
    states = _states(experts)
    even = session.profile.experts_per_token / session.profile.expert_count
    load = experts.loads.per_token() / even
    rows = sum(_rows(host) for host in experts.hosts)
    replicas = Counter(key for host in experts.hosts for key in host.serving)
    return {
        "session": session.id,
        "name": session.name,
        "replicas": {"asked": experts.replicas, "least": min(replicas[key] for key in experts.keys)},
        "short": experts.short or None,
        "waiting_for": session.waiting_for,
        "moves": len(experts.moves) + sum(len(host.fetching) for host in experts.hosts) if session.alive else 0,
        "placement": experts.version,
        "experts": session.profile.expert_count,
        "experts_per_token": session.profile.experts_per_token,
        "bytes_out": sum(out for out, _ in experts.traffic.values()),
        "bytes_in": sum(back for _, back in experts.traffic.values()),
        "hosts": [_host_json(host, rows) for host in experts.hosts],
        "groups": [
            _group_json(experts, places.tolist(), load, states)
            for places in np.array_split(np.arange(len(experts.layers)), len(experts.layers) if each else GROUPS)
            if len(places)
        ],
    }


def _states(experts: ExpertMap) -> list[dict[ExpertKey, str]]:
    """By number of the host: the state of each expert that it has or had."""
    served = Counter(key for host in experts.hosts for key in host.serving)
    return [
        dict.fromkeys((key for key in host.ordered if served[key] < experts.replicas), "dead")
        if host.gone
        else {
            **dict.fromkeys(host.fetching, "fetching"),
            **dict.fromkeys(host.serving, "serving"),
            **dict.fromkeys(host.retiring, "leaving"),
        }
        for host in experts.hosts
    ]


def _group_json(
    experts: ExpertMap, places: Sequence[int], load: NDArray[np.float64], states: list[dict[ExpertKey, str]]
) -> dict[str, Any]:
    layers = [experts.layers[place] for place in places]
    loads = load[places].mean(axis=0).tolist()
    shown = []
    for index, own in enumerate(loads):
        counts = Counter(
            (number, state)
            for number, has in enumerate(states)
            for layer in layers
            if (state := has.get((layer, index))) is not None
        )
        hosts = [{"host": host, "state": state, "layers": count} for (host, state), count in counts.items()]
        shown.append({"index": index, "load": round(own, 3), "hosts": hosts})
    return {"layers": layers, "experts": shown}


def _host_json(host: ExpertHost, rows: int) -> dict[str, Any]:
    own = _rows(host)
    return {
        "host": host.number,
        "rank": host.index,
        "node": host.name,
        "zone": host.zones or None,
        "state": host.state,
        "lost": host.lost or None,
        "restarts": host.restarts,
        "serving": len(host.serving),
        "fetching": len(host.fetching),
        "rows": own,
        "load": own / rows if rows else 0.0,
        "round_trip_ms": 1e3 * max((link.round_trip_s for link in host.links.values()), default=0.0),
        "busy_s": sum(link.busy_s for link in host.links.values()),
        "wait_s": sum(link.wait_s for link in host.links.values()),
        "stalls_ms": [1e3 * stall for stall in host.stalls_s],
    }


def _rows(host: ExpertHost) -> int:
    return sum(link.rows for link in host.links.values())
