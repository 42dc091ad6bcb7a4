"""`motley doctor` on a real mesh in which one node cannot reach another."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from motley.cli.commands.machine.doctor import _disks
from motley.cli.diagnosis import Finding
from motley.daemon.lease.file import LeaseFile, Told, began
from motley.daemon.lease.lease import LIMIT_S
from motley.daemon.lease.states import State
from motley.daemon.node.joining.membership import FOLDER, Membership
from motley.protocol.mesh_pb2 import Probed


async def test_it_says_which_way_between_which_nodes_fails(mesh: Any, new_node: Any, motley: Any) -> None:
    pc, laptop = new_node("pc"), new_node("laptop")
    pc.ways = {"laptop": Probed(failure="nothing answers at laptop:4000 within 5 s")}
    laptop.ways = {"pc": Probed(latency_s=1e-3, bandwidth=1e8)}
    for node in (pc, laptop):
        await mesh.join(node)
    await mesh.poll("/api/nodes", lambda body: all(len(node["links"]) == 1 for node in body["nodes"]))
    status, out, err = await motley("doctor", "--json")
    assert status == 1, err
    found = json.loads(out)
    bad = [each for each in found if each["level"] == "bad" and each["about"] != "addresses"]
    assert [each["what"] for each in bad] == [
        "pc cannot reach laptop (127.0.0.1): nothing answers at laptop:4000 within 5 s"
    ]
    assert {"disk", "ports", "drivers", "mesh", "versions", "clocks"} <= {each["about"] for each in found}


def test_it_looks_at_the_disk_where_a_node_that_runs_here_keeps_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTLEY_LEASE", str(tmp_path / "lease.json"))
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "usual"))
    file, here, now = LeaseFile(), os.getpid(), began(os.getpid()) or 0.0
    assert [str(tmp_path / "usual") in each.what for each in _disks(None)] == [True]
    file.tell(Told("pc", State.NORMAL, "", here, now, LIMIT_S, shares=str(tmp_path / "other")))
    (found,) = _disks(None)
    assert f"in {tmp_path / 'other'}, where pc, running here, keeps shares" in found.what
    (named,) = _disks(tmp_path / "named")
    assert str(tmp_path / "named") in named.what


async def _of_mesh(motley: Any, *words: str, **environment: str) -> tuple[int, list[tuple[str, str, str]]]:
    """The status, and what it says of the mesh and how to get there."""
    status, out, _ = await motley("doctor", "--json", *words, **environment)
    found = [(each["about"], each["level"], each["what"]) for each in json.loads(out)]
    return status, [each for each in found if each[0] in ("home", "mesh", "orchestrator")]


async def test_an_orchestrator_that_cannot_be_reached_is_bad_where_this_machine_belongs_to_its_mesh(
    motley: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.cli.reaching.place.USUAL_URL", "http://127.0.0.1:2")
    monkeypatch.setattr("motley.cli.commands.machine.doctor._machine", _sound)
    where = {"MOTLEY_HOME": str(tmp_path), "MOTLEY_URL": ""}
    status, found = await _of_mesh(motley, **where)
    assert (status, [level for _, level, _ in found]) == (0, ["note"])
    Membership("laptop", "ab" * 32, "key", "127.0.0.1:1", "http://127.0.0.1:1", "", "").keep(tmp_path / FOLDER)
    status, found = await _of_mesh(motley, **where)
    assert (status, [each[:2] for each in found]) == (1, [("mesh", "bad"), ("orchestrator", "bad")])
    assert "this machine has joined as 'laptop' does not answer at http://127.0.0.1:1" in found[0][2]
    assert "127.0.0.1:1, which this machine has joined as laptop, cannot be reached from here" in found[1][2]
    status, found = await _of_mesh(motley, "--url", "http://127.0.0.1:3", MOTLEY_HOME=str(tmp_path / "new"))
    assert (status, [each[:2] for each in found]) == (1, [("mesh", "bad")])


async def test_a_home_that_cannot_be_read_is_bad(motley: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.cli.reaching.place.USUAL_URL", "http://127.0.0.1:2")
    monkeypatch.setattr("motley.cli.commands.machine.doctor._machine", _sound)
    (tmp_path / FOLDER).write_text("no folder")
    status, found = await _of_mesh(motley, MOTLEY_HOME=str(tmp_path), MOTLEY_URL="")
    assert (status, found[0][:2]) == (1, ("home", "bad"))
    assert f"what Motley keeps in {tmp_path} cannot be read" in found[0][2]


async def _sound(*_: object) -> list[Finding]:
    return []
