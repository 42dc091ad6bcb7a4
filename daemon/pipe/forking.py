"""How a daemon has its workers forked: what it sends to `motley.daemon.worker.fork_server`, and what it is told."""

from __future__ import annotations

import struct

FILES = ("standard input", "standard output", "standard error", "told")
"""The files that come with an order, which is the environment of a worker in JSON: its own three, and a pipe on which
its process number and, once it has ended, its status are told."""
NUMBER = struct.Struct("<i")
"""Each of these two; the status as `subprocess.Popen.returncode` has it."""
MOST_BYTES = 1 << 20
"""Of an order; an environment has a few thousand."""
