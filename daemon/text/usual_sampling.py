"""How a model's makers would have its tokens chosen: what ``generation_config.json`` says of it."""

from __future__ import annotations

from pathlib import Path

from motley.daemon.sampling.parameters import RANGES
from motley.daemon.text.tokenizer import TokenizerError, read_json
from motley.protocol.mesh_pb2 import Sampling

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What is read of it. ``do_sample`` is not, as at vLLM: whoever wants no draw asks for temperature 0."""


def usual_sampling(place: Path) -> Sampling:
    """What a model's files say for requests that say nothing; fields that they leave open are absent.

    Args:
        place: a folder in Hugging Face's layout, or a GGUF file, which says nothing of it.

    Raises:
        TokenizerError: a value is none that tokens can be chosen by.
    """
    usual = Sampling()
    file = place / "generation_config.json"
    told = read_json(file) if place.is_dir() else {}
    for name in FIELDS:
        value = told.get(name)
        if value is None or (name == "top_k" and value == -1):  # -1: all tokens, as some write it
            continue
        low, high = RANGES[name]
        whole = name == "top_k"
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high or (whole and value % 1):
            kind = "a whole number" if whole else "a number"
            raise TokenizerError(f"{file}: {name} = {value!r} must be {kind} between {low:g} and {high:g}")
        setattr(usual, name, int(value) if whole else value)
    return usual
