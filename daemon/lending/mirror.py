"""A model's files as far as they have been borrowed: each as long as the lender's, with holes where nothing has come.

Beside every file lies a table with the CRC-32 of each page that is here (0: it is not). It outlives the process: what
has been fetched is fetched once, and what a power cut or a failing disk has made of a page is found when it is first
used, and fetched again. Several processes may fill one mirror: they write the same bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from motley.daemon.lending.wire import MOST_BYTES, Files, LendingError, LentFile, Stretch
from motley.daemon.machine.files import lock_file, make_sparse, write_all
from motley.daemon.weights.closing import Closing
from motley.protocol.wording import human_bytes

FOLDER = "borrowed"
"""Of the folder in which shares are kept, where mirrors are."""
PAGE = 512
"""Bytes that are fetched together at least: few, as a share's columns of a row end within one, and the table of what is
here is a 128th of the file at most."""
_CRC = np.dtype("<u4")
_LIST, _FILES, _TABLES = "files.json", "files", "tables"
_REMOVED = "removed-"
"""With this begins the name of the folder of a mirror that is being removed."""
_ATTEMPTS = 100
_MOMENT_S = 0.05
"""A mirror that another process is removing is gone after some such moments."""


def place_of(own: Path, files: Files) -> Path:
    """Where the model of a mirror is opened that lies in a folder of its own."""
    return own / _FILES / files.main


def borrowed_place(shares: Path, key: str) -> Path:
    """Where a mirror's model is opened, of which only the key is known.

    Args:
        shares: the folder in which shares are kept.

    Raises:
        LendingError: there is no such mirror.
    """
    own = shares / FOLDER / key
    try:
        return place_of(own, Files.read((own / _LIST).read_bytes()))
    except OSError as error:
        raise LendingError(f"{own}: what was borrowed of a model is gone: {error.strerror or error}") from error


class _MirroredFile:
    """One file of a mirror, and its table."""

    def __init__(self, lent: LentFile, file: Path, table: Path) -> None:
        self.lent = lent
        self._path = file
        pages = -(-lent.size // PAGE)
        self._file = _open_sized(file, lent.size)
        self._table = _open_sized(table, pages * _CRC.itemsize)
        self._sound = np.zeros(pages, bool)
        """Pages that are here, as this process has seen."""
        self._keep_time()

    def missing(self, stretches: Sequence[Stretch]) -> list[Stretch]:
        """What is not here of some stretches: whole pages, in ascending stretches that do not touch."""
        wanted = np.zeros(len(self._sound) + 1, np.int32)
        for offset, length in stretches:
            if length:
                wanted[offset // PAGE] += 1
                wanted[-(-(offset + length) // PAGE)] -= 1
        doubted = np.flatnonzero((np.cumsum(wanted[:-1]) > 0) & ~self._sound).tolist()
        absent = [page for run in _runs(doubted) for page in self._unsound(*run)]
        return [(first * PAGE, min(self.lent.size, (last + 1) * PAGE) - first * PAGE) for first, last in _runs(absent)]

    def fill(self, stretches: Sequence[Stretch], data: memoryview) -> None:
        """Put whole pages in their places, one stretch after another: each ends with a page, or with the file.

        Raises:
            OSError: there is no room for them.
        """
        for offset, length in stretches:
            part, data = data[:length], data[length:]
            first, sums = offset // PAGE, [_sum_of(part[at : at + PAGE]) for at in range(0, length, PAGE)]
            _write(self._file, offset, part)
            _write(self._table, first * _CRC.itemsize, np.array(sums, _CRC).tobytes())
            self._sound[first : first + len(sums)] = True
        self._keep_time()

    def close(self) -> None:
        """Close the file and its table."""
        self._file.close()
        self._table.close()

    def _unsound(self, first: int, last: int) -> Iterator[int]:
        """Pages of a run that are not here, or damaged."""
        self._table.seek(first * _CRC.itemsize)
        table = np.zeros(last - first + 1, _CRC)
        told = np.frombuffer(self._table.read(table.nbytes) or b"", _CRC)
        table[: len(told)] = told
        for page, wanted in enumerate(table.tolist(), first):
            if wanted:
                self._file.seek(page * PAGE)
                self._sound[page] = _sum_of(memoryview(self._file.read(PAGE) or b"")) == wanted
            if not self._sound[page]:
                yield page

    def _keep_time(self) -> None:
        """Have the file look as old as the lender's: shares are known by that."""
        os.utime(self._path, ns=(self.lent.modified, self.lent.modified))


