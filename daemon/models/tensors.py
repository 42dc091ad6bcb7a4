"""The tensors of a checkpoint: their names and whole shapes, from the config alone."""

from __future__ import annotations

from enum import Enum

from motley.daemon.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
"""The table whose rows are the graph's input, f32[vocabulary, D]."""
HEAD = "lm_head.weight"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this config has, by its Hugging Face name.

    A share may lie within a tensor that is of another shape than the config says; it would read the wrong weights
    without noticing. Comparing whole shapes finds that before anything is loaded.
    """
    hidden, columns = config.hidden, config.intermediate
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        shapes[HEAD] = (config.vocabulary, hidden)
    for layer in range(config.layers):
        at = f"model.layers.{layer}"
        matrices = {
            "self_attn.q_proj": (q_rows, hidden, config.qkv_bias),
            "self_attn.k_proj": (kv_rows, hidden, config.qkv_bias),
            "self_attn.v_proj": (kv_rows, hidden, config.qkv_bias),
            "self_attn.o_proj": (hidden, q_rows, config.output_bias),
            "mlp.gate_proj": (columns, hidden, config.mlp_bias),
            "mlp.up_proj": (columns, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, columns, config.mlp_bias),
        }
        for name, (rows, inner, bias) in matrices.items():
            shapes[f"{at}.{name}.weight"] = (rows, inner)
            if bias:
                shapes[f"{at}.{name}.bias"] = (rows,)
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"{at}.self_attn.q_norm.weight"] = shapes[f"{at}.self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


class Inner(Enum):
    """What the inner dimension of a matrix is."""

    HIDDEN = "the residual's width"
    HEADS = "the heads of attention"
    MLP = "the columns of the MLP"


def fused_matrices(config: ModelConfig) -> list[tuple[Inner, tuple[str, ...]]]:
    """The matrices that a model multiplies with; those that the graph fuses into one, together."""
    fused: list[tuple[Inner, tuple[str, ...]]] = [(Inner.HIDDEN, (EMBEDDING if config.tied else HEAD,))]
    for layer in range(config.layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        fused += [
            (Inner.HIDDEN, tuple(f"{attention}.{name}_proj.weight" for name in "qkv")),
            (Inner.HEADS, (f"{attention}.o_proj.weight",)),
            (Inner.HIDDEN, tuple(f"{mlp}.{name}_proj.weight" for name in ("gate", "up"))),
            (Inner.MLP, (f"{mlp}.down_proj.weight",)),
        ]
    return fused
