"""What a model costs, in the planner's terms: bytes per unit, from the config alone."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from motley.daemon.models.config import ModelConfig
from motley.daemon.models.holding import Formats, told
from motley.daemon.models.tensors import EMBEDDING, HEAD, Inner, Mlp, expected_shapes, mlps
from motley.daemon.models.units import units
from motley.daemon.weights.spec import Piece, Weight
from motley.plugins.engine import EngineOptions
from motley.protocol import mesh_pb2

RUNTIME_BYTES = 192 << 20
"""An interpreter with the ONNX Runtime engine (75 MiB were seen on Linux), what its allocators keep after loading and
long prompts, and what moving a cache that grows takes for a moment (together 100 MiB at TinyLlama-1.1B's size)."""
EXPERT_BYTES = 192 << 10
"""What the ONNX Runtime engine takes for an expert of a layer besides its weights: a session (160 KiB were seen)."""


def profile(
    config: ModelConfig,
    quantisation: str,
    block: int,
    stored: Formats | None = None,
    exact: bool = False,
    beside: Collection[str] = (),
) -> mesh_pb2.ModelProfile:
    """Count units and bytes; the caller, who knows the files, adds ``name`` and ``fingerprint``.

    Where units are unequal (in exact mode, or of MLPs of several widths), every one counts as the largest. All experts
    count, although a token reads a few of them; the fields after ``hidden`` tell them from the rest.

    Args:
        quantisation, block, stored, exact, beside: see `units`.

    Raises:
        ConfigError: as `units`.
    """
    cut = units(config, quantisation, block, stored, exact, beside)
    kv_columns = -(-config.kv_heads // cut.kv_groups) * config.head_dim
    hidden, group_columns, experts = config.hidden, config.group * kv_columns, config.experts
    mlp_columns = {width: -(-width // block // cut.mlp) * block for width, block in cut.mlp_blocks.items()}
    table = EMBEDDING if config.tied else HEAD

    def held(name: str, rows: int, columns: int) -> int:
        form = cut.held[name]
        return Weight("", (Piece("", range(rows), range(columns)),), form.encoding, form.block, form.zeros).all_bytes

    def held_mlp(layer: int, mlp: Mlp, columns: int) -> int:
        at = f"model.layers.{layer}.{mlp.name}"
        matrices = held(f"{at}.up_proj.weight", 2 * columns, hidden) + held(f"{at}.down_proj.weight", hidden, columns)
        return matrices + 4 * config.mlp_bias * 2 * columns

    query = key_value = trunk_mlp_unit = expert_unit = expert = 0
    for layer in range(config.layers):
        attention = f"model.layers.{layer}.self_attn"
        query += held(f"{attention}.q_proj.weight", group_columns, hidden)
        query += held(f"{attention}.o_proj.weight", hidden, group_columns)
        key_value += held(f"{attention}.k_proj.weight", 2 * kv_columns, hidden)
        for mlp in mlps(config, layer):
            unit = held_mlp(layer, mlp, mlp_columns[mlp.columns])
            if mlp.inner is Inner.EXPERT:
                expert_unit += unit
                expert = max(expert, held_mlp(layer, mlp, mlp.columns))
            else:
                trunk_mlp_unit += unit
    qkv_bias = 4 * config.layers if config.qkv_bias else 0
    trunk_fixed = RUNTIME_BYTES + 4 * (_replicated(config) + activations(config))
    return mesh_pb2.ModelProfile(
        layers=config.layers,
        kv_groups=cut.kv_groups,
        attention_splits=cut.attention_splits,
        mlp_units=cut.mlp,
        vocabulary_units=cut.vocabulary,
        attention_query_bytes=query + qkv_bias * group_columns,
        attention_kv_bytes=key_value + qkv_bias * 2 * kv_columns,
        mlp_unit_bytes=trunk_mlp_unit + expert_unit,
        vocabulary_unit_bytes=held(table, cut.vocabulary_rows, hidden),
        cache_bytes_per_token=4 * config.layers * 2 * kv_columns,
        fixed_bytes=trunk_fixed + _sessions(config),
        context_length=config.context,
        family=config.family,
        parameters=_parameters(config),
        matrices=told(cut.held, stored or {}),
        hidden=hidden,
        expert_layers=[layer for layer in range(config.layers) if config.experts_of(layer)],
        expert_count=experts.count if experts else 0,
        experts_per_token=experts.chosen if experts else 0,
        expert_bytes=expert + EXPERT_BYTES if experts else 0,
        expert_weight_bytes=expert,
        trunk_mlp_unit_bytes=trunk_mlp_unit,
        trunk_fixed_bytes=trunk_fixed,
        host_fixed_bytes=RUNTIME_BYTES + 4 * activations(config),
    )


def _sessions(config: ModelConfig) -> int:
    """Bytes that all experts take besides their weights."""
    return EXPERT_BYTES * config.experts.count * sum(config.experts.layers) if config.experts else 0


def _replicated(config: ModelConfig) -> int:
    """Elements of what is not cut: the norms, some biases, the routers."""
    norms = 2 * config.qk_norm * config.head_dim * (config.heads if config.whole_qk_norm else 1)
    per_layer = (2 + config.output_bias + config.mlp_bias) * config.hidden + norms
    return config.layers * per_layer + config.hidden + _routers(config)


def _routers(config: ModelConfig) -> int:
    experts = config.experts
    return sum(experts.layers) * (experts.count + bool(experts.shared)) * config.hidden if experts else 0


def activations(config: ModelConfig) -> int:
    """Elements of the values that are alive at a time in the widest step, generously: residual and MLP, twice."""
    columns = max(mlp.columns for layer in range(config.layers) for mlp in mlps(config, layer))
    return EngineOptions().max_rows * 2 * (2 * config.hidden + 3 * columns)


def _parameters(config: ModelConfig) -> int:
    return sum(prod(shape) for shape in expected_shapes(config).values())
