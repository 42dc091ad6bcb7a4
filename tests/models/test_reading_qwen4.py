"""Configs of Qwen4-Exp: what they say, what is taken where they are silent, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from motley.daemon.models.cutting.profile import activations, profile
from motley.daemon.models.description.axes import Heads
from motley.daemon.models.description.model import Model, expected_shapes, parameters, tensors
from motley.daemon.models.description.operations.attention import Choose
from motley.daemon.models.description.operations.experts import Route
from motley.daemon.models.description.operations.recurrence import DeltaRule, DilatedConvolution
from motley.daemon.models.description.operations.streams import MatchStreams, ReadStreams, WriteStreams
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.keys import ConfigError
from tests.models.configs import QWEN4, read, without
from tests.models.test_reading import attentions

GIVEN = QWEN4 | {"ple_layer_ids": [3, 1, 3], "ple_embed_dim": 64}
TABLE = "model.layers.0.ple.ple_embedding.ngram_embedding"


def operations(model: Model, kind: type) -> list[Any]:
    return [each for each in model.operations if isinstance(each, kind)]


def test_blocks_read_streams_and_the_head_has_no_norm(tmp_path: Path) -> None:
    model = read(tmp_path, QWEN4 | {"hc_count": 3})
    assert [layer.x.axis.size for layer in model.layers] == [64, *[3 * 64] * 3]
    assert (model.layers[-1].y.axis.size, model.further_streams, model.whole) == (64, 2, False)
    assert [type(each).__name__ for each in model.head] == ["Linear"]
    assert model.last_norm is None
    assert "model.norm.weight" not in expected_shapes(model)
    assert len(operations(model, WriteStreams)) == 8
    assert {each.gates for each in operations(model, ReadStreams)} == {(1 / 3,) * 3}
    shapes = expected_shapes(model)
    assert shapes["model.hyper_connection_mixer.input_mix_weight_up.weight"] == (192, 16)
    assert shapes["model.layers.1.mlp_hyper_connection.block_inject_weight.weight"] == (3, 192)
    assert shapes["model.layers.1.attn_hyper_connection.hc_norm.weight"] == (192,)
    assert not operations(model, MatchStreams)


def test_gates_of_all_streams_count_as_activations(tmp_path: Path) -> None:
    four, eight = (activations(read(tmp_path, QWEN4 | {"hc_count": count})) for count in (4, 8))
    assert eight > 1.8 * four


def test_layers_that_attend_choose_blocks_by_means(tmp_path: Path) -> None:
    model = read(tmp_path, QWEN4)
    assert [layer.attention is not None for layer in model.layers] == [False, False, False, True]
    (choose,), (attend,) = operations(model, Choose), attentions(model)
    assert (choose.heads, choose.block, choose.weights, choose.rope) == (Heads(4, 1, 16), 4, None, "main")
    assert choose.y.axis.size == 2 * 35, "as many for each KV head: 8 blocks, and 3 positions behind them"
    assert (attend.choices, attend.chosen) == (35, choose.y)
    assert choose.means.offset == 1.0
    assert model.ropes == {"main": Rope(10000.0, 16)}
    named = QWEN4 | {"layer_types": ["indexed_attention", "full_attention", "linear_attention", "linear_attention"]}
    assert [layer.attention is not None for layer in read(tmp_path, named).layers] == [True, True, False, False]
    often = read(tmp_path, QWEN4 | {"full_attention_interval": 2})
    assert [layer.attention is not None for layer in often.layers] == [False, True, False, True]


def test_what_is_taken_where_a_config_is_silent(tmp_path: Path) -> None:
    silent = {key: QWEN4[key] for key in QWEN4 if key.startswith(("indexer", "model_type"))}
    model = read(tmp_path, silent | {"indexer_head_dim": 256, "ple_layer_ids": [2], "eos_token_id": 7})
    assert (model.hidden, model.vocabulary, len(model.layers), model.context) == (2048, 248320, 40, 32768)
    (rows,) = model.hashed
    assert rows.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert rows.sizes[:4] == (20000003, 20000023, 20000033, 20000047)
    assert (len(rows.sizes), len(rows.parts), rows.width, rows.end) == (16, 512, 2048, 7)
    whole = sum(part.out.size for part in rows.parts)
    assert whole % 128 == 0 <= whole - sum(rows.sizes) < 128
    assert parameters(model) > 41e9
    assert profile(model, "int4", 32).trunk_fixed_bytes < 1 << 30, "the tables are in nobody's memory"
    assert {each.squashed for each in operations(model, DeltaRule)} == {False}
    route = operations(model, Route)[0].routing
    assert (route.chosen, route.normalised) == (10, True)


def test_layers_are_given_rows_of_tables_of_their_own(tmp_path: Path) -> None:
    model = read(
        tmp_path, GIVEN | {"seed": 0, "vocab_size": 101, "ngram_size": 4, "heads_per_ngram": 1, "ple_embed_dim": 60}
    )
    assert [layer.given is not None for layer in model.layers] == [True, False, True, False]
    assert [rows.sizes for rows in model.hashed] == [(41, 43, 47), (53, 59, 61)]
    assert model.hashed[1].multipliers == (
        75635246596624655,
        449811099135215,
        58511316802557195,
        70866619451242293,
    )
    assert (model.recent, model.whole) == (3, False)
    tables = [rows.parts for rows in model.hashed]
    assert [rows.layer for rows in model.hashed] == [0, 2]
    assert model.tables_of(range(1)) == (model.embedding, *tables[0])
    assert [model.tables_of(range(*own)) for own in ((1, 2), (1, 4))] == [(), tables[1]]
    assert model.tables == (model.embedding, *tables[0], *tables[1])
    assert [rows.parts[0].shape[1] for rows in model.hashed] == [20, 20]
    assert [(each.layer, each.dilation, each.filter.shape) for each in operations(model, DilatedConvolution)] == [
        (4, 4, (256, 4)),
        (6, 4, (256, 4)),
    ]
    assert [len(layer.recurrences) for layer in model.layers] == [2, 1, 2, 0]


def test_tables_are_cut_in_parts_as_files_have_them(tmp_path: Path) -> None:
    rows = read(tmp_path, GIVEN | {"split_ngram_parts": 3, "make_ngram_vocab_size_divisible_by": 5}).hashed[0]
    assert [part.out.size for part in rows.parts] == [part.out.size for part in rows.parts[:1]] * 2 + [
        sum(rows.sizes) + -sum(rows.sizes) % 5 - 2 * rows.parts[0].out.size
    ]
    assert [part.name for part in rows.parts] == [f"{TABLE}.shard_{number}.weight" for number in range(3)]
    (place,) = rows.parts[2].parts
    assert (place.tensor, place.start) == (f"{TABLE}.weight", 2 * rows.parts[0].out.size)
    many = read(tmp_path, GIVEN | {"split_ngram_parts": 30_000}).hashed[0]
    assert {part.out.size for part in many.parts} == {1}


def test_what_ends_a_text_is_what_the_text_part_says(tmp_path: Path) -> None:
    """Of several tokens the first; whatever stands beside the text part is for whoever stops."""
    assert read(tmp_path, GIVEN | {"eos_token_id": [5, 2]}).hashed[0].end == 5
    text = {"model_type": "qwen4_exp", "text_config": GIVEN | {"eos_token_id": [5, 2]}, "vision_config": {}}
    for whole, eos in ((text, (5, 2)), (text | {"eos_token_id": 9}, (9,))):
        model = read(tmp_path, whole)
        assert (model.hashed[0].end, model.eos) == (5, eos)
    silent = read(tmp_path, text | {"text_config": without(GIVEN, "eos_token_id"), "eos_token_id": 9})
    assert silent.hashed[0].end == 9


def test_it_is_the_text_of_a_model_that_sees(tmp_path: Path) -> None:
    whole = read(
        tmp_path, {"model_type": "qwen4_exp", "text_config": without(GIVEN, "model_type"), "vision_config": {}}
    )
    assert replace(whole, prefixes=()) == read(tmp_path, GIVEN)
    places = {part.tensor for tensor in tensors(whole) for part in tensor.parts}
    assert "model.language_model.layers.0.ple.ple_embedding.ngram_embedding.shard_0.weight" in places
    assert "model.language_model.hyper_connection_mixer.hc_norm.weight" in places


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        *[({key: None}, key) for key in QWEN4 if key.startswith("indexer")],
        ({"indexer_kv_heads": 2}, "indexer_kv_heads"),
        ({"indexer_budget": 30}, "indexer_budget"),
        ({"indexer_head_dim": 8}, "indexer_head_dim"),
        ({"indexer_compress_ratio": 1}, "indexer_compress_ratio"),
        ({"hc_count": 1}, "hc_count"),
        ({"hc_count": 9}, "hc_count"),
        ({"output_gate_type": "gelu"}, "output_gate_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ({"ple_layer_ids": [0]}, "ple_layer_ids"),
        ({"ple_layer_ids": [5]}, "ple_layer_ids"),
        ({"ple_layer_ids": 1}, "ple_layer_ids"),
        ({"ple_layer_ids": [4]}, "ple_layer_ids"),
        ({"ple_layer_ids": [1], "ple_embed_dim": 60}, "ple_embed_dim"),
        ({"ple_layer_ids": [1], "ngram_size": 1}, "ngram_size"),
        ({"ple_layer_ids": [1], "eos_token_id": None}, "eos_token_id"),
        ({"ple_layer_ids": [1], "split_ngram_parts": 0}, "split_ngram_parts"),
        ({"ple_layer_ids": [1, 2], "split_ngram_parts": 1 << 16}, "split_ngram_parts"),
        ({"ple_layer_ids": [1], "heads_per_ngram": 4096, "ple_embed_dim": 8192}, "heads_per_ngram"),
        ({"ple_layer_ids": [1], "ngram_vocab_size_base": 1 << 60}, "ngram_vocab_size_base"),
        ({"ple_layer_ids": [1], "make_ngram_vocab_size_divisible_by": 1 << 60}, "make_ngram_vocab_size_divisible_by"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        read(tmp_path, QWEN4 | changes)
