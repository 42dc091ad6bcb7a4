"""Plans that nobody carries out: ``POST /api/plan`` says who would have what of a model, and what that would take."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

from aiohttp import web
from pydantic import ConfigDict, Field, TypeAdapter

from motley.orchestrator.api.errors import UNSERVABLE, ApiError
from motley.orchestrator.api.mesh.session_parameters import session_request
from motley.orchestrator.api.schema import Body, FieldError, Text, read, read_json
from motley.orchestrator.known_models.names import KNOWN, short_name_of
from motley.orchestrator.known_models.shapes import SHAPES
from motley.orchestrator.mesh.links import UNKNOWN_BANDWIDTH, UNKNOWN_LATENCY_S
from motley.orchestrator.planning.choosing.arrangement import Choice
from motley.orchestrator.planning.cost import PROMPT, Forecast
from motley.orchestrator.planning.cutting.shares import Candidate, RankPlan
from motley.orchestrator.planning.machines import DEVICES, Machine, what_if
from motley.orchestrator.serving.errors import ServingError
from motley.orchestrator.serving.plans.forecasts import Forecasts, Planned
from motley.orchestrator.session_request import SessionRequest
from motley.protocol import MAX_RANKS, MAX_SEQUENCES

Positive = Annotated[float, Field(gt=0, le=1e9)]


class MachineBody(Body):
    """A machine that is not there: by a device that is known, or by numbers."""

    name: Annotated[Text, Field(min_length=1)]
    device: Text | None = None
    """Such as "RTX 4070 12GB"; numbers beside it go before what is known of it."""
    gb_per_s: Positive | None = None
    """At which it reads weights."""
    memory_gb: Positive | None = None
    row_gb_per_s: Positive | None = None
    """Weights per second, times the rows that they are multiplied by, in a step of many."""
    call_us: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """That a small operation takes between two products."""
    latency_ms: Annotated[float, Field(ge=0, le=1e4)] | None = None
    """Of its link."""
    mbit_per_s: Positive | None = None


class PlanBody(Body):
    """What ``POST /api/plan`` takes beside the fields of a session."""

    model_config = ConfigDict(extra="allow")
    requests: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] = 1
    """At a time."""
    what_if: Annotated[list[Text], Field(min_length=1, max_length=MAX_RANKS)] | None = None
    """Machines beside the nodes, such as "RTX 4070 12GB, 1Gbit"."""
    machines: Annotated[list[MachineBody], Field(min_length=1, max_length=MAX_RANKS)] | None = None
    """Machines in place of the nodes."""
    by_shape: bool = False
    """Plan by the published sizes of a model that has a short name, whose files nobody needs to have."""


PLAN = TypeAdapter(PlanBody)


class PlansApi:
    def __init__(self, forecasts: Forecasts) -> None:
        self._forecasts = forecasts

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/api/plan", self.plan),
            web.get("/api/devices", self.devices),
            web.get("/api/known-models", self.known_models),
        ]

    async def devices(self, _: web.Request) -> web.Response:
        """The devices that are known by name, for ``what_if``."""
        return web.json_response({"devices": list(DEVICES)})

    async def known_models(self, _: web.Request) -> web.Response:
        """The models that have short names."""
        told = [{"name": name, "source": each.source, "quantisation": each.held} for name, each in KNOWN.items()]
        return web.json_response({"models": told})

    async def plan(self, request: web.Request) -> web.Response:
        """Plan a session, described as for ``POST /api/sessions``, for so many ``requests`` at a time, with machines
        that are not there: ``what_if`` beside the nodes, or ``machines`` in their place."""
        asked = read(PLAN, await read_json(request))
        machines = _machines(asked)
        wanted, config = session_request(asked.model_extra), ""
        if asked.by_shape:
            wanted, config = _by_shape(wanted)
        alone = asked.machines is not None
        try:
            planned = await self._forecasts.plan(wanted, asked.requests, machines, alone=alone, config=config)
        except ServingError as error:
            raise ApiError.of(error, UNSERVABLE) from error
        return web.json_response(plan_json(planned))


def _by_shape(wanted: SessionRequest) -> tuple[SessionRequest, str]:
    """A request to plan a model by its sizes alone, and these as its ``config.json``.

    Raises:
        FieldError: they are not known.
    """
    name = short_name_of(wanted.model)
    if not name:
        raise FieldError("model", f"has no short name, which by_shape is for; there are: {', '.join(KNOWN)}")
    # Files that are packed already have what they are packed in; sizes alone do not say so.
    held = KNOWN[name].held if wanted.quantisation == "stored" else wanted.quantisation
    return replace(wanted, quantisation=held), json.dumps(SHAPES[name])


def _machines(asked: PlanBody) -> list[Machine]:
    """Machines that are not there.

    Raises:
        FieldError: naming what is wrong.
    """
    if asked.machines is not None and asked.what_if is not None:
        raise FieldError("what_if", "is beside the nodes that are there, machines are in their place: leave out one")
    found = [_known(each, "what_if") for each in asked.what_if or ()]
    names = set[str]()
    for index, each in enumerate(asked.machines or ()):
        if each.name in names:
            raise FieldError(f"machines[{index}].name", f"{each.name!r} is that of another, too")
        names.add(each.name)
        found.append(_machine(each, f"machines[{index}]"))
    return found


def _known(told: str, path: str) -> Machine:
    try:
        return what_if(told)
    except ValueError as error:
        raise FieldError(path, str(error)) from error


def _machine(told: MachineBody, path: str) -> Machine:
    """
    Raises:
        FieldError: its device is not known, or lacks numbers.
    """
    if told.device is not None:
        known = _known(told.device, f"{path}.device").offer
    elif told.gb_per_s is None or told.memory_gb is None:
        why = "and memory_gb are needed, or a device that is known"
        raise FieldError(f"{path}.gb_per_s", why, "missing_parameter")
    else:
        known = Candidate(told.name, 1.0, 0)
    return Machine(
        Candidate(
            told.name,
            1e9 * told.gb_per_s if told.gb_per_s else known.speed,
            int(1e9 * told.memory_gb) if told.memory_gb else known.memory,
            row_speed=1e9 * told.row_gb_per_s if told.row_gb_per_s else known.row_speed,
            call_s=1e-6 * told.call_us,
        ),
        UNKNOWN_LATENCY_S if told.latency_ms is None else 1e-3 * told.latency_ms,
        1e6 / 8 * told.mbit_per_s if told.mbit_per_s else UNKNOWN_BANDWIDTH,
    )


def plan_json(planned: Planned) -> dict[str, Any]:
    """A plan as clients see it."""
    profile, choice = planned.profile, planned.choice
    return {
        "parameters": profile.parameters,
        "plan": {
            "kind": choice.kind,
            "held": list(planned.held),
            "ranks": [
                {
                    "node": planned.names[number],
                    "layers": len(plan.layers or range(profile.layers)),
                    "kv_groups": len(plan.attention) / plan.attention_split,
                    "mlp_blocks": len(plan.mlp),
                    "vocab_blocks": len(plan.vocabulary),
                    "weights_mb": round(plan.weight_bytes / 1e6, 1),
                    "memory_mb": round(plan.memory_bytes / 1e6, 1),
                    "share": _share(plan),
                }
                for number, plan in zip(choice.members, choice.plans, strict=True)
            ],
        },
        "forecast": forecast_json(choice.forecast),
        "alternatives": [_alternative(planned, other) for other in planned.runners_up.others],
        "without": [
            {"node": planned.names[number], "ms_per_token": None if seconds is None else _ms(seconds)}
            for number, seconds in planned.runners_up.without.items()
        ],
        "no_part": [{"node": planned.names[number], "why": why} for number, why in choice.idle.items()],
    }


def _share(plan: RankPlan) -> dict[str, Any]:
    """Which units of the model a rank has: first and behind the last."""

    def ends(units: range) -> list[int]:
        return [units.start, units.stop]

    return {
        "attention_split": plan.attention_split,
        "attention": ends(plan.attention),
        "mlp": ends(plan.mlp),
        "vocabulary": ends(plan.vocabulary),
        "layers": ends(plan.layers) if plan.layers else None,
    }


def forecast_json(forecast: Forecast) -> dict[str, float]:
    """What a token is forecast to take, and where that time goes; and the first one, after a prompt of so many."""
    return {
        "ms_per_token": _ms(forecast.token_s),
        "compute_ms": _ms(forecast.compute_s),
        "wire_ms": _ms(forecast.wire_s),
        "wait_ms": _ms(forecast.wait_s),
        "ttft_ms": _ms(forecast.first_s),
        "prompt_tokens": PROMPT,
    }


def _alternative(planned: Planned, other: Choice) -> dict[str, Any]:
    return {
        "kind": other.kind,
        "nodes": [planned.names[number] for number in other.members],
        "ms_per_token": _ms(other.forecast.token_s),
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
