"""A session as a file keeps it, for an orchestrator that is started again: what was asked for, and who has what of it.

Only sessions that were ready can be taken up: their ranks compute, wherever the orchestrator is. What only matters
while they come up (certificates, secrets) is not in the file.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message
from pydantic import TypeAdapter, ValidationError

from motley.orchestrator.adapters import NamedAdapter
from motley.orchestrator.experts.loads import KeptLoads
from motley.orchestrator.planning.caches import Blocks, Caches
from motley.orchestrator.planning.choosing.arrangement import NoPart
from motley.orchestrator.planning.cost import Forecast
from motley.orchestrator.planning.cutting.shares import RankPlan
from motley.orchestrator.planning.draft import Draft
from motley.orchestrator.planning.setup import Setup
from motley.orchestrator.session_request import SessionRequest
from motley.orchestrator.sessions.facts import ModelKnown, State
from motley.orchestrator.sessions.session import Session
from motley.orchestrator.workers import Away, CacheHolder, Rank, Worker
from motley.protocol.mesh_pb2 import Described, Loan, ModelProfile, ModelSpec, Ready

FORMAT = 3
"""Files of another format are not read."""

REQUEST = TypeAdapter(SessionRequest)
LOADS = TypeAdapter(dict[int, list[int]])
_Message = TypeVar("_Message", bound=Message)


class Wanted(NamedTuple):
    """A session that there was, and whose ranks do not go on by themselves: it is to be begun anew.

    Attributes:
        nodes: by name, that had a part of it.
        loads: how often its experts on hosts were chosen.
    """

    request: SessionRequest
    nodes: frozenset[str]
    loads: KeptLoads


class SessionFileError(Exception):
    """A file does not hold a session; the message says why."""


def pack(session: Session) -> bytes:
    """A session that is ready, and has no experts on hosts, as a file has it."""
    assert session.known is not None
    told = {
        "format": FORMAT,
        "id": session.id,
        "name": session.name,
        "created": session.created,
        "epoch": session.epoch,
        "request": REQUEST.dump_python(session.request, mode="json"),
        "spec": _text(session.known.spec),
        "profiles": {name: _text(each) for name, each in session.known.profiles.items()},
        "copies": {name: _text(each) for name, each in session.known.copies.items()},
        "profile": _text(session.profile),
        "caches": asdict(session.caches),
        "without": sorted(session.without),
        "adapters": [asdict(adapter) for adapter in session.adapters.values()],
        "forecast": asdict(session.forecast) if session.forecast else None,
        "ranks": [{**_worker(rank), **_rank(rank)} for rank in session.ranks],
        "no_part": [[*each] for each in session.no_part],
        "holders": [{**_worker(holder), **_holder(holder)} for holder in session.holders],
    }
    return json.dumps(told).encode()


def read(content: bytes, away: Away) -> Session:
    """A session as a file has it. Until its nodes are back, all of them are cut off.

    Raises:
        SessionFileError: there is none in it.
    """
    try:
        told = json.loads(content)
        if told["format"] != FORMAT:
            raise SessionFileError(f"it is of format {told['format']}, which this version does not read")
        spec = _message(ModelSpec, told["spec"])
        profiles = {name: _message(ModelProfile, each) for name, each in told["profiles"].items()}
        copies = {name: _message(Described, each) for name, each in told["copies"].items()}
        return Session(
            id=str(told["id"]),
            request=REQUEST.validate_python(told["request"]),
            name=str(told["name"]),
            created=float(told["created"]),
            planned=away.since,
            state=State.READY,
            profile=_message(ModelProfile, told["profile"]),
            caches=Caches(**told["caches"]),
            without=set(map(str, told["without"])),
            adapters={each["name"]: NamedAdapter(**each) for each in told["adapters"]},
            epoch=int(told["epoch"]),
            known=ModelKnown(spec, profiles, copies),
            serves=True,
            forecast=Forecast(**told["forecast"]) if told["forecast"] else None,
            ready_since=away.since,
            ranks=[_read_rank(each, away) for each in told["ranks"]],
            no_part=[NoPart(*map(str, each)) for each in told.get("no_part", ())],  # older versions wrote none
            holders=[_read_holder(each, away) for each in told["holders"]],
        )
    except (ValueError, TypeError, KeyError, AttributeError, DecodeError, ValidationError, RecursionError) as error:
        raise SessionFileError(f"{type(error).__name__}: {error}") from error


def pack_wanted(session: Session) -> bytes:
    """What is wanted of a session that cannot be taken up, as a file has it."""
    request = REQUEST.dump_python(replace(session.request, name=session.name), mode="json")
    nodes = session.node_names | {worker.node_name for worker in session.workers}  # also of those that are gone
    told = {"format": FORMAT, "request": request, "nodes": sorted(nodes)}
    if session.experts:
        told["loads"] = session.experts.loads.lately()
    return json.dumps(told).encode()


def read_wanted(content: bytes) -> Wanted:
    """What `pack_wanted` has written.

    Raises:
        SessionFileError: it is something else.
    """
    try:
        told = json.loads(content)
        if told["format"] != FORMAT:
            raise SessionFileError(f"it is of format {told['format']}, which this version does not read")
        return Wanted(
            REQUEST.validate_python(told["request"]),
            frozenset(map(str, told["nodes"])),
            LOADS.validate_python(told.get("loads", {})),
        )
    except (ValueError, TypeError, KeyError, AttributeError, ValidationError, RecursionError) as error:
        raise SessionFileError(f"it is damaged ({type(error).__name__}: {error})") from error


def _text(message: Message) -> str:
    return base64.b64encode(message.SerializeToString()).decode()


def _message(kind: type[_Message], text: str) -> _Message:
    return kind.FromString(base64.b64decode(text, validate=True))


def _worker(worker: Worker) -> dict[str, Any]:
    assert worker.ready is not None
    return {
        "index": worker.index,
        "node": worker.node_name,
        "memory_limit": worker.memory_limit,
        "address": worker.address,
        "ready": _text(worker.ready),
    }


def _read_worker(told: Mapping[str, Any], away: Away) -> dict[str, Any]:
    """The arguments that all workers have in common."""
    return {
        "index": int(told["index"]),
        "node_id": "",  # as it is back under another
        "node_name": str(told["node"]),
        "memory_limit": int(told["memory_limit"]),
        "address": str(told["address"]),
        "ready": _message(Ready, told["ready"]),
        "away": away,
    }


def _rank(rank: Rank) -> dict[str, Any]:
    draft = rank.draft
    return {
        "plan": _plan(rank.plan),
        "setup": asdict(rank.setup),
        "borrows": rank.loan is not None,
        "draft": draft
        and {
            "spec": _text(draft.spec),
            "profile": _text(draft.profile),
            "setup": asdict(draft.setup),
            "plan": _plan(draft.plan),
            "context": draft.context,
            "blocks": asdict(draft.blocks),
        },
    }


def _read_rank(told: Mapping[str, Any], away: Away) -> Rank:
    draft = told["draft"]
    return Rank(
        **_read_worker(told, away),
        plan=_read_plan(told["plan"]),
        setup=Setup(**told["setup"]),
        loan=Loan() if told["borrows"] else None,
        draft=draft
        and Draft(
            spec=_message(ModelSpec, draft["spec"]),
            profile=_message(ModelProfile, draft["profile"]),
            setup=Setup(**draft["setup"]),
            plan=_read_plan(draft["plan"]),
            context=int(draft["context"]),
            blocks=Blocks(**draft["blocks"]),
        ),
    )


def _holder(holder: CacheHolder) -> dict[str, Any]:
    return {"rank": holder.rank, "blocks_bytes": holder.blocks_bytes, "fixed_bytes": holder.fixed_bytes}


def _read_holder(told: Mapping[str, Any], away: Away) -> CacheHolder:
    return CacheHolder(
        **_read_worker(told, away),
        rank=int(told["rank"]),
        blocks_bytes=int(told["blocks_bytes"]),
        fixed_bytes=int(told["fixed_bytes"]),
    )


def _plan(plan: RankPlan) -> dict[str, Any]:
    own = dict(vars(plan))
    return {name: [value.start, value.stop] if isinstance(value, range) else value for name, value in own.items()}


def _read_plan(told: Mapping[str, Any]) -> RankPlan:
    own: dict[str, Any] = {name: range(*each) if isinstance(each, list) else each for name, each in told.items()}
    return RankPlan(**own)
