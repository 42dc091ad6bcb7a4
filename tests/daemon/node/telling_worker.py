"""Forks processes that say what they were given, and end."""

from __future__ import annotations

import os
import sys

from motley.daemon.machine.ending import end_process
from motley.daemon.worker.fork_server import main


def tell() -> int:
    print(os.environ["TOLD"], sys.stdin.readline().strip(), flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    return 7


if __name__ == "__main__":
    main(tell)
    end_process()
