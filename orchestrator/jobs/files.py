"""A job as a file keeps it, for an orchestrator that is started again. Papers are not in it: who needs new ones begins
anew."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from motley.orchestrator.jobs.job import Issue, Job, Member, Mode, Place, Request, State, Step

FORMAT = 2
"""Files of another format are not read."""
_AS_THEY_ARE = (
    *("id", "created", "why", "epoch", "given_up", "told_in", "log", "said", "result"),
    *("ended", "served_as", "unserved"),
)


class JobFileError(Exception):
    """A file does not hold a job; the message says why."""


def pack(job: Job) -> bytes:
    """A job as a file has it."""
    told: dict[str, Any] = {"format": FORMAT, "state": job.state, "request": asdict(job.request)}
    told |= {name: getattr(job, name) for name in _AS_THEY_ARE}
    told["places"] = {node: asdict(place) for node, place in job.places.items()}
    told["members"] = [asdict(member) for member in job.members]
    return json.dumps(told).encode()


def read(content: bytes, issue: Issue, now: float) -> Job:
    """A job as a file has it; of one that runs, all nodes are away until they are back.

    Raises:
        JobFileError: there is none in it.
    """
    try:
        told = json.loads(content)
        if told["format"] != FORMAT:
            raise JobFileError(f"it is of format {told['format']}, which this version does not read")
        request = told["request"]
        job = Job(
            request=Request(**{**request, "mode": Mode(request["mode"]), "nodes": tuple(request["nodes"])}),
            places={node: Place(**place) for node, place in told["places"].items()},
            issue=issue,
            state=State(told["state"]),
            members=[Member(**{**each, "step": Step(each["step"])}) for each in told["members"]],
            **{name: told[name] for name in _AS_THEY_ARE},
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise JobFileError(f"{type(error).__name__}: {error}") from error
    for member in job.members if job.runs else ():
        if not member.over:
            member.step, member.since, member.why = Step.AWAY, now, "the orchestrator was started again"
    job.away = job.nodes if job.runs else set()
    return job
