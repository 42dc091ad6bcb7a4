"""What to say of devices that a machine cannot compute on, and of one that was typed and that not every node has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from motley.cli.errors import CliError
from motley.cli.typed.options import ENGINES_ON, Device

if TYPE_CHECKING:
    from motley.protocol.mesh_pb2 import Capabilities

UNUSABLE = ("unknown_engine", "unusable_engine")
"""What an orchestrator answers where a node cannot compute as is asked for."""
_CALLED = {Device.CPU: "a processor", Device.CUDA: "an NVIDIA graphics card", Device.WEBGPU: "a graphics card"}


def cannot_run(machine: Capabilities) -> list[str]:
    """Which engines cannot run on a machine, and why, a line for each; but one for all engines on NVIDIA's GPUs where
    there is none of these."""
    from motley.daemon.node.survey.devices import lacking
    from motley.transport.cuda.driver import DRIVERS

    missing = lacking(machine)
    nvidia = missing.keys() & {*ENGINES_ON[Device.CUDA]}
    none = not any(gpu.compute_capability or "nvidia" in gpu.name.lower() for gpu in machine.gpus)
    told = [f"engine {name} cannot run here: {why}" for name, why in missing.items() if not (none and name in nvidia)]
    if none and nvidia:
        driver = f"its driver ({max(DRIVERS.values())} or newer)"
        told.append(f"NVIDIA: no GPU found; if this machine has one, install {driver}")
    return told


def no_device(device: Device, nodes: Sequence[dict[str, Any]]) -> CliError:
    """Which nodes have no such device that can be used, why, and what to do: for whoever has named no engine.

    Args:
        nodes: those that would take part, as the API tells them.
    """
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for node in nodes:
        by_reason[_lacking(device, node)].append(node["name"])
    able = by_reason.pop("", [])
    which, advice = "no machine that would take part has", "leave out --device"
    if able:
        which = "not every machine that would take part has"
        advice += f", or have only those that do take part: --nodes {','.join(able)}"
    told = "".join(f"\n  {', '.join(names)}: {why}" for why, names in by_reason.items())
    return CliError(f"--device {device}: {which} {_CALLED[device]} that can be used: {advice}{told}")


def _lacking(device: Device, node: dict[str, Any]) -> str:
    """Why a node cannot compute on a device; empty: it can."""
    name = ENGINES_ON[device][0]
    engine = next((each for each in node["engines"] if each["name"] == name), None)
    if engine is None:
        return f"its Motley has no engine {name!r}"
    if engine["on_gpu"] and not node["gpus"]:  # what the node lacks to find a GPU of any make is not this engine's
        return engine["lacking"] or node["no_gpu"] or "no GPU was found"
    return engine["lacking"] or ""
