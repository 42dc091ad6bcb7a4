"""Rotary position embedding tables.

Sources: Su et al. 2021, https://arxiv.org/abs/2104.09864; Llama 3.1's reference code for its frequency scaling;
Peng et al. 2023 (YaRN), https://arxiv.org/abs/2309.00071, with the details of transformers' modeling_rope_utils.
"""

from __future__ import annotations

from math import ceil, floor, log, tau

import numpy as np
import numpy.typing as npt

from motley.daemon.models.config import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
)

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def rotary_tables(rope: Rope, head_dim: int, positions: int, prompt: int = 0) -> tuple[F32, F32]:
    """Cosines and sines, f32[positions, head_dim / 2] each, computed in float64.

    A scaling that also scales attention (YaRN) has its factor in both tables, hence in queries and keys.

    Args:
        prompt: the sequence's prompt, tokens; only dynamic scaling depends on it.
    """
    exponents = -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    frequencies = rope.theta**exponents
    amplitude = 1.0
    match rope.scaling:
        case LinearScaling(factor):
            frequencies = frequencies / factor
        case Llama3Scaling() as scaling:
            frequencies = _llama3(frequencies, scaling)
        case FactorScaling(factors):
            frequencies = frequencies / np.array(factors)
        case YarnScaling() as scaling:
            frequencies = _yarn(frequencies, rope.theta, scaling)
            amplitude = scaling.attention_factor
        case DynamicScaling() as scaling:
            frequencies = _dynamic_bases(rope.theta, scaling, head_dim, positions, prompt)[:, None] ** exponents
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    return (amplitude * np.cos(angles)).astype(np.float32), (amplitude * np.sin(angles)).astype(np.float32)


def _llama3(frequencies: F64, scaling: Llama3Scaling) -> F64:
    """Keep short wavelengths, divide long ones by the factor, and blend in between."""
    turns = scaling.original_context * frequencies / tau  # over the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor


def _dynamic_bases(theta: float, scaling: DynamicScaling, head_dim: int, positions: int, prompt: int) -> F64:
    """f64[positions]: the base at each position, from the length of the sequence when it was computed."""
    lengths = np.maximum(np.arange(1, positions + 1), max(prompt, scaling.original_context))
    stretch = scaling.factor * lengths / scaling.original_context - (scaling.factor - 1)
    bases: F64 = theta * stretch ** (head_dim / (head_dim - 2))
    return bases


def _yarn(frequencies: F64, theta: float, scaling: YarnScaling) -> F64:
    """Keep the first frequencies, divide the last by the factor, and blend linearly in their index in between."""
    head_dim = 2 * len(frequencies)

    def index(turns: float) -> float:
        """Of the frequency that turns so often over the original context."""
        return head_dim * log(scaling.original_context / (turns * tau)) / (2 * log(theta))

    first, last = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        first, last = floor(first), ceil(last)
    # The limit is transformers', although there are only head_dim / 2 frequencies.
    first, last = max(first, 0), min(last, head_dim - 1)
    span = last - first or 0.001
    divide = np.clip((np.arange(len(frequencies)) - first) / span, 0.0, 1.0)
    blended: F64 = (1.0 - divide) * frequencies + divide * frequencies / scaling.factor
    return blended
