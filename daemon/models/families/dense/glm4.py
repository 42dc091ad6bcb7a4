"""GLM-4 0414: half of each head turns, by neighbours, and norms stand before and after each block."""

from __future__ import annotations

from motley.daemon.models.blocks.attention import attention
from motley.daemon.models.blocks.layers import begin, model, norm
from motley.daemon.models.blocks.mlp import fused_names, gated_mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.blocks.windows import no_windows
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def glm4(keys: Keys) -> Model:
    """Describe a model of type ``glm4``."""
    shape = read_shape(keys, head_dim=128, epsilon=1.5625e-7)
    rope, context = read_rope(keys, shape.heads.size, partial=0.5)
    no_windows(keys, shape.layers)
    bias, columns = keys.flag("attention_bias", True), keys.size("intermediate_size")

    def layer(number: int) -> Layer:
        writer, module = begin(shape, number), f"model.layers.{number}"
        at, mlp_at = f"layers.{number}.attention", f"layers.{number}.mlp"
        x = norm(writer, shape, f"{at}.norm", writer.x, f"{module}.input_layernorm.weight")
        x = attention(writer, shape, number, x, qkv_bias=bias, neighbours=rope.size)
        x = norm(writer, shape, f"{at}.after", x, f"{module}.post_self_attn_layernorm.weight")
        residual = writer.add(writer.x, x)
        x = norm(writer, shape, f"{mlp_at}.norm", residual, f"{module}.post_attention_layernorm.weight")
        names = fused_names(f"{module}.mlp", shape.hidden, columns)
        x = gated_mlp(writer, mlp_at, x, mlp_axis(columns), names)
        x = norm(writer, shape, f"{mlp_at}.after", x, f"{module}.post_mlp_layernorm.weight")
        return writer.layer(writer.add(residual, x))

    return model("glm4", shape, layer, {"main": rope}, context)
