"""Shares on disk: quantised once, so that a later start of the same share only maps what the first one wrote.

An entry is a folder named by its key, a SHA-256 over everything that decides about the share's bytes. It holds the
share file and a label that says what it is, and appears and disappears whole, by renaming. Processes share a cache
without knowing of each other:

- Of two that make the same entry at the same time, one is first; the other takes that.
- Whoever uses an entry, or makes one, has its label open and locked. The system unlocks it when the process is gone,
  however it ended. On Windows nothing needs locking: a folder with an open file in it cannot be renamed.
- An entry is used only if its share file has the size and the CRC-32 that its label tells. That costs 0.3 s per GB of
  reading what the engine reads anyway, eight times slower, when it packs. So nothing is flushed to the disk when an
  entry is made: what a power cut leaves of it is found out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import IO

import platformdirs

from motley.daemon.machine.files import lock_file
from motley.daemon.weights.share_file import ShareFileError
from motley.daemon.weights.spec import SHARE_FILE, Placed
from motley.protocol.wording import human_bytes

logger = logging.getLogger(__name__)

FORMAT = 2
"""A part of every key, to be raised whenever the same declaration comes to mean other bytes."""
DEFAULT_LIMIT = 50_000_000_000

LABEL = "label.json"
_KEY = re.compile(r"[0-9a-f]{64}")
_PARTIAL = "partial-"
"""What the folder of an entry is called, before a random rest, while it is made or removed."""
_MADE = re.compile(rf"{_PARTIAL}[0-9a-f]+-(\d+)")
"""While it is made, the size that its share file will have follows, so that others leave room for that."""
_UNLABELLED_S = 60.0
"""A partial folder without a label is only just being made, or removed, unless it is older than this."""
_MOMENT_S = 5.0
"""An entry that is locked by somebody else for so long is taken for one that goes."""
_ATTEMPTS = 3
_CHUNK = 1 << 20
_REPORT = 64 << 20
"""Bytes checked between two calls of `progress`."""


class CacheError(Exception):
    """The cache cannot be used; the message says where and why."""


@dataclass(frozen=True)
class Label:
    """What a person wants to know of a share.

    Attributes:
        model: as it was asked for: a folder or a hub id.
        fraction: of the model's weights.
        expert: ``layer 3 expert 5``, of a share that is a whole expert; else empty.
    """

    model: str
    quantisation: str
    block: int
    fraction: float
    expert: str = ""


@dataclass(frozen=True)
class Entry:
    """A cached share.

    Attributes:
        size: of the share file, in bytes.
        used: when it was last taken or left, in seconds since the epoch.
    """

    key: str
    label: Label
    size: int
    crc32: int
    used: float


def share_key(fingerprint: str, stamp: str, weights: Sequence[Placed], size: int) -> str:
    """Name a share by what decides about its bytes: the model's files and the weights' declarations and places.

    Args:
        fingerprint, stamp: of the checkpoint. The one reads only samples of it, the other sees files that were edited.
    """
    return sha256(f"{FORMAT}\n{fingerprint}\n{stamp}\n{size}\n{list(weights)!r}".encode()).hexdigest()


def default_folder() -> Path:
    """What the variable ``MOTLEY_CACHE`` names, or a folder in what ``MOTLEY_HOME`` does, or in the user's cache
    folder, which is on a real disk."""
    if chosen := os.environ.get("MOTLEY_CACHE"):
        return Path(chosen)
    if home := os.environ.get("MOTLEY_HOME"):
        return Path(home) / "shares"
    return Path(platformdirs.user_cache_dir("motley", appauthor=False)) / "shares"


class ShareCache:
    """The cached shares of a folder, of at most `limit` bytes unless those in use take more."""

    def __init__(self, folder: Path | None = None, limit: int = DEFAULT_LIMIT) -> None:
        self.folder = folder or default_folder()
        self.limit = limit

    def prepare(self) -> None:
        """Make sure that the folder can be written to, and remove what workers that were killed have left in it.

        Raises:
            CacheError: it cannot, or an entry cannot be looked at.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise CacheError(
                f"cannot write to {self.folder}, where shares are kept ({error.strerror}); choose another folder "
                "(--cache, or MOTLEY_CACHE)"
            ) from error
        self.sweep()

    @contextlib.contextmanager
    def hold(
        self,
        key: str,
        label: Label,
        size: int,
        write: Callable[[Path], None],
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[Path]:
        """A share file, which stays for as long as the context lasts.

        Args:
            key: as `share_key` gives it.
            size: of the file, in bytes.
            write: writes the file if it is not there, or not sound.
            progress: is called with the bytes that have been checked, or read back, and all of them, now and then.

        Raises:
            ShareFileError: it cannot be kept in the folder.
            Exception: what `write` raises: also that there is no room, even without the entries that nobody uses.
        """
        lease = self._lease(key, progress)
        for _ in range(_ATTEMPTS):
            if lease is None:
                mine = self._make(key, label, size, write, progress)
                lease = self._lease(key, progress, trusted=mine)
        if lease is None:
            raise ShareFileError(f"{self.folder}: share {key[:12]} was gone or damaged {_ATTEMPTS} times after writing")
        with lease:
            try:
                yield self.folder / key / SHARE_FILE
            finally:
                _touch(self.folder / key)

    def entries(self) -> list[Entry]:
        """What is there, used least recently first; errors as `sweep`."""
        found = [_read(folder) for folder in self._folders(_KEY.fullmatch)]
        return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.used)

    def damaged(self) -> dict[str, int]:
        """Bytes of what is there under the key of an entry but without its label; `sweep` removes it."""
        found = {}
        for folder in self._folders(_KEY.fullmatch):
            if _read(folder) is None:
                with contextlib.suppress(FileNotFoundError):  # another has removed it meanwhile
                    found[folder.name] = sum(file.stat().st_size for file in folder.iterdir())
        return found

    def remove(self, key: str) -> bool:
        """Remove an entry, damaged or not, if nobody uses it; errors as `sweep`."""
        return _discard(self.folder / key)

    def sweep(self) -> None:
        """Remove what workers that were killed have left behind.

        Raises:
            CacheError: an entry cannot be looked at, so nobody knows whether it is sound.
        """
        for folder in self._folders(lambda name: name.startswith(_PARTIAL)):
            if (folder / LABEL).exists() or _age_s(folder) > _UNLABELLED_S:
                _discard(folder)
        for folder in self._folders(_KEY.fullmatch):
            if _read(folder) is None:
                _discard(folder)

    def _folders(self, wanted: Callable[[str], object]) -> list[Path]:
        try:
            return [folder for folder in self.folder.iterdir() if wanted(folder.name)]
        except FileNotFoundError:
            return []

    def _make_room(self, size: int) -> None:
        """Remove entries, used least recently first, until so many bytes more fit into the limit, and all that is being
        made onto the disk."""
        if self._bytes() + size <= self.limit and self._fits():
            return  # soon seen: whoever makes thousands of entries need not read all labels for each
        self.sweep()
        entries = self.entries()
        held = sum(entry.size for entry in entries)
        for entry in entries:
            if held + size <= self.limit and self._fits():
                break
            if self.remove(entry.key):
                held -= entry.size

    def _fits(self) -> bool:
        """Whether the disk has room for what the entries that are being made still lack."""
        lacking = 0
        for folder in self._folders(_MADE.fullmatch):
            with contextlib.suppress(FileNotFoundError):  # it has been made meanwhile
                made = sum(_allocated(file) for file in folder.iterdir())
                lacking += max(0, int(folder.name.rpartition("-")[2]) - made)
        return lacking <= shutil.disk_usage(self.folder).free

    def _bytes(self) -> int:
        """What share files take in all, of entries or of what is left of such."""
        total = 0
        for name in os.listdir(self.folder):
            with contextlib.suppress(OSError):  # no entry, or gone meanwhile
                total += os.stat(os.path.join(self.folder, name, SHARE_FILE)).st_size
        return total

    def _lease(
        self, key: str, progress: Callable[[int, int], None] | None, *, trusted: bool = False
    ) -> IO[bytes] | None:
        """The locked label of an entry, or None if there is none that is sound; one that is not is removed.

        Other processes put entries there and take them away meanwhile, so only what has been examined is removed.

        Args:
            trusted: this process has just computed the CRC-32, so it is not checked.
        """
        folder = self.folder / key
        try:
            with contextlib.ExitStack() as stack:
                label = _open_label(folder)
                if label is None:
                    if folder.exists() and not (folder / LABEL).exists() and _discard(folder):
                        logger.warning("%s: this cached share was damaged; it is made anew", folder)
                    return None
                stack.enter_context(label)
                if not _lock_for_use(label):
                    return None  # another is removing it, and takes its time
                entry = _told(folder, label)
                sound = entry is not None and _is_sound(entry, folder / SHARE_FILE, progress, trusted)
                if not _is_in(label, folder):
                    return None  # another has removed it
                if sound:
                    _touch(folder)
                    stack.pop_all()
                    return label
        except CacheError as error:
            raise ShareFileError(str(error)) from error
        except OSError as error:
            raise ShareFileError(f"{folder}: cannot be read: {error.strerror or error}") from error
        logger.warning("%s: this cached share is damaged; it is made anew", folder)
        _discard(folder, even_if_used=True)
        return None

    def _make(
        self,
        key: str,
        label: Label,
        size: int,
        write: Callable[[Path], None],
        progress: Callable[[int, int], None] | None,
    ) -> bool:
        """Write an entry and give it its name; False if another process has been faster, or has swept it away."""
        partial = self.folder / f"{_PARTIAL}{secrets.token_hex(8)}-{size}"
        try:
            partial.mkdir(parents=True)
            with (partial / LABEL).open("xb") as made:
                if not lock_file(made, exclusive=True) or not partial.exists():
                    return False  # another has swept it away before it was locked
                self._make_room(size)  # after others can see what comes, so that of two at once one sees the other
                write(partial / SHARE_FILE)
                crc = _crc32(partial / SHARE_FILE, progress)
                made.write(json.dumps({"key": key, "label": asdict(label), "size": size, "crc32": crc}).encode())
                made.flush()
                if sys.platform != "win32":  # while it is locked, or it could be swept away
                    mine = _rename(partial, self.folder / key)
            if sys.platform == "win32":  # where this waits until no file in it is open
                mine = _rename(partial, self.folder / key)
            return mine
        except CacheError as error:
            raise ShareFileError(str(error)) from error
        except OSError as error:
            raise ShareFileError(
                f"{self.folder}: cannot keep this rank's weights ({human_bytes(size)}): {error.strerror or error}"
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _read(folder: Path) -> Entry | None:
    """An entry as its label tells it; None if there is no label, or not this entry's."""
    label = _open_label(folder)
    if label is None:
        return None
    with label:
        return _told(folder, label)


def _open_label(folder: Path) -> IO[bytes] | None:
    """The label of an entry, or None if there is none.

    Raises:
        CacheError: it cannot be opened.
    """
    try:
        return (folder / LABEL).open("rb")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CacheError(f"{folder}: cannot be looked at: {error.strerror or error}") from error


def _told(folder: Path, label: IO[bytes]) -> Entry | None:
    """What an open label tells of the entry in `folder`; None if it is not this entry's."""
    try:
        told = json.loads(label.read())
        used = os.fstat(label.fileno()).st_mtime
        entry = Entry(told["key"], Label(**told["label"]), int(told["size"]), int(told["crc32"]), used)
    except (ValueError, TypeError, KeyError):
        return None
    return entry if entry.key == folder.name else None


def _is_sound(entry: Entry, file: Path, progress: Callable[[int, int], None] | None, trusted: bool) -> bool:
    try:
        return file.stat().st_size == entry.size and (trusted or _crc32(file, progress) == entry.crc32)
    except FileNotFoundError:
        return False


def _is_in(label: IO[bytes], folder: Path) -> bool:
    """Whether an open label is still the one of the entry in `folder`."""
    try:
        return os.path.samestat(os.fstat(label.fileno()), (folder / LABEL).stat())
    except FileNotFoundError:
        return False


def _crc32(file: Path, progress: Callable[[int, int], None] | None = None) -> int:
    crc = done = reported = 0
    buffer = memoryview(bytearray(_CHUNK))
    with FileIO(file) as opened:
        size = file.stat().st_size
        while count := opened.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            done += count
            if progress and (done - reported >= _REPORT or done == size):
                progress(done, size)
                reported = done
    return crc


def _allocated(file: Path) -> int:
    """Bytes of the disk that a file has: fewer than its size until it is written, but on Windows."""
    if sys.platform == "win32":
        return file.stat().st_size
    else:
        return file.stat().st_blocks * 512


def _age_s(folder: Path) -> float:
    try:
        return time.time() - folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _touch(folder: Path) -> None:
    """Note that an entry is being used."""
    with contextlib.suppress(OSError):  # in a folder of somebody else's, say
        os.utime(folder / LABEL)


def _discard(folder: Path, *, even_if_used: bool = False) -> bool:
    """Remove an entry, or what was to become one, unless somebody uses it; whether it was removed."""
    with contextlib.ExitStack() as stack:
        if sys.platform != "win32" and not even_if_used:
            label = _open_label(folder)
            if label is not None and not lock_file(stack.enter_context(label), exclusive=True):
                return False
        trash = folder.with_name(f"{_PARTIAL}{secrets.token_hex(8)}")
        try:
            folder.rename(trash)  # so that nobody finds half of it
        except OSError:
            return False
        shutil.rmtree(trash, ignore_errors=True)
    return True


def _rename(made: Path, entry: Path) -> bool:
    """Give an entry its name; False if there is one of that name, or this one is gone."""
    try:
        made.rename(entry)
    except OSError:
        if made.exists() and not entry.exists():
            raise
        return False
    return True


def _lock_for_use(label: IO[bytes]) -> bool:
    """Lock the label of an entry that is to be used; False if another keeps it locked.

    Whoever has just written the entry, or looks whether it may be removed, locks it for a moment.
    """
    until = time.monotonic() + _MOMENT_S
    while not lock_file(label, exclusive=False):
        if time.monotonic() > until:
            return False
        time.sleep(_MOMENT_S / 1000)
    return True
