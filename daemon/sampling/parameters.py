"""How tokens are to be chosen: the sampling parameters of a request, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from motley.protocol import mesh_pb2 as pb


class SamplingError(ValueError):
    """A sampling parameter is out of range; the message names it and the range."""


GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy decoding, as in vLLM."""

RANGES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "temperature": (0, 100),
        "top_k": (0, 2**31 - 1),
        "top_p": (0, 1),
        "min_p": (0, 1),
        "repetition_penalty": (0.01, 100),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
        "seed": (0, 2**64 - 1),
        "top_logprobs": (0, 20),
    }
)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. The defaults switch everything off: greedy decoding of the raw logits.

    Attributes:
        repetition_penalty: divides positive and multiplies negative logits of every token in the prompt or the
            output (Keskar et al. 2019, as in Hugging Face). 1: off.
        presence_penalty: subtracted from the logit of every generated token (OpenAI). 0: off.
        frequency_penalty: subtracted once for each time a token was generated (OpenAI). 0: off.
        logit_bias: token id -> added last, so that -100 bans a token.
        top_logprobs: alternatives to report per token, beside the chosen one.

    Raises:
        SamplingError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:  # NaN fails too
                raise SamplingError(f"{name} must be between {low} and {high}, not {value}")
        for token, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise SamplingError(f"logit_bias of token {token} must be between -100 and 100, not {bias}")
        if self.top_logprobs and not self.logprobs:
            raise SamplingError("top_logprobs needs logprobs to be true")

    @classmethod
    def from_proto(cls, message: pb.Sampling) -> SamplingParams:
        """Read the wire form, in which every field is set (protobuf's zero is a value here, not a default)."""
        return cls(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            seed=message.seed,
            logit_bias=dict(message.logit_bias),
            logprobs=message.logprobs,
            top_logprobs=message.top_logprobs,
        )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without a draw."""
        return self.temperature < GREEDY_BELOW

    @property
    def truncated(self) -> bool:
        """Whether a filter can forbid tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0
