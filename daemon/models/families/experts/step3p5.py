"""Step 3.5 Flash and the text of Step 3.7: windows and other heads in most layers, a gate for each head, and experts.

Gates and ups of some layers are bounded, and gains of norms are stored less 1.
"""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import listed_windows, read_window
from motley.daemon.models.blocks.experts import SharedExpert, expert_count, experts, stacked_parts
from motley.daemon.models.blocks.layer_kinds import FULL
from motley.daemon.models.blocks.layers import further, model, pre_norm_layer
from motley.daemon.models.blocks.mlp import MlpNames, gated_mlp, limits_of_opened, mlp_axis, usual_names
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.blocks.spelling import also_spelled
from motley.daemon.models.description.axes import Axis, Kind, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.families.experts.step3p5_keys import (
    AHEAD,
    heads_of_windows,
    limits_of,
    listed_of,
    ropes_of,
    sparse_of,
)
from motley.daemon.models.keys import Keys
from motley.daemon.weights.places import Part

DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
}
"""What transformers takes where a config is silent."""
ALSO = {
    "num_key_value_heads": "num_attention_groups",
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "share_expert_dim": "share_expert_dims",
}
"""What published configs call keys."""
ONLY = {
    "use_head_wise_attn_gate": True,
    "use_qk_norm": True,
    "moe_router_activation": "sigmoid",
    "norm_expert_weight": True,
    "use_moe_router_bias": True,
    "zero_centered": True,
    "yarn_only_types": [FULL],
    "mlp_bias": False,
}
NAMES = {
    "mlp.gate.e_score_correction_bias": "moe.router_bias",
    "mlp.gate.": "moe.gate.",
    "mlp.shared_experts.": "share_expert.",
}
"""What published files call tensors of a layer."""


def step3p5(keys: Keys) -> Model:
    """Describe a model of type ``step3p5``."""
    keys = keys.also(ALSO).filled(DEFAULTS)
    for key, value in ONLY.items():
        keys.only(key, value)
    shape = read_shape(keys, epsilon=1e-5, norm_offset=1.0)
    ahead = keys.size(AHEAD, 0, least=0)
    for key in ("layer_types", "mlp_layer_types"):
        keys.values[key] = listed_of(keys, key, shape.layers)
    windows = listed_windows(keys, shape.layers, read_window(keys, 0), [FULL] * shape.layers)
    narrow, (ropes, context) = heads_of_windows(keys, shape), ropes_of(keys, shape, windows)
    bias, scale = keys.flag("attention_bias", False), keys.number("query_pre_attn_scalar", shape.heads.size) ** -0.5
    count, columns = expert_count(keys, "n_routed_experts", "num_local_experts"), keys.size("moe_intermediate_size")
    beside, chosen = keys.size("share_expert_dim"), keys.size("num_experts_per_tok")
    plain, sparse = mlp_axis(keys.size("intermediate_size")), sparse_of(keys, shape.layers)
    scaling = keys.number("moe_router_scaling_factor", 1.0)
    limits, limits_shared = (
        [limits_of_opened(each) for each in limits_of(keys, key, shape.layers)]
        for key in ("swiglu_limits", "swiglu_limits_shared")
    )

    def layer(number: int) -> Layer:
        window, module = windows[number], f"model.layers.{number}.mlp"
        correction = W(f"{module}.gate.e_score_correction_bias", Axis(Kind.PLAIN, count, "n_routed_experts"))
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(
                writer,
                shape,
                number,
                x,
                heads=narrow if window else shape.heads,
                qkv_bias=bias,
                output_bias=bias,
                qk_norm=True,
                rope="sliding" if window else "full",
                window=window,
                scale=scale,
                gate="g_proj",
                gate_of_heads=True,
            ),
            lambda writer, x: (
                experts(
                    writer,
                    shape,
                    number,
                    x,
                    count,
                    columns,
                    Routing(chosen, "sigmoid", normalised=True, scaling=scaling, correction=correction),
                    names=_names(number, shape.hidden, columns),
                    shared=SharedExpert(beside, "shared_experts", gated=False, limits=limits_shared[number]),
                    limits=limits[number],
                )
                if sparse[number]
                else gated_mlp(
                    writer, f"layers.{number}.mlp", x, plain, usual_names(module), limits=limits_shared[number]
                )
            ),
        )

    described = model("step3p5", shape, layer, ropes, context, ignored=further(shape, ahead))
    return also_spelled(described, {}, NAMES)


def _names(number: int, hidden: int, columns: int) -> MlpNames:
    """Files have experts' matrices of a kind in a tensor for each layer; transformers has gate and up in one."""
    module, older = f"model.layers.{number}.mlp.experts", f"model.layers.{number}.moe"
    stacked, rows = stacked_parts(module, hidden, columns), {"gate": columns, "up": columns, "down": hidden}

    def apart(part: str, own: int) -> Part:
        return Part(f"{older}.{part}_proj.weight[{{expert}}]", (own, hidden + columns - own))

    return usual_names(f"{module}.{{expert}}", parts={part: (*stacked[part], apart(part, rows[part])) for part in rows})
