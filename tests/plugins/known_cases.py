"""Which golden cases engine tensorrt refuses, and for what; engine cuda computes all of them."""

from __future__ import annotations

from collections.abc import Mapping

from tests.models.cases import Case, golden_cases

_TABLES = "motley.CachedAttention with 2 rotary tables"

REFUSED: Mapping[str, str] = {
    "afmoe": f"Sigmoid, .*TopK, .*motley.Experts, {_TABLES}",
    "apertus": "motley.Xielu",
    "arcee": "Relu",
    "axk1": "motley.HeadProducts, .*motley.CachedAttentionToKeys",
    "bailing-hybrid": "motley.GatedDelta",
    "cohere": "LayerNormalization",
    "cohere2": f"LayerNormalization, .*{_TABLES}",
    "cohere2-moe": f"LayerNormalization, .*motley.Experts, .*{_TABLES}",
    "deepseek-v2": "motley.HeadProducts, .*motley.CachedAttentionToKeys",
    "deepseek-v3": "motley.HeadProducts, .*motley.CachedAttentionToKeys",
    "deepseek-v32": "motley.HeadProducts, .*motley.CachedAttentionToKeys",
    "dots1": "Sigmoid, .*TopK, .*motley.Experts",
    "ernie4-5-moe": "Softmax, Add of a constant, TopK, GatherElements, ReduceSum, Div, motley.Experts",
    "exaone-moe": _TABLES,
    "exaone4": _TABLES,
    "flex-olmo": "motley.DistCollective of rows that are not as wide as the residual, .*Sqrt",
    "falcon-h1": "motley.StateSpace",
    "gemma": "Gelu",
    "gemma2": "motley.CachedAttention with soft_cap=2.0, Gelu, .*Tanh",
    "gemma3": f"Gelu, .*{_TABLES}",
    "gemma3-softcaps": f"Gelu, .*Tanh, {_TABLES}",
    "gemma3-with-vision": f"Gelu, .*{_TABLES}",
    "gemma4": f"RMSNormalization without a gain, .*Gelu, .*Tanh, {_TABLES}",
    "gemma4-experts": f"RMSNormalization without a gain, .*Gelu, .*motley.Experts.*, Tanh, {_TABLES}",
    "gemma4-unified": f"RMSNormalization without a gain, .*Gelu, .*Tanh, {_TABLES}",
    "gemma4-given-rows": f"RMSNormalization without a gain, .*Gelu, .*Tanh, {_TABLES}",
    "glm-moe-dsa": "motley.HeadProducts, .*motley.CachedAttentionToKeys",
    "glm": "motley.CachedAttention with rotary_dim=8 of head_dim=16",
    "glm4": "motley.CachedAttention with rotary_dim=8 of head_dim=16",
    "glm4-moe": "motley.CachedAttention with rotary_dim=8 of head_dim=16",
    "glm4-moe-lite": "motley.HeadProducts, .*motley.CachedAttentionToKeys",
    "glm4-moe-qk-norm": "motley.CachedAttention with rotary_dim=16 of head_dim=32",
    "gpt-oss": "motley.CachedAttentionWithSinks, TopK, .*motley.Experts",
    "gpt-oss-mxfp4": "motley.CachedAttentionWithSinks, TopK, .*motley.Experts",
    "glm5-next": "motley.StreamGatesToMix, motley.ReadStreams, .*motley.GatedDelta, motley.WriteStreams",
    "granite": "Mul without a Swish",
    "granite-swa": "Mul without a Swish, motley.CachedAttentionWithSinks",
    "granitemoe": "Mul without a Swish, TopK, .*motley.Experts",
    "granitemoe-swa": "Mul without a Swish, motley.CachedAttentionWithSinks",
    "granitemoeshared": "Mul without a Swish, TopK, .*motley.Experts",
    "granitemoehybrid": "motley.StateSpace",
    "granitemoehybrid-dense": "motley.StateSpace",
    "hunyuan-dense": "RMSNormalization without a gain, motley.CachedAttentionWithGains",
    "hunyuan-moe": "RMSNormalization without a gain, motley.CachedAttentionWithGains",
    "hy-v3": "Sigmoid, Add of a constant, TopK, GatherElements, ReduceSum, Div, Mul without a Swish, motley.Experts",
    "hy-v4": "motley.StreamGatesToWrite, motley.ReadStreams, .*motley.CachedAttentionToKeysWithSinks",
    "hy-v4-with-vision": "motley.StreamGatesToWrite, motley.ReadStreams, .*motley.CachedAttentionToKeysWithSinks",
    "hyperclovax": "Mul without a Swish",
    "jais2": "LayerNormalization, .*Relu",
    "kimi-linear": "motley.GatedDelta",
    "laguna": f"Softplus, .*motley.Experts, {_TABLES}",
    "laguna-gates-of-elements": "motley.CachedAttention with rotary_dim=8 of head_dim=16, Softplus",
    "lfm2": "motley.ShortConvolution",
    "lfm2-moe": "motley.ShortConvolution",
    "lfm3": "motley.ShortConvolution",
    "llama4": "RMSNorm.* without a gain, motley.CachedAttentionInChunks, .*motley.CachedAttentionWarmed",
    "mellum": f"TopK, .*motley.Experts, {_TABLES}",
    "mimo-v2-flash": f"Slice, Concat with axis=2, .*motley.Experts, {_TABLES}",
    "minicpm3": "motley.HeadProducts, .*motley.CachedAttentionToKeys",
    "minimax-m2": "motley.DistCollective of rows that are not .*rotary_dim=8 of head_dim=16",
    "minimax-m3": "motley.CachedAttention with rotary_dim=8 of head_dim=16",
    "ministral3": "motley.CachedAttentionWarmed",
    "mistral4": "motley.HeadProducts, .*motley.CachedAttentionWarmed",
    "mixtral": "TopK, .*motley.Experts",
    "mixtral-fused-window": "TopK, .*motley.Experts",
    "nanochat": "RMSNormalization without a gain, .*Relu",
    "nemotron": "LayerNormalization, .*Relu",
    "nemotron-h": "motley.StateSpace",
    "nemotron-h-latent": "motley.StateSpace",
    "olmo-hybrid": "motley.GatedDelta",
    "olmo2": "motley.DistCollective of rows that are not as wide as the residual, .*Sqrt",
    "olmo2-mha": "motley.DistCollective of rows that are not as wide as the residual, .*Sqrt",
    "olmo3": "motley.DistCollective of rows that are not as wide as the residual, .*Sqrt",
    "olmoe": "motley.DistCollective of rows that are not as wide as the residual, .*Sqrt",
    "olmoe-clipped-normalised": "motley.DistCollective of rows that are .*Clip",
    "phi3-longrope": "motley.CachedAttention with rotary_dim=12 of head_dim=16",
    "phi3-longrope-short": "motley.CachedAttention with rotary_dim=12 of head_dim=16",
    "phimoe": "LayerNormalization, .*motley.SparseMixer, .*motley.Experts",
    "qwen2-moe": "Sigmoid, .*TopK, .*motley.Experts",
    "qwen3-5": "motley.GatedDelta",
    "qwen3-5-moe": "motley.GatedDelta",
    "qwen3-5-with-vision": "motley.GatedDelta",
    "qwen3-moe": "TopK, .*motley.Experts",
    "qwen3-moe-not-normalised": "TopK, .*motley.Experts",
    "qwen3-next": "motley.GatedDelta",
    "sarvam-moe": "Sigmoid, .*TopK, .*motley.Experts",
    "solar-open": "Sigmoid, .*TopK, .*motley.Experts",
    "smollm3": _TABLES,
    "step3p7": f"Concat with axis=2, .*rotary_dim=8 of head_dim=16, .*motley.Experts, {_TABLES}",
    "vaultgemma": "motley.CachedAttention with soft_cap=2.0, Gelu, .*Tanh",
    "stablelm": "LayerNormalization, .*motley.CachedAttention with rotary_dim=4 of head_dim=16",
    "starcoder2": "LayerNormalization, .*Gelu",
    "youtu": "motley.HeadProducts, .*motley.CachedAttentionToKeys",
    "smollm3-biases-some-windows": _TABLES,
}
"""A pattern of what a refusal names, by the case's name."""


def known_cases() -> list[Case]:
    """Those that are computed by both of these engines."""
    return [case for case in golden_cases() if case.folder.name not in REFUSED]


def refused_cases() -> list[Case]:
    """The others."""
    return [case for case in golden_cases() if case.folder.name in REFUSED]
