"""Time per token of each family of models beside the memory's bound, on models of their shapes that fit this machine.

Each kind of layer is measured at its published widths, in a model with fewer of them
(`motley.bench.random_models.scaling`). Where a family's ratio to the bound is worse than Llama's, something that only
it has takes the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from motley.bench.measurements.speed.latency import LatencyReport, measure_latency
from motley.bench.meshes.local_mesh import MeshSpec
from motley.bench.random_models.scaling import expert_count, scaled
from motley.bench.random_models.writing import temporary_model
from motley.orchestrator.known_models.shapes import SHAPES

PROMPT = 32
"""Tokens before those that are timed."""

REPRESENTATIVES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": SHAPES["llama-3.2-1b"],
        "gemma3": SHAPES["gemma-3-4b"],
        "olmo3": SHAPES["olmo-3-7b"],
        "phi3": SHAPES["phi-3-mini-4k"],
        "gemma4": SHAPES["gemma-4-e2b"],
        "gemma4_moe": SHAPES["gemma-4-26b-a4b"],
        "mixtral": SHAPES["mixtral-8x7b"],
        "qwen3_moe": SHAPES["qwen3-30b-a3b"],
        "gpt_oss": SHAPES["gpt-oss-20b"],
        "glm4_moe": SHAPES["glm-4.5-air"],
        "ernie4_5_moe": SHAPES["ernie-4.5-21b-a3b"],
        "hunyuan_v1_moe": SHAPES["hunyuan-a13b"],
        "minimax_m2": SHAPES["minimax-m2"],
        # Every second layer without a rotary embedding, not every fourth: four layers are too large.
        "llama4": SHAPES["llama-4-scout"] | {"no_rope_layers": [1, 0] * 24},
        "glm4_moe_lite": SHAPES["glm-4.7-flash"],
        "qwen3_5": SHAPES["qwen3.5-9b"],
        "qwen3_next": SHAPES["qwen3-next-80b-a3b"],
        "olmo_hybrid": SHAPES["olmo-hybrid-7b"],
        "kimi_linear": SHAPES["kimi-linear-48b-a3b"],
        "falcon_h1": SHAPES["falcon-h1-0.5b"],
        "nemotron_h": SHAPES["nemotron-3-nano-30b-a3b"],
        "granitemoehybrid": SHAPES["granite-4.0-h-tiny"],
        "lfm2": SHAPES["lfm2-1.2b"],
        "lfm2_moe": SHAPES["lfm2-8b-a1b"],
    }
)
"""A published shape by family: of every kind of layer that there is one."""


@dataclass(frozen=True)
class FamilyRow:
    """One family over so many ranks.

    Attributes:
        layers: of the model that was measured.
        experts: in each of its layers that have any; 0: there are none.
        ms_per_token: the median.
        mb_per_token: what a token reads, MB (1e6 bytes): weights, caches, recurrent states.
        bandwidth_gb_s: of the memory, measured in the same run, GB/s.
        bound_ms: what a token reads at this bandwidth.
        ratio: of the median to the bound.
        compute_ms, wire_ms, wait_ms: means over tokens and ranks.
    """

    family: str
    ranks: int
    layers: int
    experts: int
    ms_per_token: float
    mb_per_token: float
    bandwidth_gb_s: float
    bound_ms: float
    ratio: float
    compute_ms: float
    wire_ms: float
    wait_ms: float


async def measure_family(
    family: str,
    shape: Mapping[str, Any],
    ranks: Sequence[int],
    quantisation: str,
    tokens: int,
    measured: Callable[[], None] = lambda: None,
) -> list[FamilyRow]:
    """Write a model of a shape, made smaller, with random weights, and time greedy tokens over each number of ranks.

    Args:
        shape: as in ``config.json``.
        ranks: of one thread each.
        tokens: that are timed.
        measured: is called after each number of ranks.

    Raises:
        motley.bench.random_models.writing.SynthError: the model cannot be written.
        motley.bench.meshes.local_mesh.MeshError: a rank failed.
        motley.orchestrator.planning.cutting.shares.PlanError: it cannot be cut for so many ranks.
    """
    config = scaled(shape)
    rows = []
    with temporary_model(config, family) as folder:
        for count in ranks:
            spec = MeshSpec(
                model=folder,
                weights=[1.0] * count,
                quantisation=quantisation,
                context=PROMPT + tokens + 8,
                pin=True,
                cache=folder.parent / "shares",
            )
            (report,) = await measure_latency(spec, [PROMPT], tokens, config["vocab_size"])
            rows.append(_row(report, config))
            measured()
    return rows


def _row(report: LatencyReport, config: Mapping[str, Any]) -> FamilyRow:
    return FamilyRow(
        family=report.model,
        ranks=report.ranks,
        layers=config["num_hidden_layers"],
        experts=expert_count(config),
        ms_per_token=report.ms_per_token["p50"],
        mb_per_token=round(report.weights_mb_per_token + report.caches_mb_per_token, 3),
        bandwidth_gb_s=report.bandwidth_gb_s,
        bound_ms=report.bound_ms,
        ratio=report.ratio,
        compute_ms=report.compute_ms,
        wire_ms=report.wire_ms,
        wait_ms=report.wait_ms,
    )
