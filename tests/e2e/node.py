"""`motley`, but a node measures less of the machine, which all nodes of a test's mesh have in common.

How fast its memory is, it is told, and how fast it computes it does not know: on a busy machine nodes would measure
each other, and plans would differ each time.
What engines there are, the first one of a run asks, in a process that imports them all; the others read its answer.
"""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

from motley.cli.main import main
from motley.daemon.node import app, capabilities
from motley.daemon.node.engines import installed_engines
from motley.protocol.mesh_pb2 import Capabilities, Engine

BANDWIDTH = 10e9
"""Bytes/s."""


async def engines_asked_once() -> list[Engine]:
    """As `installed_engines`; the answer depends on where Python looks for packages."""
    where = sha256(os.environ.get("PYTHONPATH", "").encode()).hexdigest()
    kept = Path(os.environ["MOTLEY_CACHE"]).with_name(f"engines-{where}")
    if not kept.exists():
        own = kept.with_suffix(f".{os.getpid()}")
        own.write_bytes(Capabilities(engines=await installed_engines()).SerializeToString())
        os.replace(own, kept)
    return list(Capabilities.FromString(kept.read_bytes()).engines)


async def unmeasured(*_: object) -> None:
    """In place of `compute_speed`."""


if __name__ == "__main__":
    capabilities.memory_bandwidth = lambda *_: BANDWIDTH
    app.installed_engines = engines_asked_once
    app.compute_speed = unmeasured
    main()
