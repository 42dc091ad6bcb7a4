"""What a node's process tells, for programs that collect logs."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator

import pytest

from motley.cli.shown.narrator import NodeLog, narrator, start_log
from motley.cli.typed.node_options import LogFormat
from motley.daemon.machine.json_log import VARIABLE
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
    told.rank("rank 2", pb.RankEvent(**event, failed=pb.Failure(code="x", message="it died")))
    told.lost("it is gone", 2.0)
    told.leaving = True
    told.lost("it is gone", 2.0)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["level"], line["message"]) for line in lines] == [
        ("info", "rank 2 is ready: 3 MB of weights loaded in 1.5 s"),
        ("error", "rank 2 has failed: it died"),
        ("warning", "lost the orchestrator: it is gone; again in 2 s"),
    ]
    assert all((line["session"], line["rank"]) == ("s", 2) for line in lines[:2])
