"""gpt-oss: experts with biases and a clamped activation, attention with sinks, windows in every other layer."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import listed_windows
from motley.daemon.models.blocks.experts import expert_count, experts
from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import MlpNames
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.description.operations.rows import Activation
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import rope_of
from motley.daemon.weights.places import Part

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotary embedding where a config is silent."""


def gpt_oss(keys: Keys) -> Model:
    """Describe a model of type ``gpt_oss``."""
    if keys.get("rope_parameters") is None and keys.get("rope_scaling") is None:
        keys = keys.filled({"rope_parameters": YARN})
    shape = read_shape(keys, head_dim=64, epsilon=1e-5)
    rope, _ = rope_of(
        keys,
        keys.inner("rope_scaling" if keys.get("rope_scaling") else "rope_parameters"),
        shape.heads.size,
        keys.number("rope_theta", 150000.0),
    )
    kinds = [SLIDING if (layer + 1) % 2 else FULL for layer in range(shape.layers)]
    windows = listed_windows(keys, shape.layers, keys.size("sliding_window", 128), kinds)
    keys.only("swiglu_alpha", 1.702)
    keys.only("swiglu_limit", 7.0)
    bias = keys.flag("attention_bias", True)
    count, columns = expert_count(keys), keys.size("intermediate_size")
    routing = Routing(keys.size("num_experts_per_tok"), scores="softmax of chosen")

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(
                writer, shape, number, x, qkv_bias=bias, output_bias=bias, window=windows[number], sinks=True
            ),
            lambda writer, x: experts(
                writer,
                shape,
                number,
                x,
                count,
                columns,
                routing,
                names=_names(number, shape.hidden, columns),
                router="router",
                router_bias=True,
                activation=Activation.CLAMPED,
            ),
        )

    return model("gpt_oss", shape, layer, {"main": rope}, keys.size("max_position_embeddings"))


def _names(number: int, hidden: int, columns: int) -> MlpNames:
    """The experts of a layer lie in one tensor for gate and up, whose rows alternate, and one for down.

    Stored as floats they are transposed; stored as MXFP4, under names of their own, they are not.
    """
    module = f"model.layers.{number}.mlp.experts"
    both, down, one = f"{module}.gate_up_proj", f"{module}.down_proj", "[{expert}]"

    def alternating(first: int) -> tuple[Part, Part]:
        return (
            Part(f"{both}{one}", (hidden, 2 * columns), first, 2, transposed=True),
            Part(f"{both}_mxfp4{one}", (2 * columns, hidden), first, 2),
        )

    return MlpNames(
        gate=f"{module}.{{expert}}.gate_proj.weight",
        up=f"{module}.{{expert}}.up_proj.weight",
        down=f"{module}.{{expert}}.down_proj.weight",
        biases=(
            f"{module}.{{expert}}.gate_proj.bias",
            f"{module}.{{expert}}.up_proj.bias",
            f"{module}.{{expert}}.down_proj.bias",
        ),
        gate_parts=alternating(0),
        up_parts=alternating(1),
        down_parts=(
            Part(f"{down}{one}", (columns, hidden), transposed=True),
            Part(f"{down}_mxfp4{one}", (hidden, columns)),
        ),
        bias_parts=(
            (Part(f"{both}_bias{one}", (2 * columns,), 0, 2),),
            (Part(f"{both}_bias{one}", (2 * columns,), 1, 2),),
            (Part(f"{down}_bias{one}", (hidden,)),),
        ),
    )
