"""Rotary position embedding tables.

Sources: Su et al. 2021, https://arxiv.org/abs/2104.09864; Llama 3.1's reference code for its frequency scaling.
"""

from __future__ import annotations

from math import tau

import numpy as np
import numpy.typing as npt

from motley.daemon.models.config import Llama3Scaling, Rope

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def rotary_tables(rope: Rope, head_dim: int, positions: int) -> tuple[F32, F32]:
    """Cosines and sines, f32[positions, head_dim / 2] each, computed in float64."""
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.scaling is not None:
        frequencies = _llama3(frequencies, rope.scaling)
    angles = np.outer(np.arange(positions, dtype=np.float64), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _llama3(frequencies: F64, scaling: Llama3Scaling) -> F64:
    """Keep short wavelengths, divide long ones by the factor, and blend in between."""
    turns = scaling.original_context * frequencies / tau  # over the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor
