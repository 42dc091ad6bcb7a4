"""Rotary position embeddings: what they are, and their tables.

Sources: Su et al. 2021, https://arxiv.org/abs/2104.09864; Llama 3.1's reference code for its frequency scaling;
Peng et al. 2023 (YaRN), https://arxiv.org/abs/2309.00071; Ding et al. 2024 (LongRoPE),
https://arxiv.org/abs/2402.13753; with the details of transformers' modeling_rope_utils.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log, tau

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_AT_ONCE = 4096
"""Positions whose tables are computed at a time: float64 takes some times the room of the result."""


@dataclass(frozen=True)
class LinearScaling:
    """Rotary frequencies all divided by the factor."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Rotary frequencies stretched for long contexts as Llama 3.1 does.

    Attributes:
        factor: what frequencies are divided by that turn at most `low_freq_factor` times over the original context.
        high_freq_factor: those that turn at least so often stay; in between both are blended.
        original_context: tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class YarnScaling:
    """Rotary frequencies stretched as YaRN does (Peng et al. 2023, https://arxiv.org/abs/2309.00071).

    What turns more than `beta_fast` times in the original context stays, what turns less than `beta_slow` times is
    divided by the factor.
    """

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    """Whether the range that is blended over starts and ends at whole frequencies."""
    attention_factor: float
    """What rotated queries and keys are multiplied by."""


@dataclass(frozen=True)
class DynamicScaling:
    """Plain up to the original context; beyond, a base that grows with the sequence ("dynamic NTK").

    A prompt is rotated by the base of its whole length, each later token by that of the length with it, and cached
    keys keep their rotation: as transformers' ``generate()`` does, however the prompt is cut into steps here.
    """

    factor: float
    original_context: int


@dataclass(frozen=True)
class FactorScaling:
    """Each rotary frequency divided by a factor of its own (what GGUF files make of Llama 3.1's scaling)."""

    factors: tuple[float, ...]


@dataclass(frozen=True)
class LongScaling:
    """Frequencies divided by factors of their own: some for sequences up to the original context, others beyond.

    A prompt is rotated by what its whole length asks for, each later token by what the length with it does, and cached
    keys keep their rotation.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    attention_factor: float
    """What rotated queries and keys are multiplied by."""


@dataclass(frozen=True)
class ProportionalScaling:
    """Only the first frequencies turn, divided by the factor, and the others stay where they are.

    That is not a rotation of a part of each head: the pairs lie half a head apart, and the frequencies are those of a
    whole head (Gemma 4).
    """

    turned: int
    """How many of the frequencies turn."""
    factor: float = 1.0


RopeScaling = (
    ProportionalScaling | LinearScaling | Llama3Scaling | YarnScaling | DynamicScaling | FactorScaling | LongScaling
)


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding: which elements of a head turn, and how fast.

    Attributes:
        theta: the base of the frequencies.
        size: how many elements of a head turn, its first ones, in pairs i and i + size / 2; the others stay.
        scaling: how the frequencies are stretched for contexts beyond the original one; None: they are not.
        backwards: pairs turn the other way, which is seen where a query and a key are unlike.
    """

    theta: float
    size: int
    scaling: RopeScaling | None = None
    backwards: bool = False

    def same_tables(self, prompt: int) -> int:
        """The shortest prompt, in tokens, whose sequence has the same tables as that of a prompt of this length."""
        match self.scaling:
            case LongScaling(original_context=original) if prompt > original:
                return original + 1
            case DynamicScaling(original_context=original) if prompt > original:
                return prompt
        return 0


def rotary_tables(rope: Rope, positions: int, prompt: int = 0) -> tuple[F32, F32]:
    """Cosines and sines, f32[positions, rope.size / 2] each, computed in float64.

    A scaling that also scales attention (YaRN, LongRoPE) has its factor in both tables, hence in queries and keys.

    Args:
        prompt: the sequence's prompt, tokens; matters where `Rope.same_tables` says so.
    """
    cosines, sines = np.empty((2, positions, rope.size // 2), np.float32)
    for first in range(0, positions, _AT_ONCE):
        some = np.arange(first, min(first + _AT_ONCE, positions))
        frequencies, amplitude = _frequencies(rope, some, prompt)
        angles = some[:, None] * (-frequencies if rope.backwards else frequencies)
        cosines[some], sines[some] = amplitude * np.cos(angles), amplitude * np.sin(angles)
    return cosines, sines


def _frequencies(rope: Rope, positions: I64, prompt: int) -> tuple[F64, float]:
    """What pairs turn by from one position to the next, f64[size / 2] or, where positions differ in that,
    f64[positions, size / 2], and what rotated queries and keys are multiplied by."""
    exponents = -(np.arange(0, rope.size, 2, dtype=np.float64) / rope.size)
    frequencies = rope.theta**exponents
    amplitude = 1.0
    match rope.scaling:
        case ProportionalScaling(turned, factor):
            frequencies = np.where(np.arange(len(frequencies)) < turned, frequencies / factor, 0.0)
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
            frequencies = _dynamic_bases(rope, scaling, positions, prompt)[:, None] ** exponents
        case LongScaling() as scaling:
            stretched = _lengths(scaling.original_context, positions, prompt) > scaling.original_context
            frequencies = frequencies / np.where(stretched[:, None], scaling.long, scaling.short)
            amplitude = scaling.attention_factor
    return frequencies, amplitude


def _llama3(frequencies: F64, scaling: Llama3Scaling) -> F64:
    """Keep short wavelengths, divide long ones by the factor, and blend in between."""
    turns = scaling.original_context * frequencies / tau  # over the original context
    between = scaling.high_freq_factor - scaling.low_freq_factor
    above = turns - scaling.low_freq_factor
    keep = np.clip(above / between, 0.0, 1.0) if between else np.heaviside(above, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor


def _lengths(original_context: int, positions: I64, prompt: int) -> I64:
    """i64[positions]: the length of the sequence when a position was computed, at least the original context."""
    return np.maximum(positions + 1, max(prompt, original_context))


def _dynamic_bases(rope: Rope, scaling: DynamicScaling, positions: I64, prompt: int) -> F64:
    """f64[positions]: the base at each position, from the length of the sequence when it was computed."""
    lengths = _lengths(scaling.original_context, positions, prompt)
    stretch = scaling.factor * lengths / scaling.original_context - (scaling.factor - 1)
    bases: F64 = rope.theta * stretch ** (rope.size / (rope.size - 2))
    return bases


def _yarn(frequencies: F64, theta: float, scaling: YarnScaling) -> F64:
    """Keep the first frequencies, divide the last by the factor, and blend linearly in their index in between."""
    size = 2 * len(frequencies)

    def index(turns: float) -> float:
        """The index of the frequency that turns so often over the original context."""
        return size * log(scaling.original_context / (turns * tau)) / (2 * log(theta))

    first, last = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        first, last = floor(first), ceil(last)
    # The limit is transformers', although there are only size / 2 frequencies.
    first, last = max(first, 0), min(last, size - 1)
    span = last - first or 0.001
    divide = np.clip((np.arange(len(frequencies)) - first) / span, 0.0, 1.0)
    blended: F64 = (1.0 - divide) * frequencies + divide * frequencies / scaling.factor
    return blended
