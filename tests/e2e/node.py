"""`motley`, but a node measures less of the machine, which all nodes of a test's mesh have in common.

How fast it computes and reads memory, it is told: on a busy machine they would measure each other, and plans would
differ each time. Its ranks look for less long how fast their links are, which decides nothing but how they add up, at
the start of every session.
What engines there are, the first one of a run asks, in a process that imports them all; the others read its answer.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from motley.cli.main import main
from motley.daemon.machine.compute_speed import ComputeSpeed, FormatSpeed
from motley.daemon.machine.files import lock_file
from motley.daemon.node import app
from motley.daemon.node.survey import capabilities
from motley.daemon.node.survey.engines import installed_engines
from motley.protocol.mesh_pb2 import Capabilities, Engine
from motley.transport import mesh

BANDWIDTH = 10e9
"""Bytes/s."""


async def engines_asked_once() -> list[Engine]:
    """As `installed_engines`; the answer depends on where Python looks for packages."""
    where = sha256(os.environ.get("PYTHONPATH", "").encode()).hexdigest()
    kept = Path(os.environ["MOTLEY_CACHE"]).with_name(f"engines-{where}")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.with_suffix(".lock").open("wb") as lock:
        while not kept.exists():  # nodes that start together ask once, too
            if lock_file(lock, exclusive=True):
                own = kept.with_suffix(f".{os.getpid()}")
                own.write_bytes(Capabilities(engines=await installed_engines()).SerializeToString())
                os.replace(own, kept)
            else:
                await asyncio.sleep(0.05)
    return list(Capabilities.FromString(kept.read_bytes()).engines)


async def told_speed(*_: object) -> ComputeSpeed:
    """What `compute_speed` finds where everything is as fast as the memory."""
    return ComputeSpeed([FormatSpeed(name, BANDWIDTH, 10 * BANDWIDTH) for name in ("int4", "int8", "fp32")], 1e-6)


def measure_less(put: Callable[[object, str, object], None] = setattr) -> None:
    """Make nodes of this process such ones, and workers that are forked from it; a test gives its
    `monkeypatch.setattr`."""
    put(capabilities, "memory_bandwidth", lambda *_: BANDWIDTH)
    put(app, "compute_speed", told_speed)
    put(app, "installed_engines", engines_asked_once)
    for least in ("MEASURE_S", "REHEARSAL_S"):
        put(mesh, least, getattr(mesh, least) / 10)


if __name__ == "__main__":
    measure_less()
    main()
