"""The cache of shares: what is taken from it is whole and right, however many processes use it and however they end."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from motley.daemon.machine.files import lock_file
from motley.daemon.weights import cache as module
from motley.daemon.weights.cache import LABEL, CacheError, ShareCache, share_key
from motley.daemon.weights.share_file import ShareFileError
from motley.daemon.weights.spec import SHARE_FILE, Encoding, Piece, Weight, lay_out
from tests.weights.cache_process import LABELLED, Writer, keep

KEYS = [digit * 64 for digit in "0123456789abcdef"]
SIZE = 3 << 20
SMALL = 300_000
PROCESS = Path(__file__).with_name("cache_process.py")
PROCESS_S = 60.0
Start = Callable[..., "subprocess.Popen[str]"]


def never(file: Path) -> None:
    raise AssertionError("it should be there")


def kept(cache: ShareCache) -> list[str]:
    return [entry.key[0] for entry in cache.entries()]


def age(cache: ShareCache, *keys: str) -> None:
    """As if they had last been used in this order, long ago."""
    for when, key in enumerate(keys):
        os.utime(cache.folder / key / LABEL, (1e9 + when, 1e9 + when))


@pytest.fixture
def cache(tmp_path: Path) -> ShareCache:
    return ShareCache(tmp_path / "shares")


def test_the_second_time_it_is_there(cache: ShareCache) -> None:
    assert cache.entries() == []
    keep(cache, KEYS[1], SIZE)
    keep(cache, KEYS[1], SIZE, write=never)
    keep(ShareCache(cache.folder), KEYS[1], SIZE, write=never)
    (entry,) = cache.entries()
    assert (entry.key, entry.label, entry.size) == (KEYS[1], LABELLED, SIZE)
    assert [file.name for file in cache.folder.iterdir()] == [KEYS[1]]


@pytest.mark.parametrize("size", [0, 1, 5 << 20])
def test_any_size(cache: ShareCache, size: int) -> None:
    keep(cache, KEYS[0], size)
    keep(cache, KEYS[0], size, write=never)


def test_progress_of_the_check_counts_up_to_all_bytes(cache: ShareCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.daemon.weights.cache._REPORT", 1)
    keep(cache, KEYS[0], SIZE)
    seen: list[tuple[int, int]] = []
    with cache.hold(KEYS[0], LABELLED, SIZE, never, lambda done, total: seen.append((done, total))):
        assert seen == [(done << 20, SIZE) for done in (1, 2, 3)]


def test_what_has_just_been_written_is_read_back_once(cache: ShareCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.daemon.weights.cache._REPORT", 1)
    seen: list[int] = []
    with cache.hold(KEYS[0], LABELLED, SIZE, Writer(KEYS[0], SIZE), lambda done, total: seen.append(done)):
        assert seen == [done << 20 for done in (1, 2, 3)]


def test_keys_tell_apart_whatever_changes_a_share() -> None:
    piece = Piece("q", range(64), range(128))
    weight = Weight("qk", (piece,), Encoding.INT4, 32)
    others = [
        replace(weight, block=64),
        replace(weight, encoding=Encoding.INT8),
        replace(weight, pieces=(replace(piece, tensor="k"),)),
        replace(weight, pieces=(replace(piece, rows=range(64, 128)),)),
        replace(weight, pieces=(replace(piece, columns=range(128, 256)),)),
        replace(weight, pieces=(replace(piece, rows=range(32)), replace(piece, rows=range(32, 64)))),
    ]
    declarations = [
        lay_out(list(weights)) for weights in ([weight], *([other] for other in others), [weight, others[2]])
    ]
    keys = {share_key("model", "then", *declared) for declared in declarations}
    (placed,), size = declarations[0]
    keys |= {share_key("model", "later", [placed], size)}
    keys |= {
        share_key("other", "then", [placed], size),
        share_key("model", "then", [replace(placed, scale_offset=0)], size),
    }
    assert len(keys) == len(declarations) + 3
    assert share_key("model", "then", *lay_out([weight])) == share_key("model", "then", [placed], size)
    assert all(re.fullmatch("[0-9a-f]{64}", key) for key in keys)


def test_the_least_recently_used_make_way(cache: ShareCache) -> None:
    cache.limit = 3 * SIZE
    for key in KEYS[:3]:
        keep(cache, key, SIZE)
    age(cache, *KEYS[:3])
    keep(cache, KEYS[0], SIZE, write=never)  # used again
    keep(cache, KEYS[3], SIZE)
    assert sorted(kept(cache)) == ["0", "2", "3"]
    keep(cache, KEYS[4], 2 * SIZE)
    assert len(kept(cache)) == 2
    assert kept(cache)[-1] == "4"


def test_an_entry_that_is_locked_for_a_moment_is_waited_for(cache: ShareCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """By who has just made it, or looks whether it may be removed."""
    keep(cache, KEYS[0], SMALL)
    locked = (cache.folder / KEYS[0] / LABEL).open("rb")
    assert lock_file(locked, exclusive=True)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: locked.close())
    keep(cache, KEYS[0], SMALL, write=never)
    assert locked.closed


def test_what_is_in_use_stays(cache: ShareCache) -> None:
    cache.limit = 2 * SIZE
    with ExitStack() as stack:
        for key in KEYS[:3]:  # one more than the limit has room for: all are needed
            stack.enter_context(cache.hold(key, LABELLED, SIZE, Writer(key, SIZE)))
        assert sorted(kept(cache)) == ["0", "1", "2"]
        assert not any(cache.remove(key) for key in KEYS[:3])
        cache.sweep()
        for key in KEYS[:3]:
            keep(cache, key, SIZE, write=never)
    keep(cache, KEYS[3], SIZE)
    assert len(kept(cache)) == 2
    assert cache.remove(KEYS[3])
    assert not cache.remove(KEYS[3])


def damaged(folder: Path) -> dict[str, Callable[[], object]]:
    share, label = folder / SHARE_FILE, folder / LABEL
    told = label.read_text()

    def flip() -> None:
        with share.open("r+b") as file:
            file.seek(SIZE // 2)
            byte = file.read(1)[0]
            file.seek(SIZE // 2)
            file.write(bytes([byte ^ 1]))

    return {
        "a bit flipped": flip,
        "truncated": lambda: os.truncate(share, SIZE - 1),
        "grown": lambda: os.truncate(share, SIZE + 1),
        "no share file": share.unlink,
        "no label": label.unlink,
        "an empty label": lambda: label.write_text(""),
        "half a label": lambda: label.write_text(told[:-20]),
        "not a label": lambda: label.write_text("[]"),
        "another's label": lambda: label.write_text(told.replace(KEYS[1], KEYS[2])),
        "another sum": lambda: label.write_text(told.replace('"crc32": ', '"crc32": 1')),
    }


@pytest.mark.parametrize("how", range(10))
def test_damage_is_noticed_and_mended(cache: ShareCache, how: int, caplog: pytest.LogCaptureFixture) -> None:
    keep(cache, KEYS[1], SIZE)
    name, damage = list(damaged(cache.folder / KEYS[1]).items())[how]
    damage()
    write = Writer(KEYS[1], SIZE)
    with caplog.at_level(logging.WARNING):
        keep(cache, KEYS[1], SIZE, write=write)
    assert write.written == 1, name
    assert "damaged" in caplog.text
    keep(cache, KEYS[1], SIZE, write=never)
    assert len(list(cache.folder.iterdir())) == 1


def test_the_default_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "elsewhere"))
    assert ShareCache().folder == tmp_path / "elsewhere"
    monkeypatch.delenv("MOTLEY_CACHE")
    monkeypatch.setenv("MOTLEY_HOME", str(tmp_path / "home"))
    assert ShareCache().folder == tmp_path / "home" / "shares"
    monkeypatch.delenv("MOTLEY_HOME")
    assert tmp_path not in ShareCache().folder.parents


def test_what_is_damaged_is_told_and_removed(cache: ShareCache) -> None:
    keep(cache, KEYS[0], SIZE)
    keep(cache, KEYS[1], SIZE)
    (cache.folder / KEYS[0] / LABEL).write_bytes(b"[]")
    assert cache.damaged() == {KEYS[0]: SIZE + 2}
    assert kept(cache) == ["1"]
    assert cache.remove(KEYS[0])
    assert cache.damaged() == {}


def test_what_is_not_the_cache_s_is_left_alone(cache: ShareCache) -> None:
    cache.folder.mkdir()
    (cache.folder / "notes.txt").write_text("mine")
    (cache.folder / "model").mkdir()
    cache.limit = 1
    keep(cache, KEYS[0], SIZE)
    keep(cache, KEYS[1], SIZE)
    cache.prepare()
    assert {file.name for file in cache.folder.iterdir()} == {"notes.txt", "model", KEYS[1]}


def test_an_entry_that_comes_while_it_is_looked_for_stays(cache: ShareCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process makes it after its label was looked for, and uses it."""
    look = module._open_label
    with ExitStack() as other:

        def look_too_early(folder: Path) -> IO[bytes] | None:
            monkeypatch.setattr(module, "_open_label", look)
            found = look(folder)
            if found is None:
                other.enter_context(ShareCache(cache.folder).hold(KEYS[1], LABELLED, SIZE, Writer(KEYS[1], SIZE)))
            return found

        monkeypatch.setattr(module, "_open_label", look_too_early)
        with cache.hold(KEYS[1], LABELLED, SIZE, Writer(KEYS[1], SIZE)) as file:
            assert file.exists()
        label = (cache.folder / KEYS[1] / LABEL).stat()
    assert (cache.folder / KEYS[1] / LABEL).stat().st_ino == label.st_ino
    assert len(list(cache.folder.iterdir())) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="there, a folder in use cannot be renamed")
