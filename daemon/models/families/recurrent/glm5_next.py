"""GLM-5.3 Flash's text model: residual streams that blocks read, write to and mix, gated DeltaNets whose states decay
row by row, latent attention that does not rotate, and experts with limits.

Each row of a layer with attention sees so many pools of neighbouring positions as an indexer chooses, and what follows
the last whole pool.
"""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.attending.indexer import FULL as OWN
from motley.daemon.models.blocks.attending.indexer import Indexer, indexer_types, read_indexer
from motley.daemon.models.blocks.attending.latent import latent_attention, read_latent_sizes
from motley.daemon.models.blocks.attending.windows import INDEXED
from motley.daemon.models.blocks.layer_kinds import FULL, LINEAR, attending_layers, layers_with_experts
from motley.daemon.models.blocks.layers import further, model
from motley.daemon.models.blocks.residuals.streams import read_streams, streamed_layer
from motley.daemon.models.blocks.spelling import also_spelled
from motley.daemon.models.description.axes import RecurrentHeads, Value
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.families.experts.glm4_moe import NEXTN, corrected_experts
from motley.daemon.models.families.recurrent.kimi_linear import kimi_delta_attention
from motley.daemon.models.keys import Keys
from motley.plugins.recurrent import WIDEST_HEAD

DEFAULTS = {
    "max_position_embeddings": 1048576,
    "index_n_heads": 32,
    "index_kpool": 16,
    "q_lora_rank": 1536,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "swiglu_limit": 10.0,
}
"""What transformers takes where a config is silent."""
ONLY = {"mhc": True, "mla_use_nope": True, "index_kpool_compress": True, "index_kpool_always_select_tail": True}
NAMES = {
    "attn_hc.": "hc_attn_",
    "ffn_hc.": "hc_ffn_",
    **{f"self_attn.{own}": f"self_attn.forget_gate.{own}" for own in ("f_a_proj.", "f_b_proj.", "dt_bias", "A_log")},
}
"""What files call tensors of a layer: published ones the first, those that transformers 5 writes the others."""
OF = "linear_attn_config"


def glm5_next(keys: Keys) -> Model:
    """Describe a model of type ``glm5_next_text``."""
    keys = keys.filled(DEFAULTS)
    for key, value in ONLY.items():
        keys.only(key, value)
    shape, sizes = read_latent_sizes(keys, 1e-5, turns=False)
    sizes = replace(sizes, neighbours=False, epsilon=shape.epsilon)
    streams = read_streams(keys, shape, 2.0, mixed=True)
    limit = keys.number("swiglu_limit")
    mixture = corrected_experts(keys, shape, layers_with_experts(keys), (limit, limit), (limit, limit))
    attends = _attending(keys, shape.layers)
    indexer = _indexer(keys, attends)
    of = keys.inner(OF)
    count = of.size("num_heads", keys.size("linear_num_heads", 64))
    size = of.size("head_dim", keys.size("linear_head_dim", 128, most=WIDEST_HEAD), most=WIDEST_HEAD)
    heads = RecurrentHeads(count, count, size, size)
    reach = of.size("short_conv_kernel_size", keys.size("linear_conv_kernel_dim", 4, least=2), least=2)
    floor = _floor(keys, of)

    def end(writer: Writer, x: Value) -> Value:
        return writer.read_streams(
            f"layers.{shape.layers - 1}.head.read", x, (1 / streams.count,) * streams.count, shape.residual
        )

    def layer(number: int) -> Layer:
        def mix(writer: Writer, x: Value) -> Value:
            if attends[number]:
                return latent_attention(writer, shape, sizes, number, x, rope=None, indexer=indexer)
            return kimi_delta_attention(writer, shape, number, x, heads, reach, floor)

        return streamed_layer(shape, streams, number, mix, lambda writer, x: mixture(writer, number, x), end)

    ignored, context = further(shape, keys.size(NEXTN, 1, least=0)), keys.size("max_position_embeddings")
    return also_spelled(model("glm5_next", shape, layer, {}, context, ignored=ignored), {}, NAMES)


def _indexer(keys: Keys, attends: list[bool]) -> Indexer:
    """The indexers of the layers that attend, each of which has one."""
    keys = keys.filled({"indexer_types": indexer_types(keys)})
    indexer, pool = read_indexer(keys, 0), keys.size("index_kpool")
    if not {number for number, own in enumerate(attends) if own} <= {*indexer.own}:
        raise keys.refusal("indexer_types", f"{OWN} for each layer that attends")
    if indexer.count % pool:
        raise keys.refusal("index_topk", f"a multiple of index_kpool = {pool}")
    return replace(indexer, pool=pool)


def _attending(keys: Keys, layers: int) -> list[bool]:
    """Which layers attend; the others have a recurrent state."""
    kinds = keys.get("layer_types")
    if isinstance(kinds, list):
        keys.values["layer_types"] = [FULL if kind in INDEXED else kind for kind in kinds]
    return attending_layers(keys, layers, [FULL if number % 4 == 3 else LINEAR for number in range(layers)])


def _floor(keys: Keys, of: Keys) -> float:
    """The logarithm of what is left of a state's row at least; 0: there is no floor."""
    key = "linear_lower_bound"
    bound = of.get("gate_lower_bound") if of.says("gate_lower_bound") else keys.get(key) if keys.says(key) else -5.0
    if bound is None:
        return -5.0 if of.values and of.flag("safe_gate", True) else 0.0
    if not isinstance(bound, int | float) or isinstance(bound, bool) or not -100 < bound < 0:
        raise keys.refusal(key, "a negative number, more than -100, here or as gate_lower_bound in linear_attn_config")
    return float(bound)
