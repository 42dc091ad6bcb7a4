"""A rank worker behind an emulated network, on an emulated slower processor.

``python -m motley.bench.meshes.rank_over_link LINK NEAR FRACTION``: `LINK` is what
`motley.bench.meshes.emulator.LinkSpec.parse` reads, or ``none``; `NEAR` the rank that is on the same machine and
reached without it; `FRACTION` the part of a core's speed that the rank is to have. Everything else is as in
`motley.daemon.worker.process`.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

from motley.bench.meshes.emulator import LinkSpec, Nic, sleep_exactly
from motley.daemon.worker import process
from motley.daemon.worker.worker import Wrap
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.transport import Communicator
from motley.transport.links.security import Stream


def network(link: LinkSpec, near: int, number: int) -> Wrap:
    """What the connections of rank `number` go through."""
    nic = Nic(link, seed=number)

    def wrap(peer: int, stream: Stream) -> Stream:
        return stream if peer == near else nic.wrap(peer, stream)

    return wrap


class Brake:
    """Makes a process compute as slowly as with a part of its core: after some seconds of the processor it sleeps until
    they would have been over. A process that did not get its whole core anyway sleeps less."""

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._wall = self._cpu = 0.0

    def begin(self) -> None:
        """Note that the process computes from now on."""
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def hold(self) -> None:
        """Wait until what was computed would have been done on the emulated machine."""
        lasted, computed = time.perf_counter() - self._wall, time.process_time() - self._cpu
        time.sleep(max(0.0, computed / self._fraction - lasted))


def slow_down(fraction: float) -> None:
    """Have the engine of this process compute as slowly as with a part of a core; it must have one thread."""
    brake = Brake(fraction)
    step, all_reduce = OnnxRuntimeEngine.step, Communicator.all_reduce

    def slow_step(*given: Any, **named: Any) -> Any:
        brake.begin()
        result = step(*given, **named)
        brake.hold()
        return result

    def slow_sum(*given: Any, **named: Any) -> None:
        brake.hold()
        all_reduce(*given, **named)
        brake.begin()

    OnnxRuntimeEngine.step = slow_step  # type: ignore[method-assign]
    Communicator.all_reduce = slow_sum  # type: ignore[method-assign]


if __name__ == "__main__":
    link, near, fraction = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    sleep_exactly()
    if fraction < 1:
        slow_down(fraction)
    sys.exit(process.main(None if link == "none" else partial(network, LinkSpec.parse(link), near)))
