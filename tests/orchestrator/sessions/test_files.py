"""A session that is kept in a file is taken up as it was, but that its nodes are still to come back."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.orchestrator.app import Orchestrator, OrchestratorConfig
from motley.orchestrator.planning.caches import Caches
from motley.orchestrator.planning.choosing.arrangement import NoPart
from motley.orchestrator.planning.cost import Forecast
from motley.orchestrator.planning.cutting.shares import Candidate, plan_shares
from motley.orchestrator.planning.draft import plan_draft
from motley.orchestrator.planning.setup import Setup
from motley.orchestrator.serving.kept_sessions import FOLDER, READY, WANTED, KeptSessions
from motley.orchestrator.session_request import SessionRequest
from motley.orchestrator.sessions.assignments import model_spec
from motley.orchestrator.sessions.facts import ModelKnown, State
from motley.orchestrator.sessions.files import SessionFileError, pack, read
from motley.orchestrator.sessions.session import Session
from motley.orchestrator.sessions.table import SessionTable
from motley.orchestrator.workers import Away, CacheHolder, Rank
from motley.protocol.mesh_pb2 import Described, Empty, ExpertLoad, Failure, Loan, ModelProfile, RankEvent, Ready

from ..conftest import Mesh, report

NODES = ["pc", "laptop"]
SETUP = Setup("onnxruntime", "int4", False, keeps_windows=True)
AWAY = Away(100.0, 30.0, "restarted")


@pytest.fixture
def session(profile: ModelProfile) -> Session:
    """Ready, with all that a session may have."""
    caches = Caches(300, 130, node_tokens=300)
    plans = plan_shares([profile] * 2, [Candidate(name, 1.0, 10**9) for name in NODES], 100)
    nodes = ("pc", "webgpu@laptop")
    request = SessionRequest("bard", name="Bard", nodes=nodes, engines={"pc": "onnxruntime"}, exact=True)
    session = Session("s", request, "Bard", created=5.5)
    ranks = [Rank(i, name, name, 10**9, plan, SETUP) for i, (name, plan) in enumerate(zip(NODES, plans, strict=True))]
    ranks[0].draft = plan_draft(model_spec(request, "int4"), profile, SETUP, caches)
    ranks[1].loan = Loan(id="l", secret=b"nobody's business")
    holders = [CacheHolder(2 + rank, "box", "box", 10**9, rank=rank, blocks_bytes=70, fixed_bytes=7) for rank in (0, 1)]
    spec = model_spec(request, "int4", ["int8"])
    copies = {"laptop": Described(failure=Failure(code="model_missing")), "pc": Described(profile=profile)}
    session.known = ModelKnown(spec, {"int4": profile, "int8": profile}, copies)
    session.forecast = Forecast(0.1, 0.2, 0.3, 0.4)
    session.no_part = [NoPart("old", "slow")]
    session.assign(spec, profile, ranks, caches, 0, holders=holders)
    for body in ({"listening": "here:1"}, {"ready": Ready(share_bytes=7, rss_bytes=9, pid=3)}):
        for worker in session.workers:
            session.on_event(worker.node_id, RankEvent(session="s", epoch=1, rank=worker.index, **body), 1)
    assert session.state is State.READY
    return session


def test_it_is_taken_up_as_it_was(session: Session) -> None:
    session.epoch = 3
    again = read(pack(session), AWAY)
    facts = "id", "request", "name", "created", "profile", "caches", "epoch", "known", "forecast", "serves", "no_part"
    for name in facts:
        assert getattr(again, name) == getattr(session, name), name
    assert all(worker.away == AWAY for worker in again.workers)
    for own, before in zip(again.workers, session.workers, strict=True):
        own.node_id, own.away = before.node_id, None
        if isinstance(own, Rank) and isinstance(before, Rank):
            assert (own.loan is None) == (before.loan is None)
            own.loan = before.loan
        assert own == before
    assert b"nobody" not in pack(session), "what is secret is not in the file"


def test_it_waits_for_its_nodes_and_answers_when_they_are_back(session: Session) -> None:
    again = read(pack(session), AWAY)
    assert again.takes_requests
    assert not again.answers
    for name, held in (("pc", {(1, 0)}), ("laptop", {(1, 1)}), ("box", {(1, 2), (1, 3)})):
        assert again.on_node_back(f"new-{name}", name, held, {}, 101) == []
    assert again.answers
    late = read(pack(session), AWAY)
    assert late.on_time(130) == []
    late.on_time(130.1)
    assert late.state is State.RECOVERING
    assert "is lost: restarted" in late.losses.last[-1].why.message


@given(cut=st.integers(0, 3000), at=st.integers(0, 3000), byte=st.integers(0, 255))
def test_a_damaged_file_is_refused_or_read(cut: int, at: int, byte: int) -> None:
    content = bytearray(json.dumps({"format": 1, "id": "s", "request": {"model": "bard"}, "ranks": []}).encode())
    content[at % len(content)] = byte
    with pytest.raises(SessionFileError):
        read(bytes(content[:cut]), AWAY)


def test_another_format_is_not_read(session: Session) -> None:
    told = json.loads(pack(session))
    with pytest.raises(SessionFileError, match="of format 4"):
        read(json.dumps({**told, "format": 4}).encode(), AWAY)


def test_files_come_and_go_with_sessions(session: Session, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept, file = KeptSessions(tmp_path), tmp_path / FOLDER / "s.json"
    kept.note(replace(session, state=State.LOADING))
    assert not file.exists()
    kept.note(session)
    assert file.stat().st_mode & 0o777 == 0o600
    (tmp_path / FOLDER / "broken.json").write_text("{}")
    table = SessionTable()
    later = KeptSessions(tmp_path)
    later.take_up(table, 100.0)
    (own,) = table
    assert own.id == "s"
    assert "broken.json: this session cannot be taken up" in caplog.text
    own.close(101)
    later.note(own)
    assert not file.exists()
    KeptSessions(None).note(session)
    KeptSessions(None).take_up(table, 0.0)


def test_a_session_that_was_planned_anew_is_kept_as_it_is_now(session: Session, tmp_path: Path) -> None:
    kept = KeptSessions(tmp_path)
    kept.note(session)
    session.on_event("laptop", RankEvent(session="s", epoch=1, rank=1, failed=Failure(code="worker_died")), 3)
    kept.note(session)
    for worker in session.workers:
        session.on_event(worker.node_id, RankEvent(session="s", epoch=1, rank=worker.index, released=Empty()), 4)
    assert session.known is not None
    rank = Rank(0, "pc", "pc", 10**9, session.ranks[0].plan, SETUP)
    session.assign(session.known.spec, session.profile, [rank], session.caches, 5)
    for body in ({"listening": "here:1"}, {"ready": Ready(share_bytes=7)}):
        session.on_event("pc", RankEvent(session="s", epoch=2, rank=0, **body), 6)
    kept.note(session)
    again = read((tmp_path / FOLDER / "s.json").read_bytes(), AWAY)
    assert (again.epoch, len(again.workers)) == (2, 1)


async def test_what_was_wanted_and_not_ready_is_begun_anew(mesh: Any, new_node: Any, tmp_path: Path) -> None:
    """As after `kill -9`: the second orchestrator has what the first one has written, and nothing else."""
    node = await mesh.join(new_node("pc"))

    async def say_nothing(_: object) -> None:
        pass

    node.on_rank = say_nothing
    status, _ = await mesh.call("POST", "/api/sessions", {"model": "bard", "context": 77})
    assert status == 201
    state = _killed(tmp_path)
    assert [file.suffix for file in (state / FOLDER).iterdir()] == [WANTED]
    async with _started_again(state, new_node("pc")) as again:
        session = (await again.poll("/api/sessions", _is_ready))["sessions"][0]
        assert (session["name"], session["context"]) == ("bard", 77)
        assert [file.name for file in (state / FOLDER).iterdir()] == [f"{session['id']}{READY}"]
        await again.call("DELETE", f"/api/sessions/{session['id']}")
    assert list((state / FOLDER).iterdir()) == []


async def test_experts_are_placed_by_how_often_they_were_chosen_before_a_restart(
    mesh: Any, nodes: list[Any], new_node: Any, moe: ModelProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.orchestrator.serving.kept_sessions.LOADS_S", 1e-9)  # at once
    before = await mesh.serve(experts="parallel", nodes=["pc", "laptop"])
    rows = [9_000, 9_000, 0, 0, 0, 0, 0, 0]
    await report(nodes[0], loads=[ExpertLoad(layer=layer, rows=rows) for layer in range(4)])
    path = "/api/sessions/{}/experts".format
    measured = await mesh.poll(path(before["id"]), lambda body: body["groups"][0]["experts"][0]["load"] > 3)
    back = [new_node(name) for name in ("pc", "laptop")]
    for node in back:
        node.on_describe = lambda _: Described(profile=moe)
    async with _started_again(_killed(tmp_path), *back) as again:
        session = (await again.poll("/api/sessions", _is_ready))["sessions"][0]
        _, body = await again.call("GET", path(session["id"]))
    for group, known in zip(body["groups"], measured["groups"], strict=True):
        loads, known_loads = ([expert["load"] for expert in of["experts"]] for of in (group, known))
        assert loads == pytest.approx(known_loads, rel=0.01)
        often = [{host["host"] for host in expert["hosts"]} for expert in group["experts"][:2]]
        assert often[0].isdisjoint(often[1]), "the two that all tokens choose are apart from the start"


def _killed(tmp_path: Path) -> Path:
    """The state folder as it would be after `kill -9`, now."""
    return shutil.copytree(tmp_path / "state", tmp_path / "copied")


def _is_ready(body: Any) -> bool:
    return [session["state"] for session in body["sessions"]] == ["ready"]


@asynccontextmanager
async def _started_again(state: Path, *nodes: Any) -> AsyncIterator[Mesh]:
    """An orchestrator with a state folder of another one, and nodes that join it."""
    orchestrator = Orchestrator(OrchestratorConfig("127.0.0.1", 0, http_port=0, state_dir=state))
    await orchestrator.start()
    async with aiohttp.ClientSession(orchestrator.http_url) as http:
        mesh = Mesh(orchestrator, http)
        for node in nodes:
            await mesh.join(node)
        yield mesh
    await orchestrator.stop()
    await asyncio.gather(*(node.leave() for node in nodes))


def test_what_is_wanted_when_the_orchestrator_stops_is_begun_anew(session: Session, tmp_path: Path) -> None:
    kept = KeptSessions(tmp_path)
    kept.note(session)
    kept.stop([session])
    kept.note(replace(session, state=State.CLOSING))  # as it is ended then
    table = SessionTable()
    wanted = KeptSessions(tmp_path).take_up(table, 100.0)
    assert [*table] == []
    assert wanted["s"].request.model == session.request.model
    assert wanted["s"].nodes == {"pc", "laptop", "box"}
