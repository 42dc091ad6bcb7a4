"""How a model's makers would have its tokens chosen, and how many of them: by ``generation_config.json``, or a GGUF
file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from motley.daemon.sampling.parameters import RANGES
from motley.daemon.text.tokenizer import TokenizerError, read_json
from motley.daemon.weights.checkpoints.gguf.header import read_header
from motley.protocol.mesh_pb2 import Sampling

FIELDS: Mapping[str, str] = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""What is read of a ``generation_config.json``, and what GGUF files call it. ``do_sample`` is not, as at vLLM: whoever
wants no draw asks for temperature 0."""


def usual_sampling(place: Path) -> Sampling:
    """What a model's files say for requests that say nothing; fields that they leave open are absent.

    Args:
        place: a folder in Hugging Face's layout, or a GGUF file.

    Raises:
        TokenizerError: a value is none that tokens can be chosen by.
        CheckpointError: the GGUF file cannot be read.
    """
    usual = Sampling()
    for name, (called, value) in _told(place).items():
        if value is None or (name == "top_k" and value == -1):  # -1: all tokens, as some write it
            continue
        low, high = RANGES[name]
        whole = name == "top_k"
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high or (whole and value % 1):
            kind = "a whole number" if whole else "a number"
            raise TokenizerError(f"{called} = {value!r} must be {kind} between {low:g} and {high:g}")
        setattr(usual, name, int(value) if whole else value)
    return usual


def usual_tokens(place: Path) -> int:
    """How long an answer is at most, in tokens, where a request does not say: ``max_new_tokens``, as at vLLM; 0: the
    model's files do not say either, as those of GGUF never do. Arguments as `usual_sampling`.

    Raises:
        TokenizerError: the value is no number of tokens.
    """
    file = place / "generation_config.json"
    value = read_json(file).get("max_new_tokens") if place.is_dir() else None
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
        raise TokenizerError(f"{file}: max_new_tokens = {value!r} must be a whole number from 1 on")
    return value


def _told(place: Path) -> dict[str, tuple[str, Any]]:
    """Each field as the files have it: what they call it, and its value."""
    if place.is_dir():
        file = place / "generation_config.json"
        told = read_json(file)
        return {name: (f"{file}: {name}", told.get(name)) for name in FIELDS}
    metadata = read_header(place).metadata
    return {name: (f"{place}: {key}", _as_written(metadata.get(key))) for name, key in FIELDS.items()}


def _as_written(value: Any) -> Any:
    """The number that somebody wrote, of which a file has the nearest of 32 bits."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
