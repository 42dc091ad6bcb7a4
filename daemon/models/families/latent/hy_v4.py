"""Hy4: residual streams that blocks read and write to, gated latent attention with sinks, and experts with limits.

Each row sees so many positions as an indexer chooses, which several layers share.

Elements that turn together are half a head apart, as transformers has it for the text model alone. Other runtimes turn
neighbours there too, which ``rope_interleave`` in a config asks for; nothing here was compared with published weights.
"""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.attending.indexer import FULL, SHARED, read_indexer
from motley.daemon.models.blocks.attending.latent import EPSILON, latent_attention, read_latent
from motley.daemon.models.blocks.attending.windows import INDEXED
from motley.daemon.models.blocks.layer_kinds import layers_with_experts
from motley.daemon.models.blocks.layers import model
from motley.daemon.models.blocks.residuals.streams import read_streams, stream_gates, streamed_layer
from motley.daemon.models.blocks.spelling import also_spelled
from motley.daemon.models.description.axes import Value
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.families.experts.glm4_moe import corrected_experts
from motley.daemon.models.keys import Keys

DEFAULTS = {
    "max_position_embeddings": 262144,
    "index_n_heads": 16,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "routed_scaling_factor": 2.827,
    "swiglu_limit": 10.0,
    "rope_interleave": False,
}
"""What transformers takes where a config is silent."""
WITH_VISION = {"moe_intermediate_size": 2048, "index_n_heads": 32, "rope_interleave": True}
"""The same of the text of a model that sees, where that is another."""
NAMES = {
    "attn_hc.": "hc_attn_layer.hc_pre.hc_",
    "ffn_hc.": "hc_mlp_layer.hc_pre.hc_",
    "self_attn.sinks": "self_attn.learnable_sink_param",
    "self_attn.gate_proj.": "self_attn.linear_gate.",
}
"""What published files call tensors of a layer."""
HEAD = {"model.hc_head.hc_": "model.hc_head.hc_head_"}
"""The same of those behind the layers."""


def hy_v4(keys: Keys) -> Model:
    """Describe a model of type ``hy_v4``."""
    return _described(keys, EPSILON)


def hy_v4_vl(keys: Keys) -> Model:
    """Describe a model of type ``hy_v4_vl_text``: norms of latent rows have the epsilon of others, and elements that
    turn together are neighbours."""
    keys = keys.filled(WITH_VISION)
    return _described(keys, keys.number("rms_norm_eps", 1e-5))


def _described(keys: Keys, epsilon: float) -> Model:
    """A model of Hy4's layers, and the epsilon of its norms of latent rows."""
    keys = keys.filled(DEFAULTS)
    kinds = keys.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or not {*map(str, kinds)} <= {*INDEXED}):
        raise keys.refusal("layer_types", f"only {' or '.join(INDEXED)} for each layer")
    keys.only("gating_type", "elementwise")
    shape, sizes, rope, context = read_latent(keys, 1e-5)
    sizes = replace(sizes, epsilon=epsilon)
    layers = range(shape.layers)
    keys = keys.filled({"indexer_types": [FULL if layer in (0, 1) or layer % 4 == 1 else SHARED for layer in layers]})
    indexer = read_indexer(keys, sizes.turned)
    indexer = replace(indexer, turned_last=True, neighbours=sizes.neighbours, epsilon=shape.epsilon)
    streams = read_streams(keys, shape, keys.number("hc_magnitude", 2.0), mixed=False, least=True)
    limit = keys.number("swiglu_limit")
    mixture = corrected_experts(keys, shape, layers_with_experts(keys), limits=(limit, limit))

    def end(writer: Writer, x: Value) -> Value:
        at = f"layers.{shape.layers - 1}.head"
        gates = stream_gates(writer, shape, streams, at, x, "model.hc_head", 1, "hc_")
        return writer.read_streams(f"{at}.read", x, gates, shape.residual)

    def layer(number: int) -> Layer:
        return streamed_layer(
            shape,
            streams,
            number,
            lambda writer, x: latent_attention(
                writer, shape, sizes, number, x, gate="gate_proj", gate_of_elements=True, sinks=True, indexer=indexer
            ),
            lambda writer, x: mixture(writer, number, x),
            end,
        )

    described = model("hy_v4", shape, layer, {"main": rope}, context, ignored=["model.mtp_layers."])
    return also_spelled(described, HEAD, NAMES)
