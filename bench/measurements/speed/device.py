"""What one device of this machine does with a small model: a report that can be attached to an issue.

A model that a rank cannot load or compute is told in the report, as the report is for such cases too.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path

from motley.bench.measurements.speed.latency import WARM_UP, latency_of
from motley.bench.meshes.local_mesh import LocalMesh, MeshError, MeshSpec
from motley.daemon.node.survey.devices import Device
from motley.protocol.release import release

PACKAGES = (
    *("numpy", "onnxruntime", "onnxruntime-ep-webgpu", "vulkan"),
    *("cuda-bindings", "nvidia-cublas", "tensorrt-rtx", "cupy-cuda13x"),
)
"""Whose versions are told, where they are installed."""
PROMPT = 16
"""Tokens before those that are timed."""


@dataclass(frozen=True)
class DeviceReport:
    """A device and how fast an engine computes on it.

    Attributes:
        system: the operating system with its version.
        versions: of packages that matter, by name.
        engine_options: settings that the engine was given.
        model: the name of the model, or the shape of one with random weights.
        ms_per_token: ``p50``, ``p95``, ``p99`` and ``mean`` of the time of a token, by quantisation.
        failures: the quantisations that could not be measured, each with why.
    """

    system: str
    versions: Mapping[str, str]
    device: Device
    engine: str
    engine_options: Mapping[str, str]
    model: str
    ms_per_token: Mapping[str, Mapping[str, float]]
    failures: Mapping[str, str]


async def measure_device(
    device: Device,
    engine: str,
    model: Path,
    quantisations: Sequence[str],
    tokens: int,
    threads: int,
    engine_options: Mapping[str, str],
    tell: Callable[[str], None],
) -> DeviceReport:
    """Load a model on one rank in each quantisation, which the gate then examines, and time tokens.

    Args:
        device: what the engine computes on.
        tokens: how many are timed.
        threads: of the rank.
        engine_options: settings of the engine.
        tell: is told what goes on, often.
    """
    times: dict[str, Mapping[str, float]] = {}
    failures = {}
    context = 1 + WARM_UP + PROMPT + tokens + 1  # no longer, as the gate examines all of it, which takes a while
    for number, quantisation in enumerate(quantisations, 1):
        about = f"{model.name} in {quantisation} on {device.name} ({number} of {len(quantisations)})"
        spec = MeshSpec(
            model,
            (1.0,),
            quantisation,
            context=context,
            engine=engine,
            engine_options=engine_options,
            threads=threads,
        )
        loads = partial(tell, f"{about} loads, and is examined")
        heard = _tokens_told(tell, about, WARM_UP + tokens + 1)
        loads()
        try:
            async with LocalMesh(spec, lambda *_, loads=loads: loads()) as mesh:
                await mesh.decode([1], WARM_UP, heard=heard)
                times[quantisation] = (await latency_of(mesh, range(2, 2 + PROMPT), tokens, heard)).ms_per_token
        except MeshError as error:
            failures[quantisation] = str(error)
    return DeviceReport(platform.platform(), _versions(), device, engine, engine_options, model.name, times, failures)


def _tokens_told(tell: Callable[[str], None], about: str, of: int) -> Callable[[], None]:
    """What tells, whenever it is called, that one more token has come of so many."""
    numbers = count(1)
    return lambda: tell(f"{about}: token {next(numbers)} of {of}")


def _versions() -> dict[str, str]:
    found = {"motley": release(), "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
