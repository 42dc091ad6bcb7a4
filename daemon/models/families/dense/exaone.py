"""EXAONE 3.0 and 3.5: Llama, with names of its own in its configs and files."""

from __future__ import annotations

from motley.daemon.models.blocks.spelling import also_spelled
from motley.daemon.models.description.model import Model
from motley.daemon.models.families.dense.llama import llama
from motley.daemon.models.keys import Keys

DEFAULTS = {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
"""What transformers takes where a config is silent."""
ALSO = {
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
"""What published configs call keys."""
WHOLE = {"model.embed_tokens.": "transformer.wte.", "model.norm.": "transformer.ln_f."}
NAMES = {
    "input_layernorm.": "ln_1.",
    "post_attention_layernorm.": "ln_2.",
    "self_attn.o_proj.": "attn.attention.out_proj.",
    "self_attn.": "attn.attention.",
    "mlp.gate_proj.": "mlp.c_fc_0.",
    "mlp.up_proj.": "mlp.c_fc_1.",
    "mlp.down_proj.": "mlp.c_proj.",
}
"""What published files call tensors, those of a layer below."""


def exaone(keys: Keys) -> Model:
    """Describe a model of type ``exaone``."""
    keys = keys.also(ALSO)
    if not keys.says("num_key_value_heads"):
        keys = keys.filled({"num_key_value_heads": 8})
    return also_spelled(llama(keys.filled(DEFAULTS)), WHOLE, NAMES, "transformer.h.")
