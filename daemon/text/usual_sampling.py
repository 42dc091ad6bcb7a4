"""How a model's makers would have its tokens chosen: by ``generation_config.json``, or a GGUF file's metadata."""

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
