"""The tensors of a checkpoint: their names and whole shapes, from the config alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from motley.daemon.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
"""The table whose rows are the graph's input, f32[vocabulary, D]."""
HEAD = "lm_head.weight"
ROUTER = "mlp.gate.weight"
"""Within a layer's module: the rows whose products with a row of x say which experts it meets, f32[experts, D]."""
SHARED_GATE = "mlp.shared_expert_gate.weight"
"""Within a layer's module: the row whose product with a row of x says how much of the shared expert it gets."""


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this config has, by its Hugging Face name.

    A share may lie within a tensor that is of another shape than the config says; it would read the wrong weights
    without noticing. Comparing whole shapes finds that before anything is loaded.
    """
    hidden = config.hidden
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
        }
        for mlp in mlps(config, layer):
            matrices |= {
                f"{mlp.name}.gate_proj": (mlp.columns, hidden, config.mlp_bias),
                f"{mlp.name}.up_proj": (mlp.columns, hidden, config.mlp_bias),
                f"{mlp.name}.down_proj": (hidden, mlp.columns, config.mlp_bias),
            }
        if experts := config.experts_of(layer):
            shapes[f"{at}.{ROUTER}"] = (experts.count, hidden)
            if experts.shared:
                shapes[f"{at}.{SHARED_GATE}"] = (1, hidden)
        for name, (rows, inner, bias) in matrices.items():
            shapes[f"{at}.{name}.weight"] = (rows, inner)
            if bias:
                shapes[f"{at}.{name}.bias"] = (rows,)
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            whole = config.whole_qk_norm
            shapes[f"{at}.self_attn.q_norm.weight"] = (q_rows if whole else config.head_dim,)
            shapes[f"{at}.self_attn.k_norm.weight"] = (kv_rows if whole else config.head_dim,)
    return shapes


class Inner(Enum):
    """What the inner dimension of a matrix is, in words."""

    HIDDEN = "hidden_size"
    HEADS = "heads per KV head * head_dim"
    MLP = "intermediate_size"
    EXPERT = "the intermediate size of experts"
    SHARED = "shared_expert_intermediate_size"


@dataclass(frozen=True)
class Mlp:
    """A gated MLP of a layer.

    Attributes:
        name: of its module, within the layer's.
        inner: `Inner.MLP`, `Inner.EXPERT` or `Inner.SHARED`.
    """

    name: str
    columns: int
    inner: Inner


def mlps(config: ModelConfig, layer: int) -> list[Mlp]:
    """The MLPs of a layer: one, or those of its experts, in order, and then the shared one if there is any."""
    experts = config.experts_of(layer)
    if experts is None:
        return [Mlp("mlp", config.intermediate, Inner.MLP)]
    chosen = [Mlp(f"mlp.experts.{number}", experts.intermediate, Inner.EXPERT) for number in range(experts.count)]
    return chosen + [Mlp("mlp.shared_expert", experts.shared, Inner.SHARED)] * bool(experts.shared)


def fused_matrices(config: ModelConfig) -> list[tuple[Inner, tuple[str, ...]]]:
    """The matrices that a model multiplies with; those that the graph fuses into one, together.

    Routers are not among them: they stay float32, since a small error would send a row to another expert.
    """
    fused: list[tuple[Inner, tuple[str, ...]]] = [(Inner.HIDDEN, (EMBEDDING if config.tied else HEAD,))]
    for layer in range(config.layers):
        attention = f"model.layers.{layer}.self_attn"
        fused += [
            (Inner.HIDDEN, tuple(f"{attention}.{name}_proj.weight" for name in "qkv")),
            (Inner.HEADS, (f"{attention}.o_proj.weight",)),
        ]
        for mlp in mlps(config, layer):
            at = f"model.layers.{layer}.{mlp.name}"
            fused += [
                (Inner.HIDDEN, tuple(f"{at}.{name}_proj.weight" for name in ("gate", "up"))),
                (mlp.inner, (f"{at}.down_proj.weight",)),
            ]
    return fused
