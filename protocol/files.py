"""Writing files that hold secrets, or what must be found again after a process is killed or the power fails."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

AGAIN_S = 0.02
"""Whoever reads a small file is soon done."""
TIMES = 10


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read (on Windows: as the folder allows), whole or not at all, to the disk.

    Raises:
        OSError: it cannot be written; what was there before is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        replace_file(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def replace_file(new: Path, path: Path) -> None:
    """Give a file the name of another, which is no more; on Windows as soon as nobody reads that.

    Raises:
        OSError: it cannot be given.
    """
    for left in reversed(range(TIMES)):
        try:
            os.replace(new, path)
            return
        except PermissionError:
            if not left:
                raise
            time.sleep(AGAIN_S)


def sync_folder(folder: Path) -> None:
    """See that names which were given or taken in a folder are on the disk."""
    if os.name == "posix":  # elsewhere a folder cannot be opened, and its entries are the file system's business
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
