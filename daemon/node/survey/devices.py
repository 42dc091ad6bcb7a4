"""The devices of a machine that ranks can compute on: its processor and its GPUs, and which engines use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from motley.protocol import mesh_pb2 as pb

PROCESSOR = "processor"
"""The kind of the device that is no GPU."""


@dataclass(frozen=True)
class Device:
    """A processor or a GPU.

    Attributes:
        kind: `PROCESSOR`, or what `motley.protocol.mesh_pb2.Gpu.kind` tells.
        memory_bytes: of its own; a processor's is what ranks may use of the machine's.
        driver: empty for a processor.
        memory_bandwidth: in bytes/s; 0: not known.
        measured: whether that was measured here, by an engine or by reading; else it is what the driver promises.
        engines: those that compute on it, by name.
    """

    name: str
    kind: str
    memory_bytes: int
    free_bytes: int
    driver: str
    memory_bandwidth: float
    measured: bool
    engines: Sequence[str]


def devices_of(machine: pb.Capabilities) -> list[Device]:
    """The processor first, then the GPUs. Engines compute on the first of these only."""
    able = [engine for engine in machine.engines if not engine.lacking]
    memory = machine.memory_bytes
    found = [
        Device(
            name=machine.cpu,
            kind=PROCESSOR,
            memory_bytes=memory,
            free_bytes=memory,
            driver="",
            memory_bandwidth=machine.memory_bandwidth,
            measured=True,
            engines=[engine.name for engine in able if not engine.on_gpu],
        )
    ]
    for number, gpu in enumerate(machine.gpus):
        using = [engine for engine in able if engine.on_gpu and number == 0]
        measured = max((engine.memory_bandwidth for engine in using), default=0.0)
        found.append(
            Device(
                name=gpu.name,
                kind=gpu.kind,
                memory_bytes=gpu.memory_bytes,
                free_bytes=gpu.free_bytes,
                driver=gpu.driver,
                memory_bandwidth=measured or gpu.memory_bandwidth,
                measured=measured > 0,
                engines=[engine.name for engine in using],
            )
        )
    return found


def lacking(machine: pb.Capabilities) -> dict[str, str]:
    """The engines that cannot run on a machine, each with what it lacks."""
    return {engine.name: engine.lacking for engine in machine.engines if engine.lacking}
