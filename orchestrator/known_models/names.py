"""Short names of models that people ask for often: where their files are on the hub, and how to hold them.

The table is kept small by hand. A name stands for a repository whose format Motley reads, and for the quantisation that
loses little and leaves room: int4 from four billion parameters on, int8 below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from motley.orchestrator.session_request import Quantisation, SessionRequest


@dataclass(frozen=True)
class KnownModel:
    """What a short name stands for.

    Attributes:
        source: its id on the hub.
        held: the quantisation that it has in memory.
        packed: its files are quantised so already, and are loaded as they are stored.
    """

    source: str
    held: Quantisation = "int4"
    packed: bool = False

    @property
    def quantisation(self) -> Quantisation:
        """What a session is asked for."""
        return "stored" if self.packed else self.held


KNOWN: Mapping[str, KnownModel] = MappingProxyType(
    {
        "deepseek-v3": KnownModel("deepseek-ai/DeepSeek-V3"),
        "gemma-4-26b-a4b": KnownModel("google/gemma-4-26B-A4B-it"),
        "gemma-4-e2b": KnownModel("google/gemma-4-E2B-it", "int8"),
        "gemma-4-e4b": KnownModel("google/gemma-4-E4B-it"),
        "gemma-4-31b": KnownModel("google/gemma-4-31B-it"),
        "glm-4.7-flash": KnownModel("zai-org/GLM-4.7-Flash"),
        "kimi-k2": KnownModel("moonshotai/Kimi-K2-Instruct"),
        "llama-3.1-8b": KnownModel("meta-llama/Llama-3.1-8B-Instruct"),
        "llama-3.2-1b": KnownModel("meta-llama/Llama-3.2-1B-Instruct", "int8"),
        "minimax-m2": KnownModel("MiniMaxAI/MiniMax-M2"),
        "mistral-7b": KnownModel("mistralai/Mistral-7B-Instruct-v0.1"),
        "mixtral-8x7b": KnownModel("mistralai/Mixtral-8x7B-Instruct-v0.1"),
        "muse-glimmer-30b": KnownModel("meta-models/Muse-Glimmer-30B"),
        "qwen2.5-0.5b": KnownModel("Qwen/Qwen2.5-0.5B-Instruct", "int8"),
        "qwen2.5-7b": KnownModel("Qwen/Qwen2.5-7B-Instruct-AWQ", packed=True),
        "qwen3-0.6b": KnownModel("Qwen/Qwen3-0.6B", "int8"),
        "qwen3-8b": KnownModel("Qwen/Qwen3-8B-AWQ", packed=True),
        "qwen3-30b-a3b": KnownModel("Qwen/Qwen3-30B-A3B"),
        "qwen3-next-80b-a3b": KnownModel("Qwen/Qwen3-Next-80B-A3B-Instruct"),
        "qwen3.5-9b": KnownModel("Qwen/Qwen3.5-9B"),
        "qwen3.5-35b-a3b": KnownModel("Qwen/Qwen3.5-35B-A3B"),
        "seed-oss-36b": KnownModel("ByteDance-Seed/Seed-OSS-36B-Instruct"),
        "smollm3-3b": KnownModel("HuggingFaceTB/SmolLM3-3B", "int8"),
        "tinyllama-1.1b": KnownModel("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "int8"),
    }
)
"""By short name; each has its sizes in `motley.orchestrator.known_models.shapes`."""

_MEANT = 3
"""So many names are proposed to who has mistyped one."""


def source_of(model: str) -> str:
    """Where a model is: as it is named, or on the hub if that is a short name."""
    known = KNOWN.get(model)
    return known.source if known else model


def short_name_of(model: str) -> str:
    """The short name of a model, which is named so or by its id on the hub; "": it has none."""
    return next((name for name, each in KNOWN.items() if model in (name, each.source)), "")


def has_experts(name: str) -> bool:
    """Whether the model of a short name has experts, of which each token needs some."""
    from motley.orchestrator.known_models.shapes import SHAPES  # a long table, which most commands do without

    return bool(re.search(r'"\w*experts": ([2-9]|\d\d)', json.dumps(SHAPES[name])))


def perhaps_meant(model: str) -> str:
    """A sentence for who has mistyped a short name, such as `` Did you mean qwen3-8b?``; "": it resembles none, or has
    none to be mistyped."""
    if short_name_of(model):
        return ""
    typed = model.lower()
    begin_so = [name for name in KNOWN if typed and name.startswith(typed)]
    names = begin_so[:_MEANT] or get_close_matches(typed, KNOWN, _MEANT)
    return f" Did you mean {' or '.join(names)}?" if names else ""


def spelled_out(request: SessionRequest, quantised: bool) -> SessionRequest:
    """A request with what short names stand for; clients go on calling the model by its short name.

    Args:
        quantised: the client itself says by which quantisation.
    """
    changed: dict[str, Any] = {"draft_model": source_of(request.draft_model)}
    if known := KNOWN.get(request.model):
        changed |= {"model": known.source, "name": request.name or request.model}
        if not quantised:
            changed["quantisation"] = known.quantisation
    return replace(request, **changed)
