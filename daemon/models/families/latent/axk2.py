"""A.X K2: DeepSeek V3.2 with gates on attention, which one matrix makes beside queries, and on norms."""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.attending.indexer import read_indexer
from motley.daemon.models.blocks.attending.latent import latent_attention, read_latent
from motley.daemon.models.blocks.layer_kinds import layers_with_experts
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.description.axes import Axis, Kind, Value, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.rows import Activation
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.families.experts.glm4_moe import corrected_experts
from motley.daemon.models.keys import Keys

DEFAULTS = {
    "q_lora_rank": 384,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "index_n_heads": 16,
    "gated_norm_rank": 16,
}
"""What transformers takes where a config is silent."""
BEFORE_ATTENTION, BEFORE_MLP = "input_layernorm", "post_attention_layernorm"
"""What files call the norms; of one with a gate, its modules are within."""


def axk2(keys: Keys) -> Model:
    """Describe a model of type ``axk2``."""
    keys = keys.filled(DEFAULTS)
    keys.only("moe_layer_freq", 1)
    keys.only("rope_interleave", True)
    shape, sizes, rope, context = read_latent(keys)
    sizes, indexer, rank = replace(sizes, opening=True), read_indexer(keys, sizes.turned), keys.size("gated_norm_rank")
    sparse = layers_with_experts(keys)
    mixture = corrected_experts(keys, shape, sparse)

    def layer(number: int) -> Layer:
        def attend(writer: Writer, x: Value) -> Value:
            x = _opened(writer, shape, x, f"model.layers.{number}.{BEFORE_ATTENTION}.mlp", rank)
            return latent_attention(writer, shape, sizes, number, x, indexer=indexer)

        def think(writer: Writer, x: Value) -> Value:
            if sparse[number]:
                x = _opened(writer, shape, x, f"model.layers.{number}.{BEFORE_MLP}.mlp", rank)
            return mixture(writer, number, x)

        norms = f"{BEFORE_ATTENTION}.norm", f"{BEFORE_MLP}.norm" if sparse[number] else BEFORE_MLP
        return pre_norm_layer(shape, number, attend, think, norms=norms)

    return model("axk2", shape, layer, {"main": rope}, context)


def _opened(writer: Writer, shape: Shape, x: Value, module: str, rank: int) -> Value:
    """f32[T, D] -> f32[T, D]: normed rows, each element as far as the gate is open that an MLP makes of the row."""
    at, narrow = x.name, Axis(Kind.PLAIN, rank, "gated_norm_rank")
    (made,) = writer.linear(f"{at}.narrow", x, W(f"{module}.fc1.weight", narrow, shape.residual, stays_float=True))
    made = writer.gated(f"{at}.narrow.opened", made, made, Activation.SIGMOID)
    (gate,) = writer.linear(f"{at}.gate", made, W(f"{module}.fc2.weight", shape.residual, narrow, stays_float=True))
    return writer.gated(f"{at}.opened", gate, x, Activation.SIGMOID)
