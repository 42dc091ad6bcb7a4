"""ERNIE 4.5: Llama whose neighbouring elements turn together, and the same with experts beside shared ones."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import no_windows
from motley.daemon.models.blocks.experts import SharedExpert, expert_count, experts
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.axes import Axis, Kind, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope
from motley.daemon.weights.places import Part


def ernie4_5(keys: Keys) -> Model:
    """Describe a model of type ``ernie4_5``."""
    return _ernie("ernie4_5", keys, 128, [False] * keys.layers())


def ernie4_5_moe(keys: Keys) -> Model:
    """Describe a model of type ``ernie4_5_moe``."""
    layers = keys.layers()
    first, step = keys.size("moe_layer_start_index", 1, least=0), keys.size("moe_layer_interval", 1)
    last = keys.get("moe_layer_end_index")
    last = layers - 1 if last in (None, -1) else keys.size("moe_layer_end_index", least=0)
    sparse = [first <= number <= last and (number + 1) % step == 0 for number in range(layers)]
    if not any(sparse):
        raise keys.refusal("moe_layer_start_index", "a layer from which on some have experts")
    renamed = {"num_experts": keys.size("moe_num_experts", 64), "num_experts_per_tok": keys.size("moe_k", 6)}
    return _ernie("ernie4_5_moe", keys.filled(renamed), None, sparse)


def _ernie(family: str, keys: Keys, head_dim: int | None, sparse: list[bool]) -> Model:
    """A model with experts in the layers that are `sparse`; `head_dim` is where the keys are silent."""
    shape = read_shape(keys, head_dim=head_dim, kv_heads=True, epsilon=1e-5, tied=True)
    rope, context = read_rope(keys, shape.heads.size, theta=500000.0)
    no_windows(keys, shape.layers)
    bias = keys.flag("use_bias", False)
    if bias and any(sparse):
        raise keys.refusal("use_bias", "only false where there are experts")
    plain = None if all(sparse) else mlp_axis(keys.size("intermediate_size"))
    count = expert_count(keys, "num_experts") if any(sparse) else 0
    columns = keys.size("moe_intermediate_size", 1536) if count else 0
    shared = keys.size("moe_num_shared_experts", 2, least=0) * columns

    def routing(number: int) -> Routing:
        """Chosen by the sum of a softmax and a correction, which is the one row of a matrix in files."""
        gate = f"model.layers.{number}.mlp"
        correction = W(
            f"{gate}.gate.e_score_correction_bias",
            Axis(Kind.PLAIN, count, "moe_num_experts"),
            parts=tuple(
                Part(f"{gate}.{module}.e_score_correction_bias[0]", (count,))
                for module in ("gate.moe_statics", "moe_statics")
            ),
        )
        return Routing(keys.size("num_experts_per_tok"), normalised=True, correction=correction)

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(
                writer, shape, number, x, qkv_bias=bias, output_bias=bias, neighbours=shape.heads.size
            ),
            lambda writer, x: (
                experts(
                    writer,
                    shape,
                    number,
                    x,
                    count,
                    columns,
                    routing(number),
                    shared=SharedExpert(shared, "shared_experts", gated=False) if shared else None,
                )
                if plain is None or sparse[number]
                else mlp(writer, number, x, plain, bias)
            ),
        )

    return model(family, shape, layer, {"main": rope}, context, ignored=["model.mtp"])
