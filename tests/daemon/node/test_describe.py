"""Describing a model that has to be downloaded."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from motley.daemon.loading import fetching
from motley.daemon.loading.fetching import LoadError
from motley.daemon.node.describe import describe
from motley.protocol import mesh_pb2 as pb


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
