"""What `motley join` was told that ranks may use here holds the next time, too, until something else is said."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from motley.cli.app import app
from motley.cli.reaching import joining
from motley.cli.reaching import limits as module
from motley.cli.reaching.home import home
from motley.cli.reaching.limits import Limits, keep_limits, last_limits
from motley.cli.shown import narrator
from motley.daemon.machine import files
from motley.daemon.node import app as daemon
from motley.daemon.node.settings import NodeSettings
from motley.protocol.mesh_pb2 import Capabilities


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTLEY_HOME", str(tmp_path))


def test_each_node_name_has_its_own() -> None:
    assert last_limits("laptop") == Limits()
    keep_limits("laptop", Limits("6GB", threads=2))
    keep_limits("second", Limits(gpu_memory="1GB"))
    assert last_limits("laptop") == Limits("6GB", threads=2)
    assert last_limits("second") == Limits(gpu_memory="1GB")


def test_two_daemons_keep_theirs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one comes after the first one has read what is there."""
    read, done_or_waiting = module._read, threading.Event()

    def keep_another() -> None:
        keep_limits("second", Limits("1GB"))
        done_or_waiting.set()

    second = threading.Thread(target=keep_another)

    def read_before() -> dict[str, object]:
        monkeypatch.setattr(module, "_read", read)
        told = read()
        second.start()
        assert done_or_waiting.wait(10)
        return told

    def wait(_: float) -> None:
        done_or_waiting.set()
        time.sleep(0.001)

    monkeypatch.setattr(module, "_read", read_before)
    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait))
    keep_limits("laptop", Limits("6GB"))
    second.join(10)
    assert last_limits("laptop") == Limits("6GB")
    assert last_limits("second") == Limits("1GB")


def test_what_is_typed_takes_the_place_of_what_was() -> None:
    before = Limits("6GB", "4GB", 2)
    assert before.changed(None, None, None) == before
    assert before.changed("3GB", None, None) == Limits("3GB", "4GB", 2)
    assert before.changed("all", "all", 0) == Limits()
    assert before.left("3GB", None, 0) == Limits("", "4GB", 0)
    assert before.options == "--memory 6GB --gpu-memory 4GB --threads 2"
    assert Limits().options == ""


@pytest.mark.parametrize(
    "written", ["", "[]", '{"laptop": 3}', '{"laptop": {"memory": 6}}', '{"laptop": {"unheard": "of"}}']
)
def test_what_cannot_be_read_is_nothing(written: str) -> None:
    (home() / "limits.json").write_text(written)
    assert last_limits("laptop") == Limits()


def test_join_remembers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int | None, int]] = []

    async def stay(config: daemon.DaemonConfig, observer: daemon.Observer) -> None:
        found.append((config.memory_limit, config.threads))
        observer.joined("1", NodeSettings(config.node_name, "", Capabilities(), None, config.cache, config.threads))

    async def mesh(*_: str) -> tuple[str, str]:
        return "192.0.2.1:7337", "token"

    monkeypatch.setattr(joining, "find_mesh", mesh)
    monkeypatch.setattr(daemon, "run_daemon", stay)
    monkeypatch.setattr(narrator, "start_log", lambda *_: None)
    for words, limits in (
        ("--memory 300MB --threads 1", (300_000_000, 1)),
        ("", (300_000_000, 1)),
        ("--memory all", (None, 1)),
        ("--threads 0", (None, 0)),
    ):
        said = CliRunner().invoke(app, ["join", *words.split()])
        assert found.pop() == limits
        assert ("as the last time: --memory 300MB --threads 1" in said.stderr) == (not words)
