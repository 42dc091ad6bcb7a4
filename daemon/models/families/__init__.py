"""Families of models, one file each: from a model's keys to its description."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from motley.daemon.models.description import Model
from motley.daemon.models.families.llama import llama
from motley.daemon.models.families.mistral import mistral
from motley.daemon.models.families.mixtral import mixtral
from motley.daemon.models.families.olmoe import olmoe
from motley.daemon.models.families.qwen2 import qwen2
from motley.daemon.models.families.qwen2_moe import qwen2_moe
from motley.daemon.models.families.qwen3 import qwen3
from motley.daemon.models.families.qwen3_moe import qwen3_moe
from motley.daemon.models.keys import Keys

FAMILIES: Mapping[str, Callable[[Keys], Model]] = {
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}
"""What describes a model, by the ``model_type`` of its config. Each raises `ConfigError`."""
