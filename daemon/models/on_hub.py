"""Whether a model of the hub can be run, by what the hub tells of it before anything is fetched. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from motley.daemon.models.families import FAMILIES, TEXT_PARTS
from motley.daemon.models.gguf.architectures import ARCHITECTURES

PACKED = {"awq": "AWQ", "gptq": "GPTQ", "fp8": "FP8", "mxfp4": "MXFP4"}
"""By ``quant_method`` of files that are quantised already, what people call them."""


class Verdict(NamedTuple):
    """What a repository holds, for people, and why that cannot be run; empty: as far as can be seen, it can."""

    family: str
    format: str
    why_not: str = ""


def verdict(config: Mapping[str, Any] | None, gguf: Mapping[str, Any] | None, tags: Collection[str]) -> Verdict:
    """Judge a repository.

    Args:
        config: what the hub tells of its ``config.json``; None: it has none.
        gguf: what the hub tells of its GGUF files; None: it has none.
        tags: of the repository, such as ``safetensors``.
    """
    if gguf:
        family = str(gguf.get("architecture", "unknown"))
        return Verdict(family, "GGUF", "" if family in ARCHITECTURES else f"family {family} is not supported")
    family = str((config or {}).get("model_type", "unknown"))
    method = ((config or {}).get("quantization_config") or {}).get("quant_method")
    form = "safetensors" if method is None else PACKED.get(method, str(method))
    if "adapter" in tags or "peft" in tags or "lora" in tags:
        return Verdict(family, "adapter", "it is an adapter of another model: see `motley adapters`")
    if family not in FAMILIES and family not in TEXT_PARTS:
        return Verdict(family, form, f"family {family} is not supported")
    if method is not None and method not in PACKED:
        return Verdict(family, form, f"weights that are packed by {method} are not")
    if "safetensors" not in tags:
        return Verdict(family, form, "it has no safetensors")
    return Verdict(family, form)
