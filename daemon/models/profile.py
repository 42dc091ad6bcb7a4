"""What a model costs, in the planner's terms: bytes per unit, from the config alone."""

from __future__ import annotations

from motley.daemon.models.config import ModelConfig
from motley.daemon.models.holding import Formats, told
from motley.daemon.models.tensors import EMBEDDING, HEAD
from motley.daemon.models.units import units
from motley.daemon.weights.spec import Piece, Weight
from motley.plugins.engine import EngineOptions
from motley.protocol import mesh_pb2

RUNTIME_BYTES = 192 << 20
"""An interpreter with the ONNX Runtime engine (75 MiB were seen on Linux), what its allocators keep after loading and
long prompts, and what moving a cache that grows takes for a moment (together 100 MiB at TinyLlama-1.1B's size)."""


def profile(
    config: ModelConfig, quantisation: str, block: int, stored: Formats | None = None, exact: bool = False
) -> mesh_pb2.ModelProfile:
    """Count units and bytes; the caller, who knows the files, adds ``name`` and ``fingerprint``.

    Where units are unequal (in exact mode), every one counts as the largest.

    Args:
        quantisation, block, stored, exact: see `units`.

    Raises:
        ConfigError: as `units`.
    """
    cut = units(config, quantisation, block, stored, exact)
    kv_columns = -(-config.kv_heads // cut.kv_groups) * config.head_dim
    hidden, group_columns = config.hidden, config.group * kv_columns
    mlp_columns = -(-config.intermediate // cut.mlp_columns // cut.mlp) * cut.mlp_columns
    table = EMBEDDING if config.tied else HEAD

    def held(name: str, rows: int, columns: int) -> int:
        # As an engine holds and reads it: ONNX Runtime adds a sum to each block's scale when it packs a weight.
        form = cut.held[name]
        weight = Weight("", (Piece("", range(rows), range(columns)),), form.encoding, form.block, form.zeros)
        return weight.all_bytes + weight.scale_bytes

    query = key_value = mlp_unit = 0
    for layer in range(config.layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        query += held(f"{attention}.q_proj.weight", group_columns, hidden)
        query += held(f"{attention}.o_proj.weight", hidden, group_columns)
        key_value += held(f"{attention}.k_proj.weight", 2 * kv_columns, hidden)
        mlp_unit += held(f"{mlp}.up_proj.weight", 2 * mlp_columns, hidden)
        mlp_unit += held(f"{mlp}.down_proj.weight", hidden, mlp_columns)
    qkv_bias = 4 * config.layers if config.qkv_bias else 0
    mlp_bias = 4 * config.layers if config.mlp_bias else 0
    return mesh_pb2.ModelProfile(
        layers=config.layers,
        kv_groups=cut.kv_groups,
        attention_splits=cut.attention_splits,
        mlp_units=cut.mlp,
        vocabulary_units=cut.vocabulary,
        attention_query_bytes=query + qkv_bias * group_columns,
        attention_kv_bytes=key_value + qkv_bias * 2 * kv_columns,
        mlp_unit_bytes=mlp_unit + mlp_bias * 2 * mlp_columns,
        vocabulary_unit_bytes=held(table, cut.vocabulary_rows, hidden),
        cache_bytes_per_token=4 * config.layers * 2 * kv_columns,
        fixed_bytes=RUNTIME_BYTES + 4 * _vectors(config) + 4 * _activations(config),
        context_length=config.context,
        family=config.family,
        parameters=_parameters(config),
        matrices=told(cut.held, stored or {}),
    )


def _vectors(config: ModelConfig) -> int:
    """Elements of the norms and of the biases that are not cut."""
    per_layer = (2 + config.output_bias + config.mlp_bias) * config.hidden + 2 * config.qk_norm * config.head_dim
    return config.layers * per_layer + config.hidden


def _activations(config: ModelConfig) -> int:
    """Elements of the values that are alive at a time in the widest step, generously: residual and MLP, twice."""
    return EngineOptions().max_rows * 2 * (2 * config.hidden + 3 * config.intermediate)


def _parameters(config: ModelConfig) -> int:
    projections = config.heads + 2 * config.kv_heads
    attention = (projections + config.heads) * config.head_dim * config.hidden
    biases = config.qkv_bias * projections * config.head_dim + config.mlp_bias * 2 * config.intermediate
    tables = (1 if config.tied else 2) * config.vocabulary * config.hidden
    return config.layers * (attention + 3 * config.hidden * config.intermediate + biases) + _vectors(config) + tables
