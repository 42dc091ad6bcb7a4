"""What configs of models with gated DeltaNet layers say, and what they are refused for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from motley.daemon.models.cutting.profile import profile
from motley.daemon.models.cutting.states import reach
from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.axes import Axis, Kind, RecurrentHeads, Value, W
from motley.daemon.models.description.operations.attention import Attend
from motley.daemon.models.description.operations.experts import Experts
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.description.writing import ShardingError, Writer
from motley.daemon.models.files import open_weights
from motley.daemon.models.keys import ConfigError
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.spec import Piece
from motley.plugins.recurrent import StateSpec
from tests.models.cases import golden_case, uneven_shares
from tests.models.configs import EXPERTS, LLAMA, read

SILENT = {key: value for key, value in LLAMA.items() if key not in ("num_attention_heads", "num_key_value_heads")}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 48}
NEXT = SILENT | SHARED | {"model_type": "qwen3_next", "num_hidden_layers": 8}
DENSE = SILENT | {"model_type": "qwen3_5_text", "num_hidden_layers": 8}
MOE = SILENT | SHARED | {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 8}


@pytest.mark.parametrize(("config", "keys"), [(NEXT, 2), (DENSE, 4), (MOE, 2)])
def test_defaults(config: dict[str, Any], keys: int, tmp_path: Path) -> None:
    """Those of transformers: one layer of four attends, with a quarter of its heads rotated."""
    model = read(tmp_path, config)
    attends = [each for each in model.operations if isinstance(each, Attend)]
    deltas = [each for layer in model.layers for each in layer.recurrences]
    assert ([each.layer for each in attends], [each.layer for each in deltas]) == ([3, 7], [0, 1, 2, 4, 5, 6])
    assert {(each.heads.queries, each.heads.keys, each.heads.size) for each in attends} == {(16, keys, 256)}
    assert {(each.heads, reach(each.filters[0])) for each in deltas} == {(RecurrentHeads(16, 32, 128, 128), 4)}
    assert model.ropes == {"main": Rope(1e4, 64)}
    experts = [each for each in model.operations if isinstance(each, Experts)]
    assert len(experts) == (0 if config is DENSE else 8)
    assert all(each.base is not None for each in experts)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (DENSE | {"layer_types": ["linear_attention"] * 8}, "layer_types"),
        (DENSE | {"layer_types": ["full_attention"]}, "layer_types"),
        (DENSE | {"layer_types": ["sliding_attention"] * 8}, "layer_types"),
        (DENSE | {"attn_output_gate": False}, "attn_output_gate"),
        (DENSE | {"linear_num_value_heads": 24}, "linear_num_value_heads"),
        (DENSE | {"hidden_act": "gelu"}, "hidden_act"),
        (DENSE | {"rope_parameters": {"rope_type": "default", "mrope_sections": [1]}}, "mrope_sections"),
        (NEXT | {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ({"model_type": "qwen3_5"}, "text_config"),
    ],
)
def test_what_cannot_be_is_named(config: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=key):
        read(tmp_path, config)


def test_heads_that_cannot_be_cut_alike_are_named(tmp_path: Path) -> None:
    model = read(tmp_path, DENSE | {"num_attention_heads": 6, "num_key_value_heads": 3})
    with pytest.raises(ConfigError, match="layers of 3 KV heads and layers with a recurrent state of 16 key heads"):
        units(model, "fp32", 32)


def test_the_profile_counts_states_by_the_heads_that_a_group_has(tmp_path: Path) -> None:
    told = profile(read(tmp_path, DENSE), "fp32", 32)
    assert (told.kv_groups, told.attention_splits) == (4, [1, 2, 4])
    assert told.state_bytes == 6 * StateSpec(0, 2 * 4 * 128 + 8 * 128, 4, 8, 128, 128, 16).bytes
    assert told.cache_bytes_per_token == 2 * 2 * 4 * 256


def test_shares_take_key_heads_with_all_that_read_them() -> None:
    case = golden_case("qwen3-5")
    cut = units(case.model, "fp32", 32)
    heads = next(each.heads for layer in case.model.layers for each in layer.recurrences)
    for share in uneven_shares(cut, 2):
        own = cut.query_heads(share.attention, share.attention_split, heads.per_key(1))
        values = cut.query_heads(share.attention, share.attention_split, heads.value_axis.heads or heads.per_key(1))
        assert (values.start, values.stop) == (own.start * heads.group, own.stop * heads.group)


def test_parts_of_heads_must_make_them_up() -> None:
    heads, hidden = RecurrentHeads(2, 4, 8, 8), Axis(Kind.HIDDEN, 16, "hidden_size")
    writer = Writer(Value("x", hidden))
    (made,) = writer.linear("made", writer.x, W("w", heads.value_axis, hidden))
    with pytest.raises(ShardingError, match="made is not made of heads with these parts"):
        writer.head_parts("parts", made, ("part", heads.gate_axis))
    with pytest.raises(ShardingError, match="x is replicated, not sharded"):
        writer.head_parts("parts", writer.x, ("part", heads.value_axis))


def test_only_three_dimensions_of_which_one_is_one_are_a_matrix() -> None:
    with open_weights(golden_case("qwen3-5").folder) as files:
        name = "model.layers.0.linear_attn.conv1d.weight"
        assert files.shape(f"{name}[:, 0]") == files.shape(name)[::2]
        rows, columns = map(range, files.shape(f"{name}[:, 0]"))
        assert files.read(Piece(f"{name}[:, 0]", rows, columns)).shape == files.shape(name)[::2]
        for other in ("model.layers.0.linear_attn.A_log[:, 0]", "model.norm.weight[:, 0]", "nothing[:, 0]"):
            with pytest.raises(CheckpointError, match="is absent"):
                files.shape(other)
