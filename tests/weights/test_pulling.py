"""Of a model of the hub, what a rank's share is made of: fetched once, over Range requests."""

from __future__ import annotations

import asyncio
import os
from contextlib import closing
from pathlib import Path

import pytest

from motley.daemon.lending.hub_mirror import begin_pull, joined, open_pulled
from motley.daemon.lending.lender import Lender
from motley.daemon.lending.wire import LendingError
from motley.daemon.loading.pulling import pull_shares
from motley.daemon.models.cutting.share import Share
from motley.daemon.models.cutting.units import units
from motley.daemon.models.files import open_model
from motley.daemon.node.survey.describe import look
from motley.daemon.weights.cache import ShareCache
from motley.daemon.weights.checkpoints.gguf.header import read_header
from motley.protocol import mesh_pb2 as pb
from tests.e2e.processes import BUNDLED
from tests.models.to_gguf import to_gguf
from tests.weights.local_hub import LocalHub

SOURCE, LIMIT = "acme/bard", 1 << 30
FIRST = 1 << 12
LATER = range(900, 908)
"""Rows of the embedding that do not come with a header."""


@pytest.mark.parametrize(("kind", "parts"), [("safetensors", 0), ("gguf", 0), ("gguf", 20)])
async def test_a_stage_is_fetched_and_no_more(
    kind: str, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of six layers; the same bytes are not asked for again, and another layer's are when they are read.

    A GGUF file's header is longer than what comes first of it; a model may be split over several of them, in a folder.
    """
    hub, source, model = LocalHub(), SOURCE, BUNDLED
    if kind == "gguf":
        monkeypatch.setattr("motley.daemon.lending.hub_mirror.FIRST", FIRST)
        folder = tmp_path / "repository" / ("fp32" if parts else "")
        folder.mkdir(parents=True)
        model = to_gguf(BUNDLED, folder / "bard.gguf", parts=parts)
        assert read_header(model).data > 4 * FIRST
        source = f"{SOURCE}:{model.relative_to(tmp_path / 'repository').as_posix()}"
    hub.repositories = {SOURCE: model if model.is_dir() else tmp_path / "repository"}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def sent() -> int:
        return sum(sent for name, sent in hub.sent.items() if name.endswith(f".{kind}"))

    def pull() -> int:
        with open_pulled(source, None, tmp_path, LIMIT) or begin_pull(source, tmp_path, LIMIT) as mirror:
            attention, mlp, vocabulary = _all()
            heads = (range(0), range(0), vocabulary)
            own = [Share(1, attention, mlp, head, range(2 * each, 2 * each + 2)) for each, head in enumerate(heads)]
            return pull_shares(mirror, own, [1], ["fp32"], 32, lambda done, total: None)

    def read() -> None:
        mirror = open_pulled(source, None, tmp_path, LIMIT)
        assert mirror is not None
        with mirror, open_model(mirror.place, mirror.bring) as ours, open_model(model) as whole:
            there = next(mirror.place.parent.glob(f"**/*.{kind}"))
            os.utime(there, ns=(1, 1))  # as while something is put into it
            with closing(Lender(mirror.place, mirror)) as lender:
                assert {file.name: file.modified for file in lender.files.files} == mirror.modified
            assert ours.source.fingerprint() == whole.source.fingerprint()
            assert ours.rows(LATER).tobytes() == whole.rows(LATER).tobytes()

    async with hub.serving():
        _use(hub, monkeypatch)
        assert await asyncio.to_thread(pull) > 0
        before = sent()
        weights = list(hub.repositories[SOURCE].rglob(f"*.{kind}"))
        assert bool(parts) == (len(weights) > 1)
        assert 0.25 < before / sum(file.stat().st_size for file in weights) < 0.5
        assert not await asyncio.to_thread(pull)
        assert sent() == before
        told = await asyncio.to_thread(look, pb.ModelSpec(source=source), None, ShareCache(tmp_path))
        assert told.profile.fingerprint
        assert sent() == before
        await asyncio.to_thread(read)
        assert sent() > before
        await asyncio.to_thread(_open_beside_others, source, tmp_path)


def _open_beside_others(source: str, shares: Path) -> None:
    """Nobody who opens what was pulled finds it half told, or tells it anew."""
    (told,) = shares.rglob("hub.json")
    before = told.stat().st_mtime_ns
    for _ in range(2):
        mirror = open_pulled(source, None, shares, LIMIT)
        assert mirror is not None
        mirror.close()
    assert told.stat().st_mtime_ns == before


async def test_a_header_without_an_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repository").mkdir()
    model = to_gguf(BUNDLED, tmp_path / "repository" / "bard.gguf")
    with model.open("r+b") as damaged:
        damaged.seek(4 + 4 + 8)
        damaged.write((1 << 40).to_bytes(8, "little"))  # so many keys
        damaged.write((4 << 20).to_bytes(8, "little"))  # the first of which is so long
    for name, size in (("FIRST", FIRST), ("LONGEST_HEADER", 1 << 16)):
        monkeypatch.setattr(f"motley.daemon.lending.hub_mirror.{name}", size)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    hub = LocalHub()
    hub.repositories = {SOURCE: model.parent}
    async with hub.serving():
        _use(hub, monkeypatch)
        with pytest.raises(LendingError, match=r"header of bard\.gguf does not end within 65\.54 kB, .* pull --whole"):
            await asyncio.to_thread(begin_pull, f"{SOURCE}:{model.name}", tmp_path, LIMIT)
    assert hub.sent[model.name] == 1 << 16


def _use(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        hub.url + "/{repo_id}/resolve/{revision}/{filename}",
    )


def _all() -> tuple[range, range, range]:
    """All units of the model."""
    with open_model(BUNDLED) as opened:
        own = units(opened.model, "fp32", 32, opened.stored)
    return range(own.kv_groups), range(own.mlp), range(own.vocabulary)


def test_short_gaps_are_fetched_with_what_is_around_them() -> None:
    assert list(joined([])) == []
    assert list(joined([(0, 512), (1024, 512), (1 << 20, 512)])) == [(0, 1536), (1 << 20, 512)]
