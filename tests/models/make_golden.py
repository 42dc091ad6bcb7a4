"""Makes the golden files: tiny random models of every family with what transformers computes for them.

Run with torch, transformers and accelerate installed: ``python -m tests.models.make_golden``, with names to make these
cases only. A case is a model folder
(config.json, model.safetensors) with ``expected.npz``: ``tokens`` i64[P + 16] (a prompt of P tokens and its greedy
continuation), ``prompt`` (P) and ``logits`` f32[P + 15, V] of all rows but the last. A case of a long prompt has
``tokens`` i64[T], of which ``prompt`` are the prompt, ``rows`` i64[R] and the ``logits`` f32[R, V] of these.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, DynamicCache
from transformers.integrations.mxfp4 import FP4_VALUES

from tests.models.causal import AutoModelForCausalLM
from tests.models.golden_configs import CASES, LONG_BASE, LONG_CASES, PROMPT, settings_of

GOLDEN = Path(__file__).parent / "golden"
LONG = Path(__file__).parent / "long"
CONTINUATION = 16
CLEAR = 1e-3
"""How far the greedy token must be ahead, so that no rounding can change the text."""

BORDERS = (4096, 8192, 32768)
CHUNK = 250


def long_logits(folder: Path, steps: list[list[int]], rows: list[int]) -> npt.NDArray[np.float32]:
    """f32[R, V]: like `transformers_logits` for some rows, in forward passes of so many tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    cache = DynamicCache(config=model.config)
    logits = []
    with torch.inference_mode():
        done = 0
        for step in steps:
            chunk = model(torch.tensor([step]), past_key_values=cache, use_cache=True).logits[0].to(torch.float32)
            logits += [chunk[row - done].numpy() for row in rows if done <= row < done + len(step)]
            done += len(step)
    return np.stack(logits)


def _make_long(name: str, prompt: int, after: int, changes: dict[str, Any], seed: int) -> None:
    folder = LONG / name
    folder.mkdir(parents=True)
    settings = {**LONG_BASE, **changes}
    _write_model(folder, settings, seed)
    tokens = np.random.default_rng(seed).integers(0, settings["vocab_size"], prompt + after).tolist()
    steps = [tokens[start : min(prompt, start + CHUNK)] for start in range(0, prompt, CHUNK)]
    steps += [[token] for token in tokens[prompt:]]
    around = {border + offset for border in BORDERS for offset in (-1, 0, 1)}
    rows = sorted(row for row in {0, *around, prompt - 2, prompt - 1, len(tokens) - 1} if row < len(tokens))
    logits = long_logits(folder, steps, rows)
    saved = {"tokens": np.array(tokens, np.uint8), "prompt": prompt, "rows": rows, "logits": logits}
    np.savez_compressed(folder / "expected.npz", **saved)
    print(json.dumps({"case": name, "largest_logit": float(np.abs(logits).max())}))


