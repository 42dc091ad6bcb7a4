"""Files of this machine: how many a process may have open (a connection is one too), locks on them, and their room."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

FILES = 1 << 16
"""Files that a process asks to have open at most; an expert has two, a client or a node one."""
_CHUNK = 1 << 20
_AGAIN_S = 0.02
"""Between two looks whether another process has let a file go."""
_BEYOND = 1 << 43
"""A place in files that none is long enough for, and that every file system knows."""
_SET_SPARSE = 0x900C4
"""Windows' FSCTL_SET_SPARSE."""


def raise_file_limit() -> None:
    """Ask for as many open files as the system lets this process have, up to `FILES`; many start with 1024."""
    if sys.platform != "win32":  # has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def lock_file(file: IO[Any], *, exclusive: bool) -> bool:
    """Lock an open file until it is closed; False if others have locked it. Where there are no locks (on Windows, and
    in some file systems), it does nothing."""
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # whoever uses the file must do without
    return True


def own_file(file: IO[bytes]) -> bool:
    """Have a file that is open for writing for this process alone until it is closed; False: another process has it.
    Where a file system has no locks, all do."""
    if sys.platform == "win32":
        import msvcrt

        file.seek(_BEYOND)  # whoever has no lock on a place can neither read nor write there
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        finally:
            file.seek(0)
        return True
    else:
        return lock_file(file, exclusive=True)


@contextlib.contextmanager
def locked(lock: Path, seconds: float) -> Iterator[None]:
    """Have a file, which is made where it is missing, for this process alone for as long as the context lasts.

    Raises:
        TimeoutError: another process has had it for so many seconds.
        OSError: it cannot be made.
    """
    lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with lock.open("ab") as file:
        until = time.monotonic() + seconds
        while not own_file(file):
            if time.monotonic() > until:
                raise TimeoutError(f"{lock} is locked by another program; it has not let it go for {seconds:.0f} s")
            time.sleep(_AGAIN_S)
        yield


def take_room(file: IO[bytes], size: int) -> None:
    """Have so many bytes of a disk for a file, zeros after what it has.

    Raises:
        OSError: there are fewer.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    zeros = memoryview(bytes(_CHUNK))
    for start in range(file.seek(0, os.SEEK_END), size, _CHUNK):
        write_all(file, zeros[: size - start])


def make_sparse(file: IO[bytes]) -> None:
    """Have an open file take no room on its disk where nothing was written, where that must be asked for: on Windows.
    File systems that cannot take room for all of it."""
    if sys.platform == "win32":
        import ctypes
        import msvcrt

        handle, told = ctypes.c_void_p(msvcrt.get_osfhandle(file.fileno())), ctypes.c_ulong()
        ctypes.windll.kernel32.DeviceIoControl(handle, _SET_SPARSE, None, 0, None, 0, ctypes.byref(told), None)


def write_all(file: IO[bytes], data: memoryview) -> None:
    """Write all of some bytes where a file that is not buffered stands.

    Raises:
        OSError: not all of them can be written.
    """
    while data:
        data = data[file.write(data) :]
