"""What a node's process tells, for programs that collect logs."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from motley.cli.shown import narrator as narrator_module
from motley.cli.shown.narrator import NodeLog, narrator, start_log
from motley.cli.typed.node_options import LogFormat
from motley.daemon.machine.json_log import VARIABLE
from motley.daemon.node.settings import NodeSettings
from motley.daemon.weights.cache import ShareCache
from motley.protocol import mesh_pb2 as pb


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "text")
    root, ours = logging.getLogger(), logging.getLogger("motley")
    handlers, level = list(root.handlers), ours.level
    root.handlers.clear()  # another test may have left one
    yield
    root.handlers[:] = handlers
    ours.setLevel(level)


def test_a_node_logs_as_json_and_so_do_its_workers(capsys: pytest.CaptureFixture[str]) -> None:
    start_log(LogFormat.JSON)
    assert os.environ[VARIABLE] == "json"  # which workers look at
    told = narrator(LogFormat.JSON)
    assert isinstance(told, NodeLog)
    event = {"session": "s", "epoch": 1, "rank": 2}
    told.rank("rank 2", pb.RankEvent(**event, loading=pb.Loading(done_bytes=1, total_bytes=2)))
    told.rank("rank 2", pb.RankEvent(**event, ready=pb.Ready(share_bytes=3_000_000, load_s=1.5)))
    told.rank("rank 2", pb.RankEvent(**event, failed=pb.Failure(code="x", message="it died", lost_rank=3)))
    told.rank("rank 2", pb.RankEvent(**event, failed=pb.Failure(code="x", message="rank 0 is lost", lost_rank=1)))
    told.lost("it is gone", 2.0)
    told.lost("nobody answers", 4.0)
    told.leaving = True
    told.lost("it is gone", 2.0)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["level"], line["message"]) for line in lines] == [
        ("info", "rank 2 is ready: 3 MB of weights loaded in 1.5 s"),
        ("error", "rank 2 has failed: it died"),
        ("warning", "rank 2 has ended with another rank: rank 0 is lost"),
        ("warning", "lost the orchestrator: it is gone; again in 2 s"),
        ("info", "still without the orchestrator: nobody answers; again in 4 s"),
    ]
    assert all((line["session"], line["rank"]) == ("s", 2) for line in lines[:3])


@pytest.mark.parametrize(("free", "told_of"), [(1_000_000, True), (1_000_000_000_000, False)])
def test_a_person_is_told_that_a_disk_is_too_small_for_shares(
    free: int, told_of: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrator_module, "console", Console(stderr=True, width=200))
    monkeypatch.setattr(narrator_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    settings = NodeSettings("pc", "10.0.0.1", pb.Capabilities(cpu="a processor"), None, ShareCache(tmp_path), 1)
    told = narrator(LogFormat.TEXT)
    told.joined("1", settings)
    told.close()
    said = "only 1 MB are free in" in capsys.readouterr().err
    assert said is told_of


def test_a_person_is_told_once_why_the_orchestrator_is_away_and_that_it_is_looked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrator_module, "console", Console(stderr=True, width=200))
    settings = NodeSettings("pc", "10.0.0.1", pb.Capabilities(cpu="a processor"), None, ShareCache(Path("x")), 1)
    told = narrator(LogFormat.TEXT)
    for _ in range(2):
        told.joined("1", settings)
        for why in ("the connection to it broke", "nobody answers", "nobody answers"):
            told.lost(why, 2.0)
    failed = pb.Failure(code="peer_lost", message="rank 0 is lost: it left the session", lost_rank=1)
    told.rank("rank 1", pb.RankEvent(session="s", rank=1, failed=failed))
    told.close()
    then = "this node looks for it now and then, and joins again by itself"
    away = [
        f"lost the orchestrator: the connection to it broke; {then}",
        "still without the orchestrator: nobody answers",
    ]
    ended = (
        "ended rank 1 of session s, as rank 0 is lost: it left the session; the session goes on with the nodes that are"
    )
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("joined as pc (10.0.0.1): a processor, ")
    assert others == [*away, "joined as pc (10.0.0.1) again", *away, f"{ended} left, where they can"]


@pytest.mark.parametrize(("asked", "gpus", "said"), [(4 * 10**9, 0, True), (4 * 10**9, 1, False), (0, 0, False)])
def test_a_limit_of_a_gpu_that_is_not_there_is_told(
    asked: int, gpus: int, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    capabilities = pb.Capabilities(gpu_bytes=asked, gpus=[pb.Gpu(name="RTX 9")] * gpus)
    narrator(LogFormat.TEXT).joined("1", NodeSettings("pc", "10.0.0.1", capabilities, None, ShareCache(Path("x")), 1))
    told = " ".join(capsys.readouterr().err.split())
    assert ("--gpu-memory 4 GB limits nothing here: no GPU was found" in told) == said
    assert ("RTX 9 (4 GB of it for ranks)" in told) == bool(asked and gpus)


def test_a_person_is_told_now_and_then_what_is_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(narrator_module, "console", Console(stderr=True, width=500))
    monkeypatch.setattr(narrator_module, "time", SimpleNamespace(monotonic=lambda: now))
    told = narrator(LogFormat.TEXT)
    for now in (0.0, 8.0, 59.0, 61.0, 90.0):
        told.waits("cannot reach an orchestrator at a:1; is it running?", 8.0, 3600.0 - now)
    told.waits("no answer from a:1", 8.0, 45.0)
    then = "`motley up` prints its address and port. Trying for"
    assert capsys.readouterr().err.splitlines() == [
        f"waiting for the orchestrator: cannot reach an orchestrator at a:1; is it running? {then} 60 min more;"
        " Ctrl-C ends this",
        f"still waiting for the orchestrator: cannot reach an orchestrator at a:1; is it running? {then} 59 min more;"
        " Ctrl-C ends this",
        f"waiting for the orchestrator: no answer from a:1. {then} 45 s more; Ctrl-C ends this",
    ]
