"""Forks processes that say what they were given, and end."""

from __future__ import annotations

import io
import os
import sys
from typing import cast

from motley.daemon.machine.ending import end_process
from motley.daemon.worker.fork_server import main


def tell() -> int:
    for stream in (sys.stdin, sys.stdout):
        cast(io.TextIOWrapper, stream).reconfigure(errors="replace")  # as the command line does
    print(os.environ["TOLD"], sys.stdin.readline().strip(), flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    return 7


if __name__ == "__main__":
    main(tell)
    end_process()
