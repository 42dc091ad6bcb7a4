"""Qwen4-Exp's text model: Qwen3.5's gated DeltaNets and gated attention with experts, between residual streams.

Blocks read the streams by gates for each element (`motley.daemon.models.blocks.residuals.gated_streams`). Rows of
layers that attend see blocks of positions that an indexer chooses by the means of their keys, and what follows the last
whole one. Some layers are given rows of large tables by hashes of the last tokens (`...blocks.residuals.ngrams`).
"""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.indexer import MeansIndexer
from motley.daemon.models.blocks.experts import SharedExpert, expert_count, experts
from motley.daemon.models.blocks.layer_kinds import FULL
from motley.daemon.models.blocks.layers import model
from motley.daemon.models.blocks.recurrent.delta_net import DEFAULTS as DELTA_NET_DEFAULTS
from motley.daemon.models.blocks.recurrent.delta_net import attending_by_interval, delta_net, read_heads
from motley.daemon.models.blocks.recurrent.gated_delta import REACH
from motley.daemon.models.blocks.residuals.gated_streams import GatedStreams
from motley.daemon.models.blocks.residuals.ngrams import read_ngrams
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.axes import Value
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import TEXT_EOS, Keys
from motley.daemon.models.rope_keys import read_rope

DEFAULTS = {
    **DELTA_NET_DEFAULTS,
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
"""What transformers takes where a config is silent."""
INDEXED = "indexed_attention"


def qwen4_exp(keys: Keys) -> Model:
    """Describe a model of type ``qwen4_exp_text``."""
    keys = keys.filled(DEFAULTS)
    shape = read_shape(keys, norm_offset=1.0)
    rope, context = read_rope(keys, shape.heads.size, partial=1.0)
    kinds = keys.get("layer_types")
    if isinstance(kinds, list):
        keys.values["layer_types"] = [FULL if kind == INDEXED else kind for kind in kinds]
    attends = attending_by_interval(keys, shape.layers)
    keys.only("attn_output_gate", True)
    bias, heads, reach = keys.flag("attention_bias", False), read_heads(keys), keys.size(REACH)
    squashed = keys.one_of("output_gate_type", ["silu", "sigmoid"], "silu") == "sigmoid"
    indexer, streams = _indexer(keys, rope.size), GatedStreams(keys, shape)
    ends = keys.tokens(TEXT_EOS) or keys.tokens("eos_token_id")
    ngrams = read_ngrams(keys, shape, streams, ends[0] if ends else None)
    given = ngrams.layers if ngrams else ()
    if any(attends[number] for number in given):
        raise keys.refusal("ple_layer_ids", "only layers with linear_attention, counted from 1")
    count, columns = expert_count(keys), keys.size("moe_intermediate_size")
    shared = SharedExpert(keys.size("shared_expert_intermediate_size"))
    routing = Routing(keys.size("num_experts_per_tok"), normalised=keys.flag("norm_topk_prob", True))

    def layer(number: int) -> Layer:
        def mix(writer: Writer, x: Value) -> Value:
            if not attends[number]:
                return delta_net(writer, shape, number, x, heads, reach, squashed)
            chosen = indexer.choose(writer, shape, number, x, "main")
            return attention(
                writer, shape, number, x, qkv_bias=bias, output_bias=bias, qk_norm=True, gated=True, chosen=chosen
            )

        def feed(writer: Writer, x: Value) -> Value:
            return experts(writer, shape, number, x, count, columns, routing, shared=shared)

        if ngrams is None or number not in given:
            return streams.layer(number, mix, feed)
        own = streams.layer(number, mix, feed, lambda writer, x: ngrams.take_in(writer, number, x))
        return replace(own, given=ngrams.given(number))

    ignored, hashed = (ngrams.told, ngrams.tables) if ngrams else ((), ())
    made = model("qwen4_exp", shape, layer, {"main": rope}, context, last_norm="", ignored=ignored)
    return replace(made, hashed=hashed)


def _indexer(keys: Keys, turned: int) -> MeansIndexer:
    """The indexers of a model of which so many elements of each head are rotated."""
    keys.only("indexer_kv_heads", 1)
    keys.size("indexer_kv_heads")
    heads, size = keys.size("indexer_n_heads"), keys.size("indexer_head_dim", least=turned)
    block, count = keys.size("indexer_compress_ratio", least=2), keys.size("indexer_budget")
    if count % block:
        raise keys.refusal("indexer_budget", f"a multiple of indexer_compress_ratio = {block}")
    return MeansIndexer(heads, size, count, block)