class Mirror(Closing):
    """What is here of a model's files, for as long as the context lasts; nobody removes it meanwhile.

    Attributes:
        place: where the model is opened.
    """

    def __init__(self, shares: Path, files: Files, limit: int) -> None:
        """
        Args:
            shares: the folder in which shares are kept; mirrors are in one beside them.
            limit: bytes that all of them may take, unless those in use take more; others are removed.

        Raises:
            OSError: it cannot be kept there.
        """
        own = shares / FOLDER / files.key
        self.place = place_of(own, files)
        self._files: dict[Path, _MirroredFile] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(_held(own, files))
            (own / _TABLES).mkdir(exist_ok=True)
            (own / _FILES).mkdir(exist_ok=True)
            for lent in files.files:
                mirrored = _MirroredFile(lent, own / _FILES / lent.name, own / _TABLES / lent.name)
                stack.callback(mirrored.close)
                self._files[own / _FILES / lent.name] = mirrored
            _make_room(shares, limit, own)
            self._closing = stack.pop_all()

    def __iter__(self) -> Iterator[tuple[Path, LentFile]]:
        """The files, each where it is here."""
        return ((path, mirrored.lent) for path, mirrored in self._files.items())

    @property
    def modified(self) -> dict[str, int]:
        """When each file was modified that it is of, by name. Here one looks newer while something is put into it."""
        return {path.name: mirrored.lent.modified for path, mirrored in self._files.items()}

    def missing(self, file: Path, stretches: Sequence[Stretch]) -> Iterator[list[Stretch]]:
        """What is not here of some stretches of a file, as much at a time as may be asked for at a time."""
        asked: list[Stretch] = []
        room = MOST_BYTES
        for offset, length in self._files[file].missing(stretches):
            while length:
                part = min(length, room)
                asked.append((offset, part))
                offset, length, room = offset + part, length - part, room - part
                if not room:
                    yield asked
                    asked, room = [], MOST_BYTES
        if asked:
            yield asked

    def number(self, file: Path) -> int:
        """Which of the files one is, as the lender counts."""
        return list(self._files).index(file)

    def fill(self, file: Path, stretches: Sequence[Stretch], data: memoryview) -> None:
        """Put bytes that have come in their places, one stretch after another.

        Raises:
            OSError: there is no room for them.
        """
        self._files[file].fill(stretches, data)

    def close(self) -> None:
        """Let it go; what it has is kept."""
        self._closing.close()


def _held(own: Path, files: Files) -> IO[bytes]:
    """The list of a mirror's files, which is there, open and locked for use.

    Raises:
        OSError: it cannot be kept.
    """
    for _ in range(_ATTEMPTS):
        own.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as closing:
            opened = closing.enter_context(_open(own / _LIST))
            if lock_file(opened, exclusive=False) and os.path.samestat(os.fstat(opened.fileno()), (own / _LIST).stat()):
                packed = files.pack()
                if opened.read() != packed:  # others may write it, too: the same bytes to the same place
                    _write(opened, 0, packed)
                    opened.truncate()
                os.utime(own / _LIST)
                closing.pop_all()
                return opened
        time.sleep(_MOMENT_S)  # another is removing it
    raise OSError(errno.EBUSY, "others keep removing it")


def no_room(path: Path, error: OSError, what: str, come: int, instead: str) -> LendingError:
    """What to say where a mirror's file cannot be written.

    Args:
        what: cannot be kept.
        come: bytes that have come of it.
        instead: what to do, if there is no room to be made.
    """
    so_far = f"; {human_bytes(come)} have come" if come else ""
    return LendingError(f"{path}: cannot keep {what}: {error.strerror or error}{so_far}. Make room, {instead}")


