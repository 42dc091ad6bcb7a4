"""`motley train` and `motley adapters`, as far as neither needs torch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from motley.cli.app import app
from motley.cli.commands.train import _alone_in
from motley.cli.errors import CliError, explain
from motley.daemon.lease.file import LeaseFile, Told, began
from motley.daemon.lease.states import State
from motley.daemon.node.workers.training import tickets_of
from motley.training.adapters import read_adapter, write_adapter
from motley.training.merging import Change
from motley.training.mesh.ticket import Ticket


def adapter(folder: Path, value: float) -> Path:
    change = Change(np.full((1, 3), value, np.float32), np.ones((2, 1), np.float32))
    write_adapter(folder, {"peft_type": "LORA"}, {"model.q": change})
    return folder


def test_without_the_extra_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    said = CliRunner().invoke(app, ["train", str(tmp_path), "data.jsonl", "--out", str(tmp_path / "out")])
    assert said.exception is not None
    told = explain(said.exception)
    assert told is not None
    assert told.startswith("training needs torch")
    assert "pip install 'motley-mesh[train]'" in told
    assert not (tmp_path / "out").exists()


def test_data_is_offered_by_a_name_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = LeaseFile(tmp_path / "mesh" / "lease.json")
    monkeypatch.setenv("MOTLEY_LEASE", str(lease.path))
    data = tmp_path / "data.jsonl"
    offer = ["train", "model", str(data), "--out", str(tmp_path / "out"), "--offer", "--json"]
    assert "no node of a mesh runs here" in str(CliRunner().invoke(app, offer).exception)
    pid = os.getpid()
    lease.tell(Told("pc", State.NORMAL, "", pid, began(pid) or 0.0, 60.0, ""))
    assert "there is no such file" in str(CliRunner().invoke(app, offer).exception)
    data.write_text('{"text": "private"}')
    said = json.loads(CliRunner().invoke(app, offer).stdout)
    ((node, _, name),) = [each.rpartition(":") for each in said["offers"]]
    assert node == "pc"
    left = Ticket.read(json.loads((tickets_of(lease) / f"{name}.json").read_bytes()))
    assert (left.data, left.out) == (data, tmp_path / "out")


def test_two_trainings_in_one_folder(tmp_path: Path) -> None:
    with _alone_in(tmp_path / "out"):
        with pytest.raises(CliError, match="another `motley train` is at work in"), _alone_in(tmp_path / "out"):
            pass
        with _alone_in(tmp_path / "other"):
            pass
    with _alone_in(tmp_path / "out"):
        pass


def test_adapters_are_merged(tmp_path: Path) -> None:
    folders = [str(adapter(tmp_path / name, value)) for name, value in (("a", 1.0), ("b", 5.0))]
    out = tmp_path / "both"
    said = CliRunner().invoke(app, ["adapters", "merge", *folders, "--weights", "3,1", "-o", str(out)])
    assert said.exit_code == 0, said.output
    _, merged = read_adapter(out)
    np.testing.assert_allclose(merged["model.q"].dense, np.full((2, 3), 2.0))
    ties = [*folders, "--how", "ties", "--density", "1", "-o", str(tmp_path / "ties")]
    assert CliRunner().invoke(app, ["adapters", "merge", *ties]).exit_code == 0
    _, merged = read_adapter(tmp_path / "ties")
    np.testing.assert_allclose(merged["model.q"].dense, np.full((2, 3), 3.0), rtol=1e-6)


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["adapters", "merge", "a", "--weights", "much", "-o", str(tmp_path / "out")])
    assert isinstance(said.exception, CliError)
    assert "--weights wants numbers" in str(said.exception)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--nodes", "a,b"], "--nodes is for a training on machines of the mesh: give --mode, too"),
        (["--mode", "merge"], "say with --nodes who trains"),
        (["--mode", "chain", "--nodes", "b", "--memory", "tight"], "--half and --top are not for --mode chain"),
        (["--half", "--memory", "tight"], "two ways to hold a model"),
        (["--mode", "merge", "--nodes", "b", "--plot", "loss.png"], "--plot is for a training on this machine"),
        (["--turn", "3"], "--turn is for a training on machines of the mesh: give --mode, too"),
        (["--mode", "merge", "--nodes", "b", "--last", "1"], "--with, --turn and --last are for --mode chain"),
        (["--mode", "chain", "--nodes", "b", "--with", "c:nothing"], "--with: NODE:OFFER of each"),
        (["--mode", "chain", "--offer"], "--offer: whoever begins the training says how it goes"),
    ],
)
def test_options_that_are_not_of_a_mode(options: list[str], why: str, tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["train", str(tmp_path), "data.jsonl", "--out", str(tmp_path / "out"), *options])
    assert isinstance(said.exception, CliError)
    assert why in str(said.exception)
