"""Which golden cases the engines on GPUs compute, and what they refuse the others for."""

from __future__ import annotations

from collections.abc import Mapping

from tests.models.cases import Case, golden_cases

_TABLES = "motley.CachedAttention with 2 rotary tables"
_EXPERTS = "TopK, .*motley.Experts"

REFUSED: Mapping[str, str] = {
    "deepseek-v3": f"motley.HeadProducts, .*motley.CachedAttentionToKeys, .*{_EXPERTS}",
    "deepseek-v32": f"motley.HeadProducts, .*motley.CachedAttentionToKeys, .*{_EXPERTS}",
    "ernie4-5-moe": _EXPERTS,
    "exaone4": _TABLES,
    "exaone-moe": f"{_EXPERTS}, .*{_TABLES}",
    "gemma2": "Mul without a Swish, motley.CachedAttention with soft_cap=2.0, Gelu, Tanh",
    "gemma3": f"Mul without a Swish, Gelu, {_TABLES}",
    "gemma3-softcaps": f"Mul without a Swish, Gelu, Tanh, {_TABLES}",
    "gemma3-with-vision": f"Mul without a Swish, Gelu, {_TABLES}",
    "gemma4": f"Mul without a Swish, RMSNormalization without a gain, Gelu, Tanh, {_TABLES}",
    "gemma4-experts": f"Mul without a Swish, RMSNormalization without a gain, Gelu, .*{_EXPERTS}, Tanh, {_TABLES}",
    "gemma4-given-rows": f"Mul without a Swish, RMSNormalization without a gain, .*Gelu, Tanh, {_TABLES}",
    "glm4-moe": f"motley.CachedAttention with rotary_dim=8 of head_dim=16, .*{_EXPERTS}",
    "glm4-moe-qk-norm": f"motley.CachedAttention with rotary_dim=16 of head_dim=32, .*{_EXPERTS}",
    "glm4-moe-lite": f"motley.HeadProducts, .*motley.CachedAttentionToKeys, .*{_EXPERTS}",
    "glm4": "motley.CachedAttention with rotary_dim=8 of head_dim=16",
    "glm-moe-dsa": f"motley.HeadProducts, .*motley.CachedAttentionToKeys, .*{_EXPERTS}",
    "gpt-oss": f"motley.CachedAttentionWithSinks, {_EXPERTS}",
    "gpt-oss-mxfp4": f"motley.CachedAttentionWithSinks, {_EXPERTS}",
    "hy-v3": _EXPERTS,
    "granite": "Mul without a Swish",
    "hunyuan-dense": "RMSNormalization without a gain, motley.CachedAttentionWithGains",
    "hunyuan-moe": f"RMSNormalization without a gain, motley.CachedAttentionWithGains, .*{_EXPERTS}",
    "llama4": f"RMSNorm.* without a gain, motley.CachedAttentionInChunks, .*{_EXPERTS}, motley.CachedAttentionWarmed",
    "granitemoehybrid": f"motley.StateSpace, .*{_EXPERTS}",
    "granitemoehybrid-dense": "motley.StateSpace",
    "lfm2": "motley.ShortConvolution",
    "lfm2-moe": f"motley.ShortConvolution, .*{_EXPERTS}",
    "minimax-m2": "motley.DistCollective of rows that are not .*rotary_dim=8 of head_dim=16, .*TopK, .*motley.Experts",
    "ministral3": "motley.CachedAttentionWarmed",
    "mixtral": _EXPERTS,
    "mixtral-fused-window": _EXPERTS,
    "nemotron-h": f"motley.StateSpace, .*{_EXPERTS}",
    "nemotron-h-latent": f"motley.StateSpace, .*{_EXPERTS}",
    "olmo2": "motley.DistCollective of rows that are not as wide as the residual, .*Sqrt",
    "olmo2-mha": "motley.DistCollective of rows that are not as wide as the residual, .*Sqrt",
    "olmo3": "motley.DistCollective of rows that are not as wide as the residual, .*Sqrt",
    "olmoe": f"motley.DistCollective of rows that are not as wide as the residual, .*Sqrt, .*{_EXPERTS}",
    "olmoe-clipped-normalised": f"motley.DistCollective of rows that are .*Clip, .*{_EXPERTS}",
    "phi3-longrope": "motley.CachedAttention with rotary_dim=12 of head_dim=16",
    "phi3-longrope-short": "motley.CachedAttention with rotary_dim=12 of head_dim=16",
    "qwen2-moe": f"Sigmoid, .*{_EXPERTS}",
    "qwen3-5": "motley.GatedDelta",
    "qwen3-5-moe": f"{_EXPERTS}, motley.GatedDelta",
    "qwen3-5-with-vision": "motley.GatedDelta",
    "qwen3-moe": _EXPERTS,
    "qwen3-moe-not-normalised": _EXPERTS,
    "qwen3-next": f"motley.GatedDelta, .*{_EXPERTS}",
    "smollm3": _TABLES,
    "smollm3-biases-some-windows": _TABLES,
}
"""A pattern of what a refusal names, by the case's name."""


def known_cases() -> list[Case]:
    """Those that are computed."""
    return [case for case in golden_cases() if case.folder.name not in REFUSED]


def refused_cases() -> list[Case]:
    """The others."""
    return [case for case in golden_cases() if case.folder.name in REFUSED]
