"""Files of this machine: how many a process may have open (a connection is one too), and locks on them."""

from __future__ import annotations

import sys
from typing import IO, Any

FILES = 1 << 16
"""Files that a process asks to have open at most; an expert has two, a client or a node one."""


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
