"""Which GPU of a machine is taken where there are several, as whoever runs a node there says it."""

from __future__ import annotations

import os

from motley.plugins.engine import EngineError

VARIABLE = "MOTLEY_GPU"
"""The environment variable that says it, for all processes of a node."""
DISCRETE, INTEGRATED = "discrete", "integrated"
SOFTWARE = "MOTLEY_SOFTWARE_GPU"
"""With this environment variable set to 1, drivers that compute on the processor are taken for GPUs: for tests and the
demonstration."""
_OF_PROVIDER = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"
"""As the plugin of the WebGPU provider calls it, where a machine has no GPU."""


def takes_software() -> bool:
    """Whether drivers that compute on the processor are taken for GPUs; from then on the provider takes them, too."""
    if takes := os.environ.get(SOFTWARE) == "1":
        os.environ[_OF_PROVIDER] = "1"
    return takes


def wanted_gpu() -> str:
    """`DISCRETE`, a GPU with memory of its own; `INTEGRATED`, the processor's, so that the other may sleep; or empty:
    the first that there is, those with memory of their own first.

    Raises:
        EngineError: the variable has another value.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", DISCRETE, INTEGRATED):
        raise EngineError(f"{VARIABLE} must be {DISCRETE!r}, {INTEGRATED!r} or not set, not {wanted!r}")
    return wanted


def provider_settings() -> dict[str, str]:
    """The settings by which the WebGPU provider takes that one; by itself it takes one with memory of its own.

    Raises:
        EngineError: as `wanted_gpu`.
    """
    return {"powerPreference": "low-power"} if wanted_gpu() == INTEGRATED else {}
