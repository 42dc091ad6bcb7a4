"""Which GPU of a machine is taken where there are several, as whoever runs a node there says it."""

from __future__ import annotations

import os

from motley.plugins.engine import EngineError

VARIABLE = "MOTLEY_GPU"
"""The environment variable that says it, for all processes of a node."""
DISCRETE, INTEGRATED = "discrete", "integrated"


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
