"""Adapters that come from other nodes: in pieces, whole or not at all, and not more than there is room for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from motley.daemon.adapters import store
from motley.daemon.adapters.config import CONFIG
from motley.daemon.adapters.reading import WEIGHTS
from motley.daemon.adapters.store import AdapterStore, AdapterStoreError, read_piece, size_of

A_LOT = 1 << 40


def an_adapter(folder: Path, config: bytes, weights: bytes) -> Path:
    folder.mkdir()
    (folder / CONFIG).write_bytes(config)
    (folder / WEIGHTS).write_bytes(weights)
    return folder


def send(adapter: Path, kept: AdapterStore, name: str) -> None:
    size, start = size_of(adapter), 0
    while start < size:
        piece = read_piece(adapter, start)
        kept.write(name, start, size, piece)
        start += len(piece)
    assert start == size


@pytest.mark.parametrize("weights", [0, 1, 54, 55, 56, 1000])
def test_an_adapter_that_was_sent_in_pieces_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: int
) -> None:
    monkeypatch.setattr(store, "PIECE_BYTES", 64)
    adapter = an_adapter(tmp_path / "mine", b"x", os.urandom(weights))
    kept = AdapterStore(tmp_path / "kept", A_LOT)
    assert kept.find("a") is None
    send(adapter, kept, "a")
    send(adapter, AdapterStore(tmp_path / "kept", A_LOT), "a")  # another rank on the same machine
    there = kept.find("a")
    assert there is not None
    assert [(there / name).read_bytes() for name in (CONFIG, WEIGHTS)] == [
        (adapter / name).read_bytes() for name in (CONFIG, WEIGHTS)
    ]
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["a"], "nothing else is left"


def test_a_piece_that_does_not_follow_is_refused(tmp_path: Path) -> None:
    kept = AdapterStore(tmp_path, A_LOT)
    with pytest.raises(AdapterStoreError, match="begins at 5"):
        kept.write("a", 5, 9, b"abcd")
    kept.write("a", 0, 14, bytes(10))
    with pytest.raises(AdapterStoreError, match="begins at 10"):
        kept.write("b", 10, 14, b"abcd")
    with pytest.raises(AdapterStoreError, match="begins at 9"):
        kept.write("a", 9, 14, b"abcd")
    assert kept.find("a") is None
    kept.close()
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_an_adapter_is_refused(tmp_path: Path) -> None:
    kept = AdapterStore(tmp_path, A_LOT)
    with pytest.raises(AdapterStoreError, match="ends at 9, behind its 8 bytes"):
        kept.write("a", 0, 8, bytes(9))
    with pytest.raises(AdapterStoreError, match="longer than its first piece"):
        kept.write("a", 0, 10, (2).to_bytes(8, "little") + b"x")
    assert kept.find("a") is None


def test_what_killed_processes_have_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "old.part").write_bytes(b"x")
    (tmp_path / "older.part").mkdir()
    (tmp_path / "older.part" / "a").write_bytes(b"x")
    (tmp_path / "new.part").write_bytes(b"x")
    for name in ("old.part", "older.part"):
        os.utime(tmp_path / name, (5, 5))
    kept = AdapterStore(tmp_path, A_LOT)
    kept.write("a", 0, 9, bytes(8))
    kept.close()
    assert [file.name for file in tmp_path.iterdir()] == ["new.part"]


def test_what_still_comes_is_not_removed_however_slow(tmp_path: Path) -> None:
    slow, other = (AdapterStore(tmp_path, A_LOT) for _ in range(2))
    slow.write("a", 0, 17, (1).to_bytes(8, "little") + b"c")
    (coming,) = tmp_path.iterdir()
    os.utime(coming, (5, 5))  # it began long ago
    slow.write("a", 9, 17, b"we")
    other.write("b", 0, 9, bytes(8))
    slow.write("a", 11, 17, b"ights!")
    assert slow.find("a")
    other.close()


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    kept = AdapterStore(tmp_path / "kept", 250)
    for at, name in enumerate("abc"):
        send(an_adapter(tmp_path / name, b"x", bytes(99)), kept, name)
        if kept.find("a") and at == 1:
            for used, each in ((5, "b"), (9, "a")):
                os.utime(tmp_path / "kept" / each, (used, used))
    assert sorted(file.name for file in (tmp_path / "kept").iterdir()) == ["a", "c"]


def test_a_disk_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(AdapterStoreError, match="file"):
        AdapterStore(tmp_path / "file" / "kept", A_LOT).write("a", 0, 1, b"a")
    with pytest.raises(AdapterStoreError, match="none"):
        size_of(tmp_path / "none")


def test_a_damaged_folder_is_replaced(tmp_path: Path) -> None:
    """One with half a file is not as it was sent; one without is not found at all."""
    adapter = an_adapter(tmp_path / "mine", b"config", b"weights")
    kept = AdapterStore(tmp_path / "kept", A_LOT)
    send(adapter, kept, "a")
    there = kept.find("a")
    assert there is not None
    (there / WEIGHTS).write_bytes(b"wei")
    send(adapter, kept, "a")
    assert (there / WEIGHTS).read_bytes() == b"weights"
    (there / CONFIG).unlink()
    assert kept.find("a") is None
    send(adapter, kept, "a")
    assert kept.find("a") == there


@pytest.mark.parametrize(("module", "name"), [(os, "replace"), (shutil, "rmtree")])
def test_two_ranks_of_a_machine_replace_a_damaged_folder_at_once(
    module: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one does so after the first change that the first one makes."""
    adapter = an_adapter(tmp_path / "mine", b"config", b"weights")
    first, second = (AdapterStore(tmp_path / "kept", A_LOT) for _ in range(2))
    send(adapter, first, "a")
    there, change = tmp_path / "kept" / "a", getattr(module, name)
    (there / WEIGHTS).write_bytes(b"wei")

    def interpose(*given: Any, **more: Any) -> None:
        monkeypatch.undo()
        change(*given, **more)
        send(adapter, second, "a")

    monkeypatch.setattr(module, name, interpose)
    send(adapter, first, "a")
    assert first.find("a") == there
    assert [(there / name).read_bytes() for name in (CONFIG, WEIGHTS)] == [b"config", b"weights"]
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["a"]


def test_a_gguf_file_is_one_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(os.urandom(1000))
    kept = AdapterStore(tmp_path / "kept", A_LOT)
    for _ in range(2):
        send(file, kept, "a")
        there = kept.find("a")
        assert there is not None
        assert (there.suffix, there.read_bytes()) == (".gguf", file.read_bytes())
