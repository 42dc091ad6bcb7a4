"""`motley`, but a node measures less of the machine, which all nodes of a test's mesh have in common.

How fast it computes and reads memory, it is told: on a busy machine they would measure each other, and plans would
differ each time.
What engines there are, the first one of a run asks, in a process that imports them all; the others read its answer.
"""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

from motley.cli.main import main
from motley.daemon.machine.compute_speed import ComputeSpeed, FormatSpeed
from motley.daemon.node import app
from motley.daemon.node.survey import capabilities
from motley.daemon.node.survey.engines import installed_engines
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


async def told_speed(*_: object) -> ComputeSpeed:
    """What `compute_speed` finds where everything is as fast as the memory."""
    return ComputeSpeed([FormatSpeed(name, BANDWIDTH, 10 * BANDWIDTH) for name in ("int4", "int8", "fp32")], 1e-6)


if __name__ == "__main__":
    capabilities.memory_bandwidth = lambda *_: BANDWIDTH
    app.compute_speed = told_speed
    app.installed_engines = engines_asked_once
    main()
