"""How many files this process may have open: a connection is one too."""

from __future__ import annotations

import sys

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
