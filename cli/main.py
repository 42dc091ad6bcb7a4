"""The `motley` command: errors, and Ctrl-C at any time, turned into one line at most and an exit status."""

from __future__ import annotations

import io
import os
import sys

from motley.cli.errors import EXIT_INTERRUPTED, explain
from motley.daemon.machine.importing import imports_that_stay


def main() -> None:
    """The console script."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what it notes of broken connections we say ourselves
    for stream in (sys.stdin, sys.stdout, sys.stderr):  # Windows would use the code page of the day
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        with imports_that_stay():
            from motley.cli.app import app  # takes a moment, in which Ctrl-C is as good as later

        app()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        print(f"motley: {message}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
