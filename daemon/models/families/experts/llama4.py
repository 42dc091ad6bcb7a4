"""Llama 4's text model: attention in chunks but in layers that do not rotate, and one expert beside a shared one.

An expert's weight multiplies what it reads, not what it makes of it.
"""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.rotated import rotated_layers
from motley.daemon.models.blocks.experts import SharedExpert, expert_count, experts, stacked_parts
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import MlpNames, mlp, mlp_axis, usual_names
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.blocks.spelling import spelled
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.attention import Warmth
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope

CHUNKED, FULL = "chunked_attention", "full_attention"
DEFAULTS = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "eos_token_id": 2,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
}
"""What transformers takes where a config is silent."""


def llama4(keys: Keys) -> Model:
    """Describe a model of type ``llama4_text``."""
    chunk = keys.size("attention_chunk_size", 0 if keys.says("attention_chunk_size") else 8192)
    keys = keys.filled(DEFAULTS)
    shape = read_shape(keys, epsilon=1e-5)
    rope, context = read_rope(keys, shape.heads.size, theta=500000.0)
    rotated = rotated_layers(keys, shape.layers)
    kinds = [CHUNKED if rotates else FULL for rotates in rotated]
    if keys.get("layer_types") not in (None, kinds):
        raise keys.refusal("layer_types", f"{CHUNKED} where layers rotate, else {FULL}")
    bias, qk_norm = keys.flag("attention_bias", False), keys.flag("use_qk_norm", True)
    tuned = keys.get("attn_temperature_tuning") in (None, True, 4)  # the first configs have 4 where others have true
    if not tuned:
        keys.only("attn_temperature_tuning", False)
    warmth = Warmth(keys.number("attn_scale", 0.1), keys.size("floor_scale", 8192), offset=1) if tuned else None
    if keys.size("num_experts_per_tok") != 1:
        raise keys.refusal("num_experts_per_tok", "only 1, as its weight multiplies what the expert reads")
    sparse = _sparse_layers(keys, shape.layers)
    count, columns = expert_count(keys, "num_local_experts"), keys.size("intermediate_size")
    plain = mlp_axis(keys.size("intermediate_size_mlp"))

    def layer(number: int) -> Layer:
        turns = rotated[number]
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(
                writer,
                shape,
                number,
                x,
                qkv_bias=bias,
                output_bias=bias,
                neighbours=shape.heads.size if turns else 0,
                plain_qk_norm=qk_norm and turns,
                rope="main" if turns else None,
                window=chunk if turns else 0,
                chunked=bool(chunk and turns),
                warmth=None if turns else warmth,
            ),
            lambda writer, x: (
                experts(
                    writer,
                    shape,
                    number,
                    x,
                    count,
                    columns,
                    Routing(1, scores="sigmoid"),
                    names=_names(number, shape.hidden, columns),
                    router="router",
                    shared=SharedExpert(columns, gated=False),
                    scales_inputs=True,
                )
                if sparse[number]
                else mlp(writer, number, x, plain)
            ),
        )

    whole = model("llama4", shape, layer, {"main": rope}, context)
    return spelled(whole, {".mlp.": ".feed_forward."})


def _sparse_layers(keys: Keys, layers: int) -> list[bool]:
    """Which layers have experts: those that ``moe_layers`` lists, or the last one of each step."""
    step, listed = keys.size("interleave_moe_layer_step", 1), keys.get("moe_layers")
    if listed is None:
        listed = list(range(step - 1, layers, step))
    numbers = isinstance(listed, list) and all(type(layer) is int and layer in range(layers) for layer in listed)
    if not numbers or not listed:
        raise keys.refusal("moe_layers", f"a list of layers from 0 to {layers - 1}")
    return [layer in listed for layer in range(layers)]


def _names(number: int, hidden: int, columns: int) -> MlpNames:
    """The experts of a layer lie in one tensor for gate and up, and one for down, both transposed."""
    module = f"model.layers.{number}.mlp.experts"
    return usual_names(f"{module}.{{expert}}", parts=stacked_parts(module, hidden, columns, transposed=True))
