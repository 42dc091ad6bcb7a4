"""The file of a machine's lease: one at a time, written whole or not at all, by whoever has its lock."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs
import psutil

from motley.daemon.lease.lease import BEGUN_S, Lease, LeaseError, read_lease, write_lease
from motley.daemon.lease.states import State
from motley.daemon.machine.files import locked
from motley.protocol.devices import device_words
from motley.protocol.files import replace_file

LOCK_S = 5.0
"""Programs have the lock for no longer than it takes to write a few lines."""
MOST_BYTES = 1 << 16
"""A file that is longer holds no lease."""


def usual_path() -> Path:
    """Where a machine's lease is, for the user whose daemon obeys it, unless ``MOTLEY_LEASE`` names another file."""
    named = os.environ.get("MOTLEY_LEASE")
    return Path(named) if named else Path(platformdirs.user_data_dir("motley", appauthor=False)) / "lease.json"


@dataclass(frozen=True)
class Told:
    """What a daemon tells beside the file of how it follows it.

    Attributes:
        node: its name.
        state: of the device.
        device: as a lease names it; empty in state normal.
        pid, started_at: of the daemon, and when it began, in Unix time: another process may have its number later.
        limit_s: to it no lease lasts longer.
        trouble: why what stands in the file is taken for no lease; empty: it is one, or there is none.
        shares: the folder in which the daemon keeps shares; empty: not told.
    """

    node: str
    state: State
    device: str
    pid: int
    started_at: float
    limit_s: float
    trouble: str = ""
    shares: str = ""


class LeaseFile:
    """A lease's file, its lock, and what the daemon tells of it."""

    def __init__(self, path: Path | None = None) -> None:
        """
        Args:
            path: None: the usual place.
        """
        self.path = path or usual_path()

    def read(self) -> Lease | None:
        """The lease, whether it still counts or not; None: there is no file.

        Raises:
            LeaseError: the file is damaged, or cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                content = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LeaseError(f"{self.path}: {error.strerror or error}") from error
        try:
            if len(content) > MOST_BYTES:
                raise LeaseError(f"it is longer than {MOST_BYTES} bytes")
            return read_lease(content)
        except LeaseError as error:
            raise LeaseError(f"{self.path} holds no lease: {error}; `motley lease give` removes it") from error

    def take(self, lease: Lease, limit_s: float) -> None:
        """Write a lease, unless another counts already whose holder has another name. A damaged file gives way.

        Args:
            limit_s: no lease lasts longer.

        Raises:
            LeaseError: there is another, or the file cannot be written.
        """
        with self._locked():
            other = None
            with contextlib.suppress(LeaseError):
                other = self.read()
            others = other and other.holder.name != lease.holder.name and not other.over(time.time(), limit_s, began)
            if other and others:
                until = time.strftime("%H:%M", time.localtime(other.end(limit_s)))
                raise LeaseError(
                    f"{other.holder.name!r} has a lease of {device_words(other.device)} until {until}; `motley lease"
                    " give` ends it"
                )
            self._write(self.path, write_lease(lease))

    def give(self, only: Lease | None = None) -> Lease | None:
        """End the lease; which it was, None: there was none, or a file that is damaged.

        Args:
            only: leave another than this alone.

        Raises:
            LeaseError: the file cannot be removed.
        """
        with self._locked():
            lease = None
            with contextlib.suppress(LeaseError):
                lease = self.read()
            if only is None or lease == only:
                try:
                    self.path.unlink(missing_ok=True)
                except OSError as error:
                    raise LeaseError(f"{self.path}: {error.strerror or error}") from error
            return lease

    def tell(self, told: Told) -> None:
        """Say beside the file how a daemon follows it.

        Raises:
            LeaseError: that cannot be written.
        """
        self._write(self._told_by(told.pid), json.dumps(asdict(told)).encode() + b"\n")

    def told(self) -> list[Told]:
        """What the daemons of this machine tell that run now; what others have left is removed."""
        found = []
        try:
            paths = sorted(self.path.parent.glob(f"{self.path.stem}.*.json"))
        except OSError:  # the folder is another user's, as are its daemons
            paths = []
        for path in paths:
            try:
                told = json.loads(path.read_bytes())
                own = Told(**{**told, "state": State(told["state"])})
            except (OSError, ValueError, TypeError, KeyError):
                continue
            since = began(own.pid)
            if since is not None and abs(since - own.started_at) <= BEGUN_S:
                found.append(own)
            else:
                self.forget(own.pid)
        return found

    def forget(self, pid: int) -> None:
        """Remove what a daemon has told, as it ends."""
        with contextlib.suppress(OSError):
            self._told_by(pid).unlink()

    def _told_by(self, pid: int) -> Path:
        return self.path.with_name(f"{self.path.stem}.{pid}.json")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Have the lock for as long as the context lasts.

        Raises:
            LeaseError: another program has it for `LOCK_S`, or it cannot be made.
        """
        lock = self.path.with_suffix(".lock")
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(lock, LOCK_S))
            except TimeoutError as error:
                raise LeaseError(str(error)) from error
            except OSError as error:
                raise LeaseError(f"{lock}: {error.strerror or error}") from error
            yield

    @staticmethod
    def _write(path: Path, content: bytes) -> None:
        """
        Raises:
            LeaseError: it cannot be written.
        """
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary.write_bytes(content)
            replace_file(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise LeaseError(f"{path}: {error.strerror or error}") from error


def began(pid: int) -> float | None:
    """When a process began, in Unix time; None: there is none, or it has ended and nobody has taken note."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.AccessDenied:
        return math.nan  # it is there, and nobody may know since when
    except psutil.Error:
        return None
