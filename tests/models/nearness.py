"""How near the logits of engines are to those that they should give."""

from __future__ import annotations

import numpy as np

from motley.plugins.engine import F32

TOLERANCE = 1e-4
"""Of the largest logit, between ours and transformers' in float64."""
CODES_TOLERANCE = 0.05
"""Of the length of all logits, where activations are quantised, too, as weights are codes: as on the CPU."""


def error(got: F32, expected: F32) -> float:
    """The largest difference, as a part of the largest logit."""
    assert got.shape == expected.shape
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def is_near(got: F32, expected: F32, quantisation: str) -> bool:
    """Whether decoded rows have the logits that they should, as near as the arithmetic for such weights allows."""
    if not quantisation.startswith("int"):
        return error(got, expected) < TOLERANCE
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected)) < CODES_TOLERANCE
