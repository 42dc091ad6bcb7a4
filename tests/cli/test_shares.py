"""The folder in which commands about shares look."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from motley.cli.errors import CliError
from motley.cli.reaching.shares import shares_folder
from motley.daemon.lease.file import LeaseFile, Told, began
from motley.daemon.lease.states import State
from tests.e2e.processes import motley


def node(name: str, shares: Path) -> Told:
    """What a node that is this process tells, or is its parent."""
    pid = os.getpid() if name == "pc" else os.getppid()
    return Told(name, State.NORMAL, "", pid, began(pid) or 0.0, 60.0, shares=str(shares))


async def test_they_look_where_the_node_that_runs_here_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTLEY_LEASE", str(tmp_path / "lease.json"))
    monkeypatch.delenv("MOTLEY_CACHE")
    home = os.environ["MOTLEY_HOME"]
    monkeypatch.delenv("MOTLEY_HOME")
    assert shares_folder(None) is None
    LeaseFile().tell(node("pc", tmp_path / "own"))
    assert shares_folder(None) == tmp_path / "own"
    status, out, err = await motley("cache", "ls", "--json")
    assert (status, json.loads(out)["folder"]) == (0, str(tmp_path / "own")), err
    status, out, err = await motley("models", "ls", HF_HOME=str(tmp_path / "hub"))
    assert (status, f"shares in {tmp_path / 'own'}" in out) == (0, True), err

    assert shares_folder(tmp_path / "named") == tmp_path / "named"
    LeaseFile().tell(node("laptop", tmp_path / "other"))
    with pytest.raises(CliError, match=r"several folders; name one with --cache: .*other \(laptop\), .*own \(pc\)"):
        shares_folder(None)
    monkeypatch.setenv("MOTLEY_HOME", home)
    assert shares_folder(None) is None, "it is there"
    monkeypatch.delenv("MOTLEY_HOME")
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "said"))
    assert shares_folder(None) is None, "which stands for that"
