"""Describing a model: one that must be downloaded, one that nobody wants any more, and trouble that nobody foresaw."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
from pathlib import Path

import pytest

from motley.daemon.lease.file import LeaseFile
from motley.daemon.loading import fetching
from motley.daemon.loading.fetching import LoadError
from motley.daemon.node.joining.control import Control
from motley.daemon.node.network.relaying import Relays
from motley.daemon.node.settings import NodeSettings
from motley.daemon.node.survey.describe import describe, look
from motley.daemon.node.workers.leasing import Leasing
from motley.daemon.node.workers.ranks import Ranks
from motley.daemon.node.workers.training import Trainings
from motley.daemon.weights.cache import ShareCache
from motley.protocol import mesh_pb2 as pb
from tests.daemon.text.made_tokenizers import SHAKESPEARE


def test_a_download_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def hang(source: str, models: Path | None) -> Path:
        over.wait(30)
        raise OSError("over")

    monkeypatch.setattr(fetching, "resolve", hang)
    monkeypatch.setattr(fetching, "fetched_bytes", lambda source: 7)
    monkeypatch.setattr(fetching, "TELL_S", 0.01)
    monkeypatch.setattr(fetching, "DOWNLOAD_S", 0.1)
    try:
        with pytest.raises(LoadError, match="nothing of owner/name has come for 0 s"):
            describe(pb.ModelSpec(source="owner/name", quantisation="fp32"), None)
    finally:
        over.set()


def test_caches_cost_what_their_format_takes() -> None:
    """Six layers of heads of 32; int8 has a scale of four bytes for each."""
    costs = {}
    for cache_format in ("", "fp32", "fp16", "int8"):
        model = pb.ModelSpec(
            source=str(SHAKESPEARE), quantisation="int8", block=128, beside=["fp32"], cache_format=cache_format
        )
        told = describe(model, None)
        assert told.beside[0].cache_bytes_per_token == told.profile.cache_bytes_per_token
        costs[cache_format] = told.profile.kv_groups * told.profile.cache_bytes_per_token
    assert costs == {"": 4608, "fp32": 4608, "fp16": 2304, "int8": 1296}


def test_what_is_here_is_told_without_fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object) -> Path:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("motley.daemon.weights.hub._from_hub", fetch)
    here = pb.ModelSpec(source=SHAKESPEARE.name, quantisation="fp32")
    whole = describe(here, SHAKESPEARE.parent)
    assert look(here, SHAKESPEARE.parent).profile == pb.ModelProfile(fingerprint=whole.profile.fingerprint)
    assert look(pb.ModelSpec(source="owner/name"), tmp_path) == pb.Described(from_hub=True)
    missing = look(here, tmp_path).failure
    assert (missing.code, str(tmp_path / SHAKESPEARE.name) in missing.message) == ("model_missing", True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    assert look(pb.ModelSpec(source="broken"), tmp_path).failure.code == "invalid_model"


async def test_a_node_says_what_is_here(control: Control) -> None:
    model = pb.ModelSpec(source=str(SHAKESPEARE))
    control._obey(pb.OrchestratorMessage(describe=pb.Describe(request_id="8", model=model, only_here=True)))
    async with asyncio.timeout(20):
        said = (await control._outbox.get()).described
    assert (said.request_id, said.profile.name, bool(said.profile.fingerprint)) == ("8", "", True)


@pytest.fixture
def control(tmp_path: Path) -> Control:
    """Of a node that is asked, and whose answers lie in its outbox."""
    settings = NodeSettings("pc", "127.0.0.1", pb.Capabilities(), None, ShareCache(tmp_path), 1)
    ranks = Ranks(settings, lambda role, event: None)
    leasing = Leasing("pc", ranks, LeaseFile())
    return Control(settings, ranks, leasing, Relays(), Trainings(settings, leasing, Path("tickets")))


async def described(control: Control, source: Path | str, tokens_of: str = "") -> pb.Described:
    """What the node says of a model."""
    model = pb.ModelSpec(source=str(source), quantisation="fp32")
    control._obey(pb.OrchestratorMessage(describe=pb.Describe(model=model, tokens_of=tokens_of)))
    async with asyncio.timeout(60):
        return (await control._outbox.get()).described


ASKED = pb.OrchestratorMessage(describe=pb.Describe(request_id="7", model=pb.ModelSpec(source="m")))


async def test_a_tokenizer_that_ends_its_reader_does_not_end_the_node(control: Control, tmp_path: Path) -> None:
    """The library that reads it panics at this one."""
    model = shutil.copytree(SHAKESPEARE, tmp_path / "odd")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["continuing_subword_prefix"] = "#" * 9
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    failure = (await described(control, model)).failure
    assert (failure.code, failure.message) == ("internal_error", f"describing '{model}' ended with status 1")


async def test_what_would_fill_memory_is_refused(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of a thousand million layers, and whatever else takes more than the process may have."""
    model = shutil.copytree(SHAKESPEARE, tmp_path / "model")
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(json.dumps(json.loads(config) | {"num_hidden_layers": 10**9}))
    assert "a whole number of at most 10000" in (await described(control, model)).failure.message
    if sys.platform == "linux":
        monkeypatch.setattr("motley.daemon.node.survey.describe.MEMORY_BYTES", 128 << 20)
        (model / "config.json").write_text(json.dumps(json.loads(config) | {"long": [[]] * 4_000_000}))
        failure = (await described(control, model)).failure
        assert (failure.code, "takes too much memory" in failure.message) == ("load_failed", True)


async def test_a_tokenizer_is_read_by_a_process_of_its_own_until_it_is_known(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(SHAKESPEARE, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    first = await described(control, model)

    def start(*_: object, **__: object) -> None:
        raise OSError("a process was started")

    monkeypatch.setattr("motley.daemon.node.survey.describe.start_child", start)
    again = await described(control, model)
    assert (again, again.profile.chats) == (first, True)
    (model / "chat_template.jinja").write_text("{{ messages }}!")
    for asked in ((model,), (SHAKESPEARE, str(model)), ("owner/name",)):
        assert (await described(control, *asked)).failure.message == "OSError: a process was started"


async def test_trouble_that_nobody_foresaw_is_told(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(request: pb.Describe, models: Path | None, cache: ShareCache) -> pb.Described:
        raise OSError("too many open files")

    monkeypatch.setattr("motley.daemon.node.joining.control.answer", broken)
    control._obey(ASKED)
    async with asyncio.timeout(5):
        said = await control._outbox.get()
    assert (said.described.request_id, said.described.failure.code) == ("7", "internal_error")
    assert said.described.failure.message == "OSError: too many open files"


async def test_what_nobody_waits_for_any_more_is_stopped(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def slow(request: pb.Describe, models: Path | None, cache: ShareCache) -> pb.Described:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return pb.Described()

    monkeypatch.setattr("motley.daemon.node.joining.control.answer", slow)
    control._obey(ASKED)
    async with asyncio.timeout(5):
        await began.wait()
        control._obey(pb.OrchestratorMessage(cancel=pb.Cancel(request_id="7")))
        await ended.wait()
    assert control._outbox.empty()
