"""A model's description from its ``config.json``; what cannot be computed is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from motley.daemon.models.description.model import Model
from motley.daemon.models.families import AHEAD, FAMILIES, TEXT_PARTS
from motley.daemon.models.keys import TEXT_EOS, ConfigError, Keys

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "is_causal": (True,),
    "layernorm_scale": (1.0,),
    "lm_head_bias": (False,),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "no_rope_layers": ([],),
    "mlp_bias": (False,),
    "n_group": (1,),
    "n_shared_experts": (0,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "partial_rotary_factor": (1.0,),
    "qk_layernorm": (False,),
    "residual_multiplier": (1.0,),
    "rope_interleaved": (False,),
    "routed_scaling_factor": (1.0,),
    "scale_depth": (1.0,),
    "scale_emb": (1.0,),
    "scoring_func": ("softmax",),
    "shared_expert_intermediate_size": (0,),
    "use_bidirectional_attention": (False,),
    "use_qk_norm": (False,),
}
"""Keys that change the maths in ways few families have, with the values (besides null) that change nothing."""

TEXT_KEYS = ("text_config", "thinker_config", "llm_config")
"""What the object of keys of a text part may be called."""
TEXT_PREFIXES = (
    "language_model.model.",
    "model.language_model.",
    "model.text_model.",
    "thinker.model.",
    "thinker.model.language_model.",
)
"""What the tensors of a text part begin with, in the place of ``model.``, beside those of other parts."""


def read_model(folder: Path, ahead: bool = False) -> Model:
    """Describe the model of a folder, by ``config.json`` and, where there is one, ``generation_config.json``.

    Args:
        ahead: see `describe`.

    Raises:
        ConfigError: a file is absent or broken, or asks for something that is not supported.
    """
    model = describe(Keys.load(folder / "config.json"), ahead)
    generation = folder / "generation_config.json"
    if not generation.exists():
        return model
    ends = Keys.load(generation).tokens("eos_token_id")
    return replace(model, eos=tuple(dict.fromkeys([*ends, *model.eos])))


def describe(keys: Keys, ahead: bool = False) -> Model:
    """Describe the model that some keys ask for.

    Args:
        ahead: not that, but its head that predicts a token further ahead.

    Raises:
        ConfigError: they ask for something that is not supported.
    """
    if "model_type" not in keys.values:
        raise ConfigError(f"{keys.where}: no model_type; supported: {', '.join([*FAMILIES, *TEXT_PARTS])}")
    kind = keys.one_of("model_type", sorted([*FAMILIES, *TEXT_PARTS]))
    if kind in TEXT_PARTS:
        part = describe(_text_keys(keys, TEXT_PARTS[kind]), ahead)
        own = (f"language_model.{prefix}" for prefix in part.prefixes if prefix not in TEXT_PREFIXES)
        return replace(part, prefixes=(*TEXT_PREFIXES, *own))
    if ahead and kind not in AHEAD:
        raise ConfigError(
            f"{keys.where}: of models of type {kind} no head is read that predicts tokens further ahead, only of"
            f" {', '.join(AHEAD)}; take another draft model, or none"
        )
    model = (AHEAD if ahead else FAMILIES)[kind](keys)
    keys.check_the_rest(NEUTRAL)
    return model


def _text_keys(keys: Keys, kinds: Sequence[str]) -> Keys:
    """The keys of the text part of a model; some may stand beside it."""
    part = next((key for key in TEXT_KEYS if keys.get(key) is not None), TEXT_KEYS[0])
    if keys.get(part) is None:
        if keys.get("hidden_size") is None:
            raise keys.refusal(part, "the keys of the text part")
        return Keys(keys.where, {**keys.values, "model_type": kinds[0]})  # as Qwen2.5-VL's files have them
    beside: dict[str, Any] = {
        key: keys.values[key] for key in ("eos_token_id", "tie_word_embeddings") if key in keys.values
    }
    text = keys.inner(part).filled({"model_type": kinds[0]})
    text.one_of("model_type", kinds)
    text.values |= {TEXT_EOS: text.get("eos_token_id"), **beside}
    return text
