"""MiniMax M3's text model: MLPs and experts with gpt-oss' activation, gains of norms that are stored less 1.

In most layers each KV head of a row sees so many blocks of positions as an indexer chooses for it.
"""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.indexer import BlockIndexer
from motley.daemon.models.blocks.experts import SharedExpert, expert_count, experts
from motley.daemon.models.blocks.layer_kinds import FULL, flags_of_layers, layer_kinds
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import MlpNames, fused_names, gated_mlp, mlp_axis, usual_names
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.blocks.spelling import also_spelled
from motley.daemon.models.description.axes import Axis, Kind, Value, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.description.operations.rows import Activation
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.families.experts.mimo_v2_flash import sparse_by_numbers
from motley.daemon.models.families.experts.mixtral import mixtral_names
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope
from motley.daemon.weights.places import Part

INDEXED = "minimax_m3_sparse"
NAMES = {f"self_attn.indexer.{own}": f"self_attn.index_{own}" for own in ("q_proj.", "k_proj.", "q_norm.", "k_norm.")}
"""What published files call tensors of a layer."""
DEFAULTS = {"head_dim": 128, "max_position_embeddings": 524288, "routed_scaling_factor": 2.0}
"""What transformers takes where a config is silent."""
ONLY = {
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "use_gemma_norm": True,
    "use_routing_bias": True,
    "n_shared_experts": 1,
    "attention_output_gate": False,
}
ONLY_SPARSE = {"use_sparse_attention": True, "sparse_score_type": "max", "sparse_init_block": 0}
"""The same of what published configs say of indexers alone."""


def minimax_m3(keys: Keys) -> Model:
    """Describe a model of type ``minimax_m3_vl_text``."""
    keys = keys.filled(DEFAULTS)
    shape = read_shape(keys, norm_offset=1.0)
    keys.only("hidden_act", "silu", "swigluoai")
    for key, value in ONLY.items():
        keys.only(key, value)
    turned = keys.size("rotary_dim", 64, most=shape.heads.size)
    rope, context = read_rope(keys, shape.heads.size, 5e6, turned / shape.heads.size)
    if rope.size != turned:
        raise keys.refusal("rotary_dim", f"only what partial_rotary_factor makes of a head, {rope.size}")
    indexed, indexer = _indexer(keys, shape, turned)
    count, columns = expert_count(keys, "num_local_experts"), keys.size("intermediate_size")
    beside, chosen = keys.size("shared_intermediate_size", 3072), keys.size("num_experts_per_tok")
    plain, sparse = mlp_axis(keys.size("dense_intermediate_size", 12288)), sparse_by_numbers(keys, shape.layers, 0)

    def mixture(writer: Writer, number: int, x: Value) -> Value:
        older = f"model.layers.{number}.block_sparse_moe"
        correction = W(
            f"model.layers.{number}.mlp.gate.e_score_correction_bias",
            Axis(Kind.PLAIN, count, "num_local_experts"),
            parts=(Part(f"{older}.e_score_correction_bias", (count,)),),
        )
        scaling = keys.number("routed_scaling_factor")
        return experts(
            writer,
            shape,
            number,
            x,
            count,
            columns,
            Routing(chosen, scores="sigmoid", normalised=True, scaling=scaling, correction=correction),
            names=mixtral_names(number, shape.hidden, columns),
            router_parts=(Part(f"{older}.gate.weight", (count, shape.hidden)),),
            shared=SharedExpert(beside, gated=False, names=_shared_names(number, shape.hidden, beside)),
            activation=Activation.CLAMPED,
        )

    def layer(number: int) -> Layer:
        names = fused_names(f"model.layers.{number}.mlp", shape.hidden, plain.size)
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(
                writer,
                shape,
                number,
                x,
                qk_norm=True,
                chosen=indexer.choose(writer, shape, number, x, "main") if indexed[number] else None,
            ),
            lambda writer, x: (
                mixture(writer, number, x)
                if sparse[number]
                else gated_mlp(writer, f"layers.{number}.mlp", x, plain, names, Activation.CLAMPED)
            ),
        )

    described = model("minimax_m3", shape, layer, {"main": rope}, context, ignored=["mtp.", "model.mtp."])
    return also_spelled(described, {}, NAMES)


def _indexer(keys: Keys, shape: Shape, turned: int) -> tuple[list[bool], BlockIndexer]:
    """Which layers have an indexer, and what these are like."""
    older = keys.inner("sparse_attention_config")
    listed = flags_of_layers(older, "sparse_attention_freq", shape.layers) or [False] * shape.layers
    told = keys.get("layer_types") or [INDEXED if each else FULL for each in listed]
    kinds = layer_kinds(keys, "layer_types", told, shape.layers, [INDEXED, FULL])
    indexed = [kind == INDEXED for kind in kinds]
    for key, value in ONLY_SPARSE.items():
        older.only(key, value)
    without_values = flags_of_layers(older, "sparse_disable_index_value", shape.layers) or indexed
    if any(own and not without for own, without in zip(indexed, without_values, strict=True)):
        raise older.refusal("sparse_disable_index_value", "1 for each layer that has an indexer")

    def size(key: str, own: str, default: int, least: int = 1, most: int | None = None) -> int:
        return older.size(own, keys.size(key, default, least=least, most=most), least=least, most=most)

    blocks = size("index_topk_blocks", "sparse_topk_blocks", 16)
    indexer = BlockIndexer(
        size=size("index_head_dim", "sparse_index_dim", 128, least=turned),
        blocks=blocks,
        block=size("index_block_size", "sparse_block_size", 128),
        latest=size("index_local_blocks", "sparse_local_block", 1, least=0, most=blocks),
    )
    if any(indexed) and size("index_n_heads", "sparse_num_index_heads", 4) != shape.heads.keys:
        raise keys.refusal("index_n_heads", f"only as many as KV heads, {shape.heads.keys}")
    return indexed, indexer


def _shared_names(number: int, hidden: int, columns: int) -> MlpNames:
    """Files have its gate and up in one matrix, or each apart in another module."""
    module = f"model.layers.{number}.mlp.shared_experts"
    older = module.replace(".mlp.", ".block_sparse_moe.")
    own = {"gate": (columns, hidden), "up": (columns, hidden), "down": (hidden, columns)}
    parts: dict[str, tuple[Part, ...]] = {
        part: (Part(f"{older}.{part}_proj.weight", rows),) for part, rows in own.items()
    }
    fused = fused_names(module, hidden, columns)
    parts["gate"] += fused.gate_parts
    parts["up"] += fused.up_parts
    return usual_names(module, parts=parts)
