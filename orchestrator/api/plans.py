"""Plans that nobody carries out: ``POST /api/plan`` says who would have what of a model, and what that would take."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from motley.orchestrator.api.body import Fields, is_text, read_json
from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.api.session_parameters import session_request
from motley.orchestrator.links import UNKNOWN_BANDWIDTH, UNKNOWN_LATENCY_S
from motley.orchestrator.planning.choice import Choice
from motley.orchestrator.planning.cost import Forecast
from motley.orchestrator.planning.machines import Machine, what_if
from motley.orchestrator.planning.shares import Candidate
from motley.orchestrator.serving.errors import ServingError
from motley.orchestrator.serving.forecasts import Forecasts, Planned
from motley.orchestrator.session_request import MAX_SEQUENCES
from motley.protocol import MAX_RANKS

UNSERVABLE = 422
"""A model that a node cannot describe."""
OWN = ("requests", "what_if", "machines")
"""Fields beside those of a session."""


class PlansApi:
    def __init__(self, forecasts: Forecasts) -> None:
        self._forecasts = forecasts

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/api/plan", self.plan)]

    async def plan(self, request: web.Request) -> web.Response:
        """Plan a session, described as for ``POST /api/sessions``, for so many ``requests`` at a time, with machines
        that are not there: ``what_if`` beside the nodes, or ``machines`` in their place."""
        body = await read_json(request)
        own, rest = _parted(body)
        requests = own.integer("requests", 1, MAX_SEQUENCES) or 1
        machines, alone = _machines(own)
        try:
            planned = await self._forecasts.plan(session_request(rest), requests, machines, alone=alone)
        except ServingError as error:
            raise ApiError.from_failure(error.failure, UNSERVABLE) from error
        return web.json_response(plan_json(planned))


def _parted(body: object) -> tuple[Fields, object]:
    """The fields beside those of a session, and the rest."""
    if not isinstance(body, dict):
        return Fields({}), body
    rest = {name: value for name, value in body.items() if name not in OWN}
    return Fields({name: value for name, value in body.items() if name in OWN}), rest


def _machines(own: Fields) -> tuple[list[Machine], bool]:
    """Machines that are not there, and whether they are in the place of the nodes.

    Raises:
        ApiError: 400, naming the field.
    """
    told, wanted = own.take("machines"), own.take("what_if")
    if told is not None and wanted is not None:
        own.refuse("what_if", "is beside the nodes that are there, machines are in their place: leave out one")
    found = []
    for each in _listed(own, "what_if", wanted):
        if not is_text(each):
            own.refuse("what_if", "must be a list of texts like 'RTX 4070 12GB, 1Gbit'")
        try:
            found.append(what_if(each))
        except ValueError as error:
            own.refuse("what_if", str(error))
    names = set[str]()
    for index, each in enumerate(_listed(own, "machines", told)):
        machine = _machine(Fields(each, f"machines[{index}]"))
        if machine.offer.name in names:
            own.refuse(f"machines[{index}].name", f"{machine.offer.name!r} is that of another, too")
        names.add(machine.offer.name)
        found.append(machine)
    return found, told is not None


def _listed(own: Fields, name: str, value: object) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_RANKS:
        own.refuse(name, f"must be a list of 1 to {MAX_RANKS}")
    return value


def _machine(fields: Fields) -> Machine:
    """A machine that is described: by a device that is known, or by numbers.

    Raises:
        ApiError: 400, naming the field.
    """
    name = fields.string("name")
    if not name:
        fields.refuse("name", "is missing", "missing_parameter")
    device = fields.string("device")
    speed = fields.number("gb_per_s", 0, 1e6, above=True)
    memory = fields.number("memory_gb", 0, 1e6, above=True)
    rows = fields.number("row_gb_per_s", 0, 1e9, above=True)
    call_us = fields.number("call_us", 0, 1e6)
    latency_ms = fields.number("latency_ms", 0, 1e4)
    mbit = fields.number("mbit_per_s", 0, 1e7, above=True)
    fields.finish()
    if device is not None:
        try:
            known = what_if(device).offer
        except ValueError as error:
            fields.refuse("device", str(error))
    elif speed is None or memory is None:
        fields.refuse("gb_per_s", "and memory_gb are needed, or a device that is known", "missing_parameter")
    else:
        known = Candidate(name, 1.0, 0)
    return Machine(
        Candidate(
            name,
            1e9 * speed if speed else known.speed,
            int(1e9 * memory) if memory else known.memory,
            row_speed=1e9 * (rows or 0.0),
            call_s=1e-6 * (call_us or 0.0),
        ),
        UNKNOWN_LATENCY_S if latency_ms is None else 1e-3 * latency_ms,
        1e6 / 8 * mbit if mbit else UNKNOWN_BANDWIDTH,
    )


def plan_json(planned: Planned) -> dict[str, Any]:
    """A plan as clients see it."""
    profile, choice = planned.profile, planned.choice
    return {
        "plan": {
            "kind": "tensor",
            "ranks": [
                {
                    "node": planned.names[number],
                    "layers": profile.layers,
                    "kv_groups": len(plan.attention) / plan.attention_split,
                    "mlp_blocks": len(plan.mlp),
                    "vocab_blocks": len(plan.vocabulary),
                    "memory_mb": round(plan.memory_bytes / 1e6, 1),
                }
                for number, plan in zip(choice.members, choice.plans, strict=True)
            ],
        },
        "forecast": forecast_json(choice.forecast),
        "alternatives": [_alternative(planned, other) for other in planned.runners_up.others],
        "without": [
            {"node": name, "ms_per_token": None if seconds is None else _ms(seconds)}
            for name, seconds in zip(planned.names, planned.runners_up.without, strict=True)
        ],
    }


def forecast_json(forecast: Forecast) -> dict[str, float]:
    """What a token is forecast to take, and where that time goes."""
    return {
        "ms_per_token": _ms(forecast.token_s),
        "compute_ms": _ms(forecast.compute_s),
        "wire_ms": _ms(forecast.wire_s),
        "wait_ms": _ms(forecast.wait_s),
        "ttft_ms": _ms(forecast.first_s),
    }


def _alternative(planned: Planned, other: Choice) -> dict[str, Any]:
    return {
        "kind": "tensor",
        "nodes": [planned.names[number] for number in other.members],
        "ms_per_token": _ms(other.forecast.token_s),
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