@pytest.mark.parametrize("sound", [False, True])
def test_an_entry_that_was_replaced_while_it_was_checked_stays(
    sound: bool, cache: ShareCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(cache, KEYS[1], SIZE)
    check = module._is_sound
    labels: list[os.stat_result] = []
    with ExitStack() as other:

        def check_too_late(*arguments: Any) -> bool:
            monkeypatch.setattr(module, "_is_sound", check)
            shutil.rmtree(cache.folder / KEYS[1])
            other.enter_context(ShareCache(cache.folder).hold(KEYS[1], LABELLED, SIZE, Writer(KEYS[1], SIZE)))
            labels.append((cache.folder / KEYS[1] / LABEL).stat())
            return sound

        monkeypatch.setattr(module, "_is_sound", check_too_late)
        with cache.hold(KEYS[1], LABELLED, SIZE, Writer(KEYS[1], SIZE)):
            other.close()
            assert os.path.samestat(labels[0], (cache.folder / KEYS[1] / LABEL).stat())
            assert not cache.remove(KEYS[1])  # the lease is of the entry that is there


@pytest.mark.skipif(sys.platform == "win32", reason="there, files are opened without descriptors running out")
def test_an_entry_that_cannot_be_opened_is_not_damaged(cache: ShareCache, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(cache, KEYS[1], SIZE)
    opened = Path.open

    def run_out(file: Path, mode: str = "r", *rest: Any) -> Any:
        if file.name == LABEL and mode == "rb":
            raise OSError(errno.EMFILE, "too many open files")
        return opened(file, mode, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", run_out)
        with pytest.raises(CacheError, match="cannot be looked at: too many open files"):
            cache.sweep()
        for key in KEYS[1:3]:
            with pytest.raises(ShareFileError, match="cannot be looked at: too many open files"):
                keep(cache, key, SIZE)
    keep(cache, KEYS[1], SIZE, write=never)


@pytest.mark.skipif(sys.platform == "win32", reason="there, nothing is locked")
def test_a_finished_entry_cannot_be_swept_before_it_has_its_name(
    cache: ShareCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = module._rename

    def sweep_first(made: Path, entry: Path) -> bool:
        cache.sweep()
        return rename(made, entry)

    monkeypatch.setattr(module, "_rename", sweep_first)
    write = Writer(KEYS[1], SIZE)
    keep(cache, KEYS[1], SIZE, write=write)
    assert write.written == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ShareFileError("full"), OSError(errno.ENOSPC, "no space")])
def test_a_failure_leaves_nothing(cache: ShareCache, error: BaseException) -> None:
    def fail(file: Path) -> None:
        file.write_bytes(b"half")
        raise error

    with pytest.raises((KeyboardInterrupt, ShareFileError)) as caught, cache.hold(KEYS[0], LABELLED, SIZE, fail):
        pass
    if isinstance(error, OSError):
        assert "cannot keep this rank's weights (3.15 MB): no space" in str(caught.value)
    else:
        assert caught.value is error
    assert list(cache.folder.iterdir()) == []


class Disk:
    """A disk of which the cache has `size` bytes to itself; the rest of the world is full."""

    def __init__(self, cache: ShareCache, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._cache, self._size = cache, size
        monkeypatch.setattr(shutil, "disk_usage", self.usage)

    def usage(self, folder: Path) -> Any:
        used = sum(file.stat().st_size for file in self._cache.folder.rglob(SHARE_FILE))
        return SimpleNamespace(total=self._size, used=used, free=self._size - used)

    def write(self, key: str, size: int) -> Callable[[Path], None]:
        def write(file: Path) -> None:
            if self.usage(file.parent).free < size:
                raise ShareFileError("the disk is full")
            Writer(key, size)(file)

        return write


def test_a_full_disk_makes_others_go(cache: ShareCache, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(cache, 3 * SIZE + 1000, monkeypatch)
    for key in KEYS[:3]:
        keep(cache, key, SIZE, write=disk.write(key, SIZE))
    age(cache, KEYS[1], KEYS[0], KEYS[2])
    keep(cache, KEYS[3], SIZE, write=disk.write(KEYS[3], SIZE))
    assert kept(cache) == ["0", "2", "3"]
    with cache.hold(KEYS[0], LABELLED, SIZE, never):
        with pytest.raises(ShareFileError, match="the disk is full"):
            keep(cache, KEYS[4], 3 * SIZE, write=disk.write(KEYS[4], 3 * SIZE))
        assert kept(cache) == ["0"]
        keep(cache, KEYS[0], SIZE, write=never)


def test_two_that_are_made_at_once_find_room_for_both(cache: ShareCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process begins one after room was made for the first, and before that has taken it."""
    disk, make_room = Disk(cache, 3 * SIZE + 1000, monkeypatch), ShareCache._make_room
    for key in KEYS[:2]:
        keep(cache, key, SIZE, write=disk.write(key, SIZE))
    age(cache, *KEYS[:2])

    def begin_another(self: ShareCache, size: int) -> None:
        make_room(self, size)
        monkeypatch.setattr(ShareCache, "_make_room", make_room)
        keep(ShareCache(cache.folder), KEYS[3], SIZE, write=disk.write(KEYS[3], SIZE))

    monkeypatch.setattr(ShareCache, "_make_room", begin_another)
    keep(cache, KEYS[2], SIZE, write=disk.write(KEYS[2], SIZE))
    assert sorted(kept(cache)) == ["1", "2", "3"]


def test_what_is_written_of_another_is_counted_once(cache: ShareCache, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(cache, 3 * SIZE + 1000, monkeypatch)
    keep(cache, KEYS[0], SIZE, write=disk.write(KEYS[0], SIZE))

    def write(file: Path) -> None:
        Writer(KEYS[1], SIZE)(file)
        keep(ShareCache(cache.folder), KEYS[2], SIZE, write=disk.write(KEYS[2], SIZE))

    keep(cache, KEYS[1], SIZE, write=write)
    assert sorted(kept(cache)) == ["0", "1", "2"]


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    cache = ShareCache(file / "shares")
    with pytest.raises(CacheError, match=r"cannot write to .*shares, where shares are kept .*--cache"):
        cache.prepare()
    with pytest.raises(ShareFileError, match="shares"):
        keep(cache, KEYS[0], SIZE)


# ------------------------------------------------------------ several processes


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts processes that use a cache (see cache_process.py); ends those that are left."""
    with ExitStack() as stack:

        def begin(what: str, cache: ShareCache, *arguments: object) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, str(PROCESS), what, str(cache.folder), *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield begin


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(PROCESS_S)


def test_processes_that_want_the_same_share_at_once(cache: ShareCache, start: Start) -> None:
    processes = [start("once", cache, KEYS[5], SIZE) for _ in range(3)]
    assert [said(process) for process in processes] == ["here"] * 3
    outs = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        outs.append(said(process))
        assert process.wait(PROCESS_S) == 0
    assert set(outs) <= {"written 0", "written 1"}
    assert "written 1" in outs
    assert [file.name for file in cache.folder.iterdir()] == [KEYS[5]]
    keep(cache, KEYS[5], SIZE, write=never)


def test_processes_that_push_each_other_s_shares_out(cache: ShareCache, start: Start) -> None:
    processes = [start("many", cache, seed, SMALL, *KEYS[:5]) for seed in range(3)]
    for process in processes:
        assert said(process) == "right every time"
        assert process.wait(PROCESS_S) == 0
    assert not [file for file in cache.folder.iterdir() if file.name not in KEYS]
    for digit in kept(cache):
        keep(cache, digit * 64, SMALL, write=never)


def test_a_writer_that_is_killed_leaves_what_the_next_start_sweeps(cache: ShareCache, start: Start) -> None:
    process = start("stall", cache, KEYS[6], SIZE)
    assert said(process) == "half"
    cache.prepare()  # it lives: nothing is left behind yet
    (partial,) = cache.folder.iterdir()
    assert (partial / SHARE_FILE).read_bytes() == b"half"
    kill(process)
    cache.prepare()
    assert list(cache.folder.iterdir()) == []
    keep(cache, KEYS[6], SIZE)


def test_an_unlabelled_leftover_is_swept_when_it_is_old(cache: ShareCache) -> None:
    partial = cache.folder / "partial-0123456789abcdef"
    partial.mkdir(parents=True)
    cache.prepare()
    assert partial.exists()
    os.utime(partial, (1e9, 1e9))
    cache.prepare()
    assert not partial.exists()


def test_a_holder_that_is_killed_holds_no_longer(cache: ShareCache, start: Start) -> None:
    process = start("hold", cache, KEYS[6], SIZE)
    assert said(process) == "held"
    assert not cache.remove(KEYS[6])
    kill(process)
    assert cache.remove(KEYS[6])
