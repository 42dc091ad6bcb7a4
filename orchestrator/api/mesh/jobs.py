"""Trainings as clients begin, see and stop them. Who may use the mesh sees how they stand; the rest is for admins."""

from __future__ import annotations

from typing import Annotated, Any

from aiohttp import web
from pydantic import Field, TypeAdapter

from motley.orchestrator.api.access.guard import CALLER
from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.api.schema import Body, Text, read, read_json
from motley.orchestrator.jobs.job import Job, Mode, Request
from motley.orchestrator.jobs.running import Jobs
from motley.orchestrator.store.keys import Scope
from motley.protocol import MAX_RANKS

Ticket = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
NodeName = Annotated[Text, Field(min_length=1, max_length=64)]


class JobBody(Body):
    """The body of ``POST /api/jobs``. Data and settings are not in it: they stay on the owner's machine."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    """What the job is called."""
    model: Annotated[Text, Field(min_length=1, max_length=4096)]
    """A folder or a hub id, that every node has or can fetch."""
    mode: Annotated[str, Field(pattern=r"^(merge|chain)$")]
    """`merge`: each node trains alone on a part of the data; `chain`: each has some of the layers."""
    owner: NodeName
    """The node that has the data."""
    nodes: Annotated[list[NodeName], Field(min_length=1, max_length=MAX_RANKS)]
    """Those that are to train."""
    ticket: Ticket
    """Names the file by which the job was asked for on the owner's machine; without it, that does not begin."""
    others: Annotated[dict[NodeName, Ticket], Field(max_length=16, default_factory=dict)]
    """Of a chain, who else has data for it: by node the name of the file by which it was offered there."""
    serve: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{0,64}$")] = ""
    """The adapter's name in the running session of the model, once it is done."""
    patience_s: Annotated[float, Field(ge=1, le=86400)] = 300.0
    """A node that is away for so long is left out."""


JOB = TypeAdapter(JobBody)


class JobsApi:
    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/jobs", self.jobs),
            web.post("/api/jobs", self.create),
            web.get("/api/jobs/{id}", self.job),
            web.delete("/api/jobs/{id}", self.stop),
        ]

    async def jobs(self, _: web.Request) -> web.Response:
        """All jobs, the oldest first, without their logs."""
        return web.json_response({"jobs": [_job_json(job) for job in self._jobs]})

    async def create(self, request: web.Request) -> web.Response:
        """Begin a job: 201 at once."""
        _check_admin(request, "have machines train")
        asked = read(JOB, await read_json(request))
        if len(set(asked.nodes)) < len(asked.nodes):
            raise ApiError(400, "nodes must not have a name twice", param="nodes", code="invalid_value")
        told = asked.model_dump() | {"mode": Mode(asked.mode), "nodes": tuple(asked.nodes)}
        job = self._jobs.create(Request(**told, by=request[CALLER].name))
        return web.json_response(_job_json(job), status=201)

    async def job(self, request: web.Request) -> web.Response:
        """A job, with its log: the latest lines, and how many it has had in all."""
        _check_admin(request, "read a job's log")
        job = self._jobs.find(request.match_info["id"])
        return web.json_response({**_job_json(job), "log": job.log, "said": job.said})

    async def stop(self, request: web.Request) -> web.Response:
        """End a job: workers end, and nodes remove what they have of it. What the owner's node has is left."""
        _check_admin(request, "stop a job")
        job = self._jobs.find(request.match_info["id"])
        self._jobs.stop(job)
        return web.json_response(_job_json(job))


def _check_admin(request: web.Request, what: str) -> None:
    """
    Raises:
        ApiError: 403, the caller is no admin.
    """
    caller = request[CALLER]
    if caller.scope is not Scope.ADMIN:
        raise ApiError(403, f"{caller.name} may not {what}: that takes a key of scope admin", code="insufficient_scope")


def _job_json(job: Job) -> dict[str, Any]:
    asked = job.request
    return {
        "id": job.id,
        "name": asked.name,
        "model": asked.model,
        "mode": asked.mode,
        "owner": asked.owner,
        "others": list(asked.others),
        "by": asked.by,
        "state": job.state,
        "why": job.why or None,
        "created": job.created,
        "ended": job.ended or None,
        "epoch": job.epoch,
        "serve": asked.serve or None,
        "served_as": job.served_as or None,
        "unserved": job.unserved or None,
        "result": job.result or None,
        "members": [
            {
                "member": number,
                "node": each.node,
                "leads": number == 0,
                "state": each.step,
                "why": each.why or None,
                "deaths": each.deaths,
                "memory_bytes": job.places[each.node].memory_bytes,
                "latest": each.latest or None,
                "curve": each.curve,
            }
            for number, each in enumerate(job.members)
        ],
    }