def transformers_logits(folder: Path, tokens: list[int]) -> npt.NDArray[np.float32]:
    """f32[T, V]: what transformers computes for a model, in float64 wherever its code does not force float32."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.inference_mode():
        logits: npt.NDArray[np.float32] = model(torch.tensor([tokens])).logits[0].to(torch.float32).numpy()
    return logits


def _write_model(folder: Path, settings: dict[str, Any], seed: int) -> None:
    known = {key: deepcopy(value) for key, value in settings.items() if key != "quantization_config"}
    config = AutoConfig.for_model(**known)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for index, (name, value) in enumerate(model.named_parameters()):
        noise = torch.randn(value.shape, generator=generator)
        if (drawn := _drawn_for_family(settings["model_type"], name, noise)) is not None:
            pass
        elif name.endswith(("e_score_correction_bias", "expert_bias")):
            drawn = 0.3 * noise
        elif name.endswith(("A_log", "dt_bias", ".D")):
            drawn = noise
        elif "norm" in name and "norm.mlp." not in name:
            drawn = 1 + 0.2 * noise
        elif value.ndim == 1:
            drawn = 0.3 * noise
        elif "embed" in name:
            drawn = 0.5 * noise if getattr(config, "tie_word_embeddings", False) else noise
        else:
            drawn = 1.5 * noise / value.shape[-1] ** 0.5
        weights[name] = drawn.to((torch.float16, torch.bfloat16, torch.float32)[0 if index % 5 else index // 5 % 3])
    for name, value in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")) and settings["model_type"] != "axk1":
            weights[name] = 0.3 * torch.randn(value.shape, generator=generator)
        if name.endswith(("act_fn.beta", "act_fn.eps")):
            weights[name] = value
        if name.endswith("layer_scalar"):
            weights[name] = 1 + 0.3 * torch.randn(value.shape, generator=generator)
    if "architectures" in settings:
        (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    else:
        config.save_pretrained(folder)
    if "fused" not in folder.name:
        weights = dict(_published(settings["model_type"], weights))
    if "quantization_config" in settings:
        weights = dict(_in_mxfp4(weights))
    if settings.get("num_nextn_predict_layers"):
        weights.update(_of_another_layer(settings, generator))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _drawn_for_family(family: str, name: str, noise: torch.Tensor) -> torch.Tensor | None:
    """A tensor of a family that needs other magnitudes than most, for its text to be lively; None: as with most."""
    if family == "gemma3n_text":
        if name.endswith("model.norm.weight"):  # of any sign, or the text would repeat the last token for ever
            return noise
        if name.endswith("correct_output_scale"):
            return 1 + 0.3 * noise
        if name.endswith("modality_router.weight"):  # its inputs are divided by their number
            return noise.shape[-1] ** 0.5 * noise
        return 0.3 * noise if "embed_tokens" in name else None  # the embedding is multiplied by 9, and is the head
    if family in ("gemma", "vaultgemma") or family.startswith(("gemma2", "gemma3")):
        if name.endswith("model.norm.weight"):  # of any sign, or the text would repeat the last token for ever
            return noise - 1
        if "norm" in name:  # what is drawn is a norm's distance from 1; queries and keys get longer
            return 0.2 * noise + ("q_norm" in name or "k_norm" in name)
        return 0.3 * noise if "embed_tokens" in name else None  # the embedding is multiplied by 9, and is the head
    if family in ("gemma4_text", "gemma4_unified_text"):
        if name.endswith(("router.scale", "per_expert_scale")):
            return 1 + 0.5 * noise
        if name.endswith("model.norm.weight"):  # of any sign, or the text would repeat the last token for ever
            return noise
        return 0.3 * noise if "embed_tokens" in name else None  # the embedding is multiplied by 9, and is the head
    if family in ("jais2", "nemotron", "phimoe", "stablelm", "starcoder2") and name.endswith("norm.bias"):
        return 0.3 * noise
    if family in ("minimax_m3_vl_text", "nemotron", "step3p7") and "norm" in name:  # a norm's distance from 1
        return 0.2 * noise
    if family.startswith(("qwen3_next", "qwen3_5", "qwen4_exp")):
        if name.endswith(("A_log", "dt_bias")):
            return noise
        if "norm" in name and "linear_attn" not in name:  # a norm's distance from 1
            return 0.2 * noise
    if family in ("mimo_v2_flash", "granite_swa", "granitemoe_swa", "hy_v4", "hy_v4_vl") and name.endswith("sinks"):
        return noise
    if re.search(r"\.\w*hc\w*\.(hc_)?scale$", name):
        return 1 + 0.3 * noise
    if name.endswith(("alpha_p", "alpha_n")):
        return 0.5 * noise - 0.5
    if family == "gpt_oss":
        if name.endswith("sinks"):
            return noise
        if name.endswith("_bias"):
            return 0.3 * noise
        if name.endswith("gate_up_proj"):  # [E, in, out]; some gates and ups are beyond the limit of 7
            return 4 * noise / noise.shape[-2] ** 0.5
        if name.endswith("down_proj"):
            return 0.3 * noise / noise.shape[-2] ** 0.5
    return None


def _of_another_layer(settings: dict[str, Any], generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the layer after the last, which predicts the token after the next and is of no use to us."""
    hidden = settings["hidden_size"]
    shapes = {"eh_proj": (hidden, 2 * hidden), "self_attn.o_proj": (hidden, hidden)}
    shapes |= dict.fromkeys(["enorm", "hnorm", "shared_head.norm", "input_layernorm"], (hidden,))
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator).to(torch.bfloat16)
        yield f"model.layers.{settings['num_hidden_layers']}.{name}.weight", drawn


