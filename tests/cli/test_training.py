"""`motley train` and `motley adapters`, as far as neither needs torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from motley.cli.app import app
from motley.cli.commands.training.train import _alone_in
from motley.cli.errors import EXIT_INTERRUPTED, CliError, explain
from motley.daemon.lease.file import LeaseFile, Told, began
from motley.daemon.lease.states import State
from motley.daemon.node.workers.training import tickets_of
from motley.protocol.installing import how_to_install
from motley.training.adapters import read_adapter, write_adapter
from motley.training.merging import Change
from motley.training.mesh.claim import claim
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
    assert how_to_install("train") in told
    assert not (tmp_path / "out").exists()


def test_what_is_installed_but_broken_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "transformers", "peft"):
        (tmp_path / "installed" / name).mkdir(parents=True)
        (tmp_path / "installed" / name / "__init__.py").write_text("raise OSError('libcudart.so.13: no such file')")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path / "installed")
    (tmp_path / "config.json").touch()
    said = CliRunner().invoke(app, ["train", str(tmp_path), "data.jsonl", "--out", str(tmp_path / "out")])
    assert said.exception is not None
    told = explain(said.exception)
    assert told is not None
    assert told.startswith("torch is installed, but cannot be imported (libcudart.so.13: no such file): pip install")
    assert "\n" not in told


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that offers, on a machine with a node."""
    lease = LeaseFile(tmp_path / "mesh" / "lease.json")
    monkeypatch.setenv("MOTLEY_LEASE", str(lease.path))
    pid = os.getpid()
    lease.tell(Told("pc", State.NORMAL, "", pid, began(pid) or 0.0, 60.0, ""))
    return ["train", "model", str(tmp_path / "data.jsonl"), "--out", str(tmp_path / "out"), "--offer"]


def test_what_cannot_be_offered(tmp_path: Path, offer: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no such file" in str(CliRunner().invoke(app, offer).exception)
    (tmp_path / "data.jsonl").write_text('{"text": "private"}')
    (tmp_path / "out" / "adapter").mkdir(parents=True)
    assert "adapter exists already" in str(CliRunner().invoke(app, offer).exception)
    monkeypatch.setenv("MOTLEY_LEASE", str(tmp_path / "nowhere" / "lease.json"))
    assert "no node of a mesh runs here" in str(CliRunner().invoke(app, offer).exception)


@contextmanager
def offering(command: list[str], *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that offers, and what it says first."""
    words = [sys.executable, "-m", "motley.cli.main", *command, *more]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline()
        finally:
            process.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_an_offer_ends_with_ctrl_c(tmp_path: Path, offer: list[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "private"}')
    with offering(offer, "--json") as (process, first):
        ((node, _, name),) = [each.rpartition(":") for each in json.loads(first)["offers"]]
        assert node == "pc"
        ticket = tickets_of(LeaseFile()) / f"{name}.json"
        left = Ticket.read(json.loads(ticket.read_bytes()))
        assert (left.data, left.out, left.offered) == (data, tmp_path / "out", True)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == EXIT_INTERRUPTED
        assert "Traceback" not in said
        assert not ticket.exists()


def test_an_offer_ends_with_its_training(tmp_path: Path, offer: list[str]) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "private"}')
    out, job = tmp_path / "out", tmp_path / "12345678"
    for made in (False, True):  # an adapter
        with offering(offer) as (process, first):
            name = first.rpartition(":")[2].partition("`")[0]
            job.mkdir()
            claim(out, job)
            (tickets_of(LeaseFile()) / f"{name}.json").unlink()  # it is taken
            if made:
                (out / "adapter").mkdir()
            job.rmdir()
            said, trouble = process.communicate(timeout=60)
            assert (process.returncode, "the adapter is" in said) == ((0, True) if made else (1, False))
            assert ("no adapter came of it" in trouble) is not made


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
    merged = read_adapter(out).changes
    np.testing.assert_allclose(merged["model.q"].dense, np.full((2, 3), 2.0))
    ties = [*folders, "--how", "ties", "--density", "1", "-o", str(tmp_path / "ties")]
    assert CliRunner().invoke(app, ["adapters", "merge", *ties]).exit_code == 0
    merged = read_adapter(tmp_path / "ties").changes
    np.testing.assert_allclose(merged["model.q"].dense, np.full((2, 3), 3.0), rtol=1e-6)


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["adapters", "merge", "a", "--weights", "much", "-o", str(tmp_path / "out")])
    assert isinstance(said.exception, CliError)
    assert "--weights wants numbers" in str(said.exception)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--nodes", "a,b"], "--nodes: for a training on machines of the mesh: give --mode, too"),
        (["--patience", "1m", "--detach"], "--patience, --detach: for a training on machines of the mesh"),
        (["--mode", "merge"], "say with --nodes who trains"),
        (["--mode", "chain", "--nodes", "b", "--memory", "tight"], "--memory: not for --mode chain"),
        (["--mode", "chain", "--nodes", "b", "--how", "ties"], "--how: not for --mode chain"),
        (["--near", "50"], "--near: for a softmax over near tokens: give --memory near, or tight, too"),
        (["--mode", "merge", "--nodes", "b", "--near", "50", "--memory", "int4"], "--near: for a softmax over near"),
        (["--half", "--memory", "tight"], "two ways to hold a model"),
        (["--mode", "merge", "--nodes", "b", "--plot", "loss.png"], "--plot: not for --mode merge"),
        (["--turn", "3"], "--turn: for a training on machines of the mesh: give --mode, too"),
        (["--mode", "merge", "--nodes", "b", "--last", "1"], "--last: not for --mode merge"),
        (["--mode", "chain", "--nodes", "b", "--with", "c:nothing"], "--with: NODE:OFFER of each"),
        (["--mode", "chain", "--nodes", "b", "--turn", "2"], "--turn: for several who have data"),
        (["--held-out", "h.jsonl", "--held-out-share", "0.1"], "--held-out-share: of DATA nothing is held out"),
        (["--mode", "chain", "--offer"], "--mode: not beside --offer: whoever begins the training says how it goes"),
        (["--offer", "--steps", "9", "--detach", "--keep-every", "2"], "--steps, --keep-every, --detach: not beside"),
    ],
)
def test_options_that_are_not_of_a_mode(options: list[str], why: str, tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["train", str(tmp_path), "data.jsonl", "--out", str(tmp_path / "out"), *options])
    assert isinstance(said.exception, CliError)
    assert why in str(said.exception)
