"""Adapters that other nodes have sent to this one, by fingerprint, in a folder that ranks here share.

An adapter is a folder with two files, or a GGUF file. It travels as one stretch of bytes, in pieces: the length of its
config (0 in GGUF, where it is none of the files), the config, the weights.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from motley.daemon.adapters.config import CONFIG
from motley.daemon.adapters.gguf_adapter import GGUF
from motley.daemon.adapters.reading import WEIGHTS
from motley.protocol.files import replace_file

FOLDER = "adapters"
"""What the folder of the adapters is called, in that of the shares."""
PIECE_BYTES = 1 << 20
_GGUF_FILE = f"adapter{GGUF}"
_PART = ".part"
"""What the names of what has not come whole end in."""
LEFT_S = 3600.0
"""To what has not come whole nothing comes any more, if none has for so long."""
_LENGTH = struct.Struct("<Q")


class AdapterStoreError(Exception):
    """An adapter cannot be read or kept; the message says why."""


def is_adapter(place: Path) -> bool:
    """Whether there are an adapter's files in a place: in a folder, or it is one in GGUF."""
    if place.suffix == GGUF:
        return place.is_file()
    return (place / CONFIG).is_file() and (place / WEIGHTS).is_file()


def lacks(folder: Path) -> str:
    """What a folder has not got of an adapter's files; empty: it has both, or is a file."""
    return next((name for name in (CONFIG, WEIGHTS) if folder.is_dir() and not (folder / name).is_file()), "")


def size_of(adapter: Path) -> int:
    """Bytes of the stretch that an adapter travels as.

    Raises:
        AdapterStoreError: a file of it cannot be read.
    """
    with _told(adapter):
        config, weights = _files(adapter)
        return _LENGTH.size + len(config) + weights.stat().st_size


def read_piece(adapter: Path, start: int) -> bytes:
    """The bytes of an adapter from a place in the stretch on, `PIECE_BYTES` at most.

    Raises:
        AdapterStoreError: it cannot be read.
    """
    with _told(adapter):
        config, weights = _files(adapter)
        head = _LENGTH.pack(len(config)) + config
        piece = head[start : start + PIECE_BYTES]
        if len(piece) < PIECE_BYTES:
            with weights.open("rb") as file:
                file.seek(max(0, start - len(head)))
                piece += file.read(PIECE_BYTES - len(piece))
        return piece


@dataclass
class _Coming:
    """An adapter that has come in part.

    Attributes:
        folder: removed if the rest does not come.
        weights: its file, in a folder beneath that will be the adapter's.
        bytes: of the stretch, that have come.
    """

    fingerprint: str
    folder: Path
    weights: Path
    bytes: int


class AdapterStore:
    """The adapters in a folder, of at most `limit` bytes but for the one that came last."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._coming: _Coming | None = None

    def find(self, fingerprint: str) -> Path | None:
        """The folder or GGUF file of an adapter, which counts as used now; None: it is not here."""
        folder = self._folder / fingerprint
        found = next((place for place in (folder, folder / _GGUF_FILE) if is_adapter(place)), None)
        if found:
            with contextlib.suppress(OSError):
                os.utime(folder)
        return found

    def write(self, fingerprint: str, start: int, size: int, data: bytes) -> None:
        """Take the next piece of an adapter; with the last one it is here. The first one begins anew.

        Raises:
            AdapterStoreError: pieces are missing before it, it is more than `size`, it cannot be written, or with it
                the adapter turns out to be damaged.
        """
        if start + len(data) > size:
            ends = f"ends at {start + len(data)}, behind its {size} bytes"
            raise AdapterStoreError(f"a piece of adapter {fingerprint[:12]} has come that {ends}")
        with _told(self._folder):
            if start == 0:
                self.close()
                self._begin(fingerprint, data)
            elif self._coming is None or (self._coming.fingerprint, self._coming.bytes) != (fingerprint, start):
                raise AdapterStoreError(f"a piece of adapter {fingerprint[:12]} has come that begins at {start}")
            else:
                with self._coming.weights.open("ab") as out:
                    out.write(data)
                os.utime(self._coming.folder)  # by which others see that it still comes
                self._coming.bytes += len(data)
            if start + len(data) >= size:
                self._finish()

    def close(self) -> None:
        """Forget what has come of an adapter of which the rest does not come."""
        if self._coming is not None:
            shutil.rmtree(self._coming.folder, ignore_errors=True)
            self._coming = None

    def _begin(self, fingerprint: str, data: bytes) -> None:
        """Take the first piece, which has the config."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_left()
        (length,) = _LENGTH.unpack(data[: _LENGTH.size])
        head = _LENGTH.size + length
        if head > len(data):
            raise AdapterStoreError(f"adapter {fingerprint[:12]} has come with a config longer than its first piece")
        folder = Path(tempfile.mkdtemp(_PART, dir=self._folder))
        own = folder / fingerprint
        self._coming = _Coming(fingerprint, folder, own / (WEIGHTS if length else _GGUF_FILE), len(data))
        own.mkdir()
        if length:
            (own / CONFIG).write_bytes(data[_LENGTH.size : head])
        self._coming.weights.write_bytes(data[head:])

    def _finish(self) -> None:
        """Put what has come in its place, and remove what was used longest ago if there is too much now."""
        assert self._coming is not None
        own = self._coming.weights.parent
        there = self._folder / own.name
        try:
            own.rename(there)
        except OSError:
            if not there.is_dir():
                raise
            if not _alike(there, own):  # it is damaged; else another rank here was quicker
                for file in own.iterdir():  # at no time is there none: other ranks here read it, or do the same
                    replace_file(file, there / file.name)
        self.close()
        self._make_room(there.name)

    def _remove_left(self) -> None:
        """Remove what processes have left that were killed while an adapter came."""
        for left in self._folder.glob(f"*{_PART}"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime < LEFT_S:
                    continue
                if left.is_dir():
                    shutil.rmtree(left)
                else:
                    left.unlink()

    def _make_room(self, newest: str) -> None:
        sizes = {}
        for folder in self._folder.iterdir():
            if folder.is_dir() and not folder.suffix:
                with contextlib.suppress(OSError):
                    size = sum(file.stat().st_size for file in folder.iterdir())
                    sizes[folder] = folder.stat().st_mtime, size
        total = sum(size for _, size in sizes.values())
        for folder in sorted(sizes, key=lambda each: sizes[each]):
            if total <= self._limit:
                return
            if folder.name != newest:
                shutil.rmtree(folder, ignore_errors=True)
                total -= sizes[folder][1]


def _files(adapter: Path) -> tuple[bytes, Path]:
    """An adapter's config, and the file with its weights."""
    if adapter.suffix == GGUF:
        return b"", adapter
    return (adapter / CONFIG).read_bytes(), adapter / WEIGHTS


@contextlib.contextmanager
def _told(where: Path) -> Iterator[None]:
    """Errors say what could not be read or kept."""
    try:
        yield
    except (OSError, struct.error) as error:
        raise AdapterStoreError(f"{where}: {error}") from error


def _alike(one: Path, other: Path) -> bool:
    """Whether two folders have the same adapter, to the byte."""
    names = sorted(file.name for file in other.iterdir())
    return filecmp.cmpfiles(one, other, names, shallow=False)[0] == names