def _in_mxfp4(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts' matrices in blocks of 32 along their inputs, which share a scale (OCP Microscaling Formats 1.0, MXFP4).

    Yields:
        ``name_blocks`` u8[E, out, in / 32, 16], two neighbours a byte, the first in its low half; ``name_scales``
        u8[E, out, in / 32], the exponent of two plus 127.
    """
    codes = torch.tensor(FP4_VALUES)
    for name, value in weights.items():
        if value.ndim < 3:
            yield name, value
            continue
        blocks = value.float().transpose(1, 2).unflatten(-1, (-1, 32))
        exponents = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
        scaled = blocks / torch.exp2(exponents)[..., None]
        nearest = (scaled[..., None] - codes).abs().argmin(-1)
        nearest += 8 * ((nearest == 0) & (scaled < 0))  # a negative zero
        yield f"{name}_blocks", (nearest[..., ::2] + 16 * nearest[..., 1::2]).to(torch.uint8)
        yield f"{name}_scales", (exponents + 127).to(torch.uint8)


_GRANITE = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}
"""What published checkpoints call tensors."""
_HY_V3 = {
    ".mlp.gate.weight": ".mlp.router.gate.weight",
    ".mlp.e_score_correction_bias": ".mlp.expert_bias",
    ".shared_experts.": ".shared_mlp.",
}
"""The same of Hy3."""
_LING = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.": ".attention.",
    ".block_sparse_moe.": ".mlp.",
    ".mlp.gate.e_score_correction_bias": ".mlp.gate.expert_bias",
}
"""The same of Ling 3, beside what is apart."""
_HY_V4 = {
    ".attn_hc.": ".hc_attn_layer.hc_pre.hc_",
    ".ffn_hc.": ".hc_mlp_layer.hc_pre.hc_",
    ".hc_head.hc_": ".hc_head.hc_head_",
    ".self_attn.sinks": ".self_attn.learnable_sink_param",
    ".self_attn.gate_proj.": ".self_attn.linear_gate.",
}
"""The same of Hy4."""
_GLM5_NEXT = {".attn_hc.": ".hc_attn_", ".ffn_hc.": ".hc_ffn_", ".forget_gate.": "."}
"""The same of GLM-5.3 Flash."""
_LAGUNA = {
    ".mlp.gate.e_score_correction_bias": ".mlp.experts.e_score_correction_bias",
    ".mlp.shared_experts.": ".mlp.shared_expert.",
}
"""The same of Laguna."""
_SARVAM = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".mlp.gate.e_score_correction_bias": ".mlp.gate.expert_bias",
    ".self_attn.": ".attention.",
}
"""The same of Sarvam 30B, whose queries, keys and values lie in one matrix."""


def _fused_heads(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights with queries, keys and values of each layer in one tensor, ``query_key_value``."""
    found: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        whole = re.sub(r"\.[qkv]_proj\.", ".query_key_value.", name)
        found[whole] = torch.cat([found[whole], value.to(found[whole].dtype)]) if whole in found else value
    return found


_STEP = {
    "model.language_model.": "model.",
    ".mlp.gate.e_score_correction_bias": ".moe.router_bias",
    ".mlp.gate.": ".moe.gate.",
    ".mlp.shared_experts.": ".share_expert.",
    ".mlp.experts.down_proj": ".moe.down_proj.weight",
}
"""The same of Step 3.7."""


def _of_step(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The text part of Step 3.7: experts' matrices of a layer in three tensors."""
    for name, value in weights.items():
        if not name.startswith(("model.language_model.", "lm_head.")):
            continue
        for today, published in _STEP.items():
            name = name.replace(today, published)
        if name.endswith(".mlp.experts.gate_up_proj"):
            for part, matrices in zip(("gate", "up"), value.chunk(2, dim=1), strict=True):
                yield name.replace("mlp.experts.gate_up_proj", f"moe.{part}_proj.weight"), matrices.contiguous()
        else:
            yield name, value


def _published(family: str, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights as published checkpoints have them: each expert's matrices apart, but where they are not."""
    if family in (
        "gpt_oss",
        "gemma4_text",
        "llama4_text",
        "minimax_m3_vl_text",
        "granitemoe_swa",
        "mistral4",
        "longcat_flash",
    ):
        yield from weights.items()
        return
    if family == "gemma3":
        for name, value in weights.items():
            plain = name.removeprefix("model.")
            yield plain.replace("language_model.", "language_model.model.", 1), value
        return
    weights = {name.replace(".mlp.gate.moe_statics.", ".mlp.moe_statics."): value for name, value in weights.items()}
    if family == "mimo_v2_flash":
        weights = {name.replace(".sinks", ".attention_sink_bias"): value for name, value in weights.items()}
    if family in ("qwen3_5", "qwen4_exp"):
        for name, value in weights.items():
            yield name.replace("model.", "model.language_model.", 1), value
        yield "model.visual.merger.norm.weight", torch.ones(16)
        yield "mtp.fc.weight", torch.ones(4, 8)
        return
    if family == "step3p7":
        yield from _of_step(weights)
        return
    if family == "qwen4_exp_text":
        weights = dict(_in_shards(weights, "ngram_embedding.weight", 3))
    if family == "sarvam_moe":
        for today, published in _SARVAM.items():
            weights = {name.replace(today, published): value for name, value in weights.items()}
        weights = _fused_heads(weights)
    if family == "hy_v3":
        for name, value in weights.items():
            for today, published in _HY_V3.items():
                name = name.replace(today, published)
            yield name, value
        return
    if family in ("hy_v4", "hy_v4_vl"):
        for name, value in weights.items():
            if name.startswith("model.vision_tower."):
                continue
            name = name.replace("model.language_model.", "model.")
            for today, published in _HY_V4.items():
                name = name.replace(today, published)
            yield name, value
        return
    if family == "glm5_next":
        weights = {name: value for name, value in _filters_apart(weights) if not name.startswith("model.visual.")}
        for today, published in _GLM5_NEXT.items():
            weights = {name.replace(today, published): value for name, value in weights.items()}
    if family in ("muse_glimmer", "cohere_compass"):
        unread = "model.vision_", "model.visual."
        weights = {name: value for name, value in weights.items() if not name.startswith(unread)}
    if family == "lfm3":
        weights = {name.replace(".g_proj.", ".gate_proj."): value for name, value in weights.items()}
    if family in ("olmo_hybrid", "kimi_linear", "bailing_hybrid"):
        weights = dict(_apart(weights))
    if family == "bailing_hybrid":
        for today, published in _LING.items():
            weights = {name.replace(today, published): value for name, value in weights.items()}
    if family == "axk1":
        weights = {name.replace(".mlp.post_mlp", ".post_mlp"): value for name, value in weights.items()}
    if family == "laguna":
        for today, published in _LAGUNA.items():
            weights = {name.replace(today, published): value for name, value in weights.items()}
    called = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    if family in ("granitemoe", "granitemoeshared", "granitemoehybrid"):
        for name, value in weights.items():
            for today, published in _GRANITE.items():
                name = name.replace(today, published)
            yield name, value
        return
    if family == "nemotron_h":
        weights = {name.replace("model.", "backbone.", 1): value for name, value in weights.items()}
    if family == "phimoe":
        weights = {name.replace(".router.", ".gate."): value for name, value in weights.items()}
    if family in ("mixtral", "minimax_m2", "lfm2_moe", "phimoe", "kimi_linear"):
        called = {"gate": "w1", "up": "w3", "down": "w2"}
    if family in ("mixtral", "minimax_m2", "lfm2_moe", "phimoe"):
        weights = {name.replace(".mlp.", ".block_sparse_moe."): value for name, value in weights.items()}
    for name, value in weights.items():
        if value.ndim != 3 or "conv" in name:
            yield name, value
            continue
        module, _, fused = name.rpartition(".")
        parts = {"gate_up_proj": ("gate", "up"), "up_proj": ("up",)}.get(fused, ("down",))
        for number, expert in enumerate(value):
            for part, matrix in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{module}.{number}.{called[part]}.weight", matrix.contiguous()


def _in_shards(weights: dict[str, torch.Tensor], ending: str, count: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights with some of them cut in so many tensors, one below the other."""
    for name, value in weights.items():
        if not name.endswith(ending):
            yield name, value
            continue
        for number, own in enumerate(value.chunk(count)):
            yield f"{name.removesuffix('weight')}shard_{number}.weight", own.contiguous()


_NORMS = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
"""What those of OLMo Hybrid call norms of layers that do not attend."""


def _filters_apart(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights with the filters of queries, keys and values apart."""
    for name, value in weights.items():
        if not name.endswith(".conv1d.weight"):
            yield name, value
            continue
        module = name.removesuffix("conv1d.weight")
        keys = len(weights[f"{module}q_proj.weight"])
        for letter, own in zip("qkv", value.split([keys, keys, len(value) - 2 * keys]), strict=True):
            yield f"{module}{letter}_conv1d.weight", own.contiguous()


def _apart(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights with filters apart, and modules called as they were published."""
    for name, value in _filters_apart(weights):
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        if f"{layer}.linear_attn.A_log" in weights and norm in _NORMS:
            yield f"{layer}.{_NORMS[norm]}.weight", value
        else:
            published = re.sub(r"\.mlp\.(?=gate\.|experts\.|shared_experts\.)", ".block_sparse_moe.", name)
            yield published.replace(".forget_gate.", "."), value


def _continue(folder: Path, vocabulary: int, seed: int) -> tuple[list[int], npt.NDArray[np.float32]] | None:
    tokens = np.random.default_rng(seed).integers(0, vocabulary, PROMPT).tolist()
    for _ in range(CONTINUATION):
        logits = transformers_logits(folder, tokens)
        second, first = np.sort(logits[-1])[-2:]
        if first - second < CLEAR:
            return None
        tokens.append(int(logits[-1].argmax()))
    return tokens, logits


def main() -> None:
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or [*LONG_CASES, *CASES]
    for number, (name, (prompt, after, changes)) in enumerate(LONG_CASES.items()):
        if name in wanted:
            shutil.rmtree(LONG / name, ignore_errors=True)
            _make_long(name, prompt, after, changes, seed=100 + number)
    for number, (name, changes) in enumerate(CASES.items()):
        if name not in wanted:
            continue
        folder = GOLDEN / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        settings = settings_of(changes)
        _write_model(folder, settings, seed=number)
        text = settings.get("text_config", settings)
        vocabulary = text.get("output_vocab_size", text["vocab_size"])
        found = next(filter(None, (_continue(folder, vocabulary, seed) for seed in range(100))))
        tokens, logits = found
        np.savez_compressed(folder / "expected.npz", tokens=tokens, prompt=PROMPT, logits=logits)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(json.dumps({"case": name, "bytes": size, "largest_logit": float(np.abs(logits).max())}))


if __name__ == "__main__":
    main()
