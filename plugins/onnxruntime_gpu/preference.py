"""Which GPU of a machine is taken where there are several, as whoever runs a node there says it."""

from __future__ import annotations

import os
from pathlib import Path

from motley.plugins.engine import EngineError

VARIABLE = "MOTLEY_GPU"
"""The environment variable that says it, for all processes of a node."""
DISCRETE, INTEGRATED = "discrete", "integrated"
SOFTWARE = "MOTLEY_SOFTWARE_GPU"
"""With this environment variable set to 1 (or yes, true, on), drivers that compute on the processor are taken for GPUs:
for tests and the demonstration."""
DRIVERS = "VK_DRIVER_FILES"
"""With this one set, the Vulkan loader looks for no other drivers than those of the files that it names."""
_OF_PROVIDER = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"
"""As the plugin of the WebGPU provider calls it, where a machine has no GPU."""
_SWITCHED = {**dict.fromkeys(("1", "yes", "true", "on"), True), **dict.fromkeys(("", "0", "no", "false", "off"), False)}


def takes_software() -> bool:
    """Whether drivers that compute on the processor are taken for GPUs; from then on the provider takes them, too.

    Raises:
        EngineError: the variable is set to what says neither.
    """
    takes = _SWITCHED.get(_said(SOFTWARE))
    if takes is None:
        raise EngineError(f"{SOFTWARE} must be 1 (yes, true, on) or 0 (no, false, off), not {os.environ[SOFTWARE]!r}")
    if takes:
        os.environ[_OF_PROVIDER] = "1"
    return takes


def wanted_gpu() -> str:
    """`DISCRETE`, a GPU with memory of its own; `INTEGRATED`, the processor's, so that the other may sleep; or empty:
    the first that there is, those with memory of their own first.

    Raises:
        EngineError: the variable has another value.
    """
    wanted = _said(VARIABLE)
    if wanted not in ("", DISCRETE, INTEGRATED):
        raise EngineError(f"{VARIABLE} must be {DISCRETE!r}, {INTEGRATED!r} or not set, not {os.environ[VARIABLE]!r}")
    return wanted


def driver_needed() -> str:
    """What Vulkan, or D3D12, needs to find a GPU, in words: what is in the way, where that is known.

    Raises:
        EngineError: as `takes_software`.
    """
    named = os.environ.get(DRIVERS, "")
    if missing := [file for file in filter(None, named.split(os.pathsep)) if not Path(file).exists()]:
        return f"the drivers that {DRIVERS} names, of which {', '.join(missing)} is not there"
    if takes_software():
        where = f" (it looks for no other than {named}, as {DRIVERS} says)" if named else ""
        return (
            f"a driver for Vulkan, a GPU's or, as {SOFTWARE} is set, one in software: SwiftShader, or Mesa's of version"
            f" 25 or later{where}"
        )
    return (
        "on Linux the Vulkan loader, which most distributions call libvulkan1, and the GPU's driver for Vulkan"
        f" (mesa-vulkan-drivers for AMD and Intel); on Windows D3D12. {SOFTWARE}=1 takes a driver in software for a GPU"
    )


def provider_settings() -> dict[str, str]:
    """The settings by which the WebGPU provider takes that one; by itself it takes one with memory of its own.

    Raises:
        EngineError: as `wanted_gpu`.
    """
    return {"powerPreference": "low-power"} if wanted_gpu() == INTEGRATED else {}


def _said(variable: str) -> str:
    """What an environment variable is set to, as people may type it."""
    return os.environ.get(variable, "").strip().lower()