class FoundMirror(NamedTuple):
    """What was borrowed of a model's files.

    Attributes:
        used: when it was last used, in seconds since the epoch.
        size: bytes that it takes on the disk.
    """

    used: float
    size: int
    path: Path

    def files(self) -> Files:
        """Those of which it has parts.

        Raises:
            LendingError: the list makes no sense.
            OSError: it is gone.
        """
        return Files.read((self.path / _LIST).read_bytes())

    def remove(self) -> bool:
        """Remove it; False: a rank uses it. At once it has another name, so that nobody who begins it anew meanwhile
        has his files removed."""
        away = self.path.with_name(f"{_REMOVED}{secrets.token_hex(8)}")
        with contextlib.suppress(OSError):  # another has removed it; on Windows: it is in use
            with _open(self.path / _LIST) as lock:
                if not lock_file(lock, exclusive=True):
                    return False
                if sys.platform != "win32":
                    self.path.rename(away)
            if sys.platform == "win32":  # where no folder of an open file can be renamed, and there are no locks
                self.path.rename(away)
            shutil.rmtree(away, ignore_errors=True)
        return not self.path.exists()


def found_mirrors(shares: Path) -> list[FoundMirror]:
    """What was borrowed, used least recently first.

    Args:
        shares: the folder in which shares are kept.
    """
    found = []
    for mirror in _folders(shares):
        with contextlib.suppress(OSError):  # another has removed it meanwhile
            taken = sum(_taken(file) for file in mirror.rglob("*") if file.is_file())
            found.append(FoundMirror((mirror / _LIST).stat().st_mtime, taken, mirror))
    return sorted(found)


def sweep_mirrors(shares: Path) -> None:
    """Remove what is left of mirrors whose removal, or whose beginning, was cut short."""
    for folder in _folders(shares, removed=True):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in _folders(shares):
        if not (folder / _LIST).exists():
            FoundMirror(0.0, 0, folder).remove()


def _folders(shares: Path, *, removed: bool = False) -> list[Path]:
    """Of mirrors, or of those that are being removed."""
    with contextlib.suppress(FileNotFoundError):
        return [each for each in (shares / FOLDER).iterdir() if each.name.startswith(_REMOVED) == removed]
    return []


def _make_room(shares: Path, limit: int, own: Path) -> None:
    """Remove mirrors that nobody uses, used least recently first, until the others take no more than `limit`."""
    sweep_mirrors(shares)
    found = found_mirrors(shares)
    total = sum(mirror.size for mirror in found)
    for mirror in found:
        if total <= limit:
            return
        if mirror.path != own and mirror.remove():
            total -= mirror.size


def _taken(file: Path) -> int:
    """Bytes that a file takes on its disk, without its holes where the system tells."""
    told = file.stat()
    blocks: int | None = getattr(told, "st_blocks", None)
    return told.st_size if blocks is None else blocks * 512


def _open(file: Path) -> FileIO:
    """A file for reading and writing; a new one where there is none."""
    return FileIO(os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600), "r+")


def _open_sized(file: Path, size: int) -> FileIO:
    """As `_open`, of so many bytes; where it is shorter, a hole comes behind what it has."""
    opened = _open(file)
    try:
        if os.fstat(opened.fileno()).st_size != size:
            make_sparse(opened)
            opened.truncate(size)
    except BaseException:
        opened.close()
        raise
    return opened


def _write(file: IO[bytes], offset: int, data: bytes | memoryview) -> None:
    file.seek(offset)
    write_all(file, memoryview(data))


def _sum_of(page: memoryview) -> int:
    """A page's CRC-32, which is never 0 here."""
    return zlib.crc32(page) or 1


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as runs of neighbours, each by its first and its last."""
    first = last = None
    for number in numbers:
        if last is None or first is None:
            first = number
        elif number != last + 1:
            yield first, last
            first = number
        last = number
    if first is not None and last is not None:
        yield first, last
