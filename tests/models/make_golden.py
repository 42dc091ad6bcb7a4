"""Makes the golden files: tiny random models of every family with what transformers computes for them.

Run with torch and transformers installed: ``python tests/models/make_golden.py``, with names to make these cases
only. A case is a model folder
(config.json, model.safetensors) with ``expected.npz``: ``tokens`` i64[P + 16] (a prompt of P tokens and its greedy
continuation), ``prompt`` (P) and ``logits`` f32[P + 15, V] of all rows but the last. A case of a long prompt has
``tokens`` i64[T], of which ``prompt`` are the prompt, ``rows`` i64[R] and the ``logits`` f32[R, V] of these.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

GOLDEN = Path(__file__).parent / "golden"
LONG = Path(__file__).parent / "long"
PROMPT = 40
CONTINUATION = 16
CLEAR = 1e-3
"""How far the greedy token must be ahead, so that no rounding can change the text."""

_BASE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
}
_SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}
_EXPERTS: dict[str, Any] = {
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 2,
}
_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8}
CASES: dict[str, dict[str, Any]] = {
    "llama-mha": {"model_type": "llama"},
    "llama-llama3-rope-tied": {
        "model_type": "llama",
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "rope_parameters": _LLAMA3_ROPE,
        "tie_word_embeddings": True,
        "eos_token_id": [2, 3],
    },
    "llama-biases-odd-sizes": {
        "model_type": "llama",
        "hidden_size": 60,
        "intermediate_size": 44,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 22,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama-mqa": {
        "model_type": "llama",
        "hidden_size": 80,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": None,
        "tie_word_embeddings": True,
    },
    "mistral-window": {
        "model_type": "mistral",
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "sliding_window": 8,
    },
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen2-some-windows": {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
        **_WINDOW,
    },
    "qwen3": {
        "model_type": "qwen3",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-biases-some-windows": {
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        **_WINDOW,
    },
    "llama-linear-rope": {
        "model_type": "llama",
        "max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
        **_SMALL,
    },
    "llama-dynamic-rope": {
        "model_type": "llama",
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
        **_SMALL,
    },
    "qwen2-yarn-rope": {
        "model_type": "qwen2",
        "max_position_embeddings": 32,
        "rope_parameters": _YARN_ROPE,
        **_SMALL,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2, **_EXPERTS},
    "mixtral-fused-window": {
        "model_type": "mixtral",
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        **_EXPERTS,
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": None, **_EXPERTS},
    "olmoe-clipped-normalised": {
        "model_type": "olmoe",
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "pad_token_id": None,
        "norm_topk_prob": True,
        "clip_qkv": 0.75,
        "attention_bias": True,
        **_EXPERTS,
        "num_attention_heads": 6,
        "hidden_size": 96,
    },
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        "num_hidden_layers": 3,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 80,
        "mlp_only_layers": [1],
        **_EXPERTS,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        **_EXPERTS,
        "head_dim": 32,
    },
    "qwen3-moe-not-normalised": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 4,
        **_EXPERTS,
        "head_dim": 32,
    },
}

_LONG: dict[str, Any] = {
    **_BASE,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
LONG_CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "dynamic-rope-150": (
        150,
        10,
        {
            "model_type": "llama",
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
        },
    ),
    "llama3-rope-9000": (
        9000,
        0,
        {
            "model_type": "llama",
            "max_position_embeddings": 16384,
            "rope_parameters": {**_LLAMA3_ROPE, "rope_theta": 10000.0, "original_max_position_embeddings": 8192},
        },
    ),
    "yarn-rope-and-windows-33000": (
        33000,
        0,
        {
            "model_type": "qwen2",
            "max_position_embeddings": 32768,
            "rope_parameters": {**_YARN_ROPE, "rope_theta": 10000.0, "original_max_position_embeddings": 32768},
            "layer_types": ["full_attention", "sliding_attention"],
            "use_sliding_window": True,
            "sliding_window": 4096,
        },
    ),
}
"""By name: a prompt longer than the usual powers of two or than what the model is for without scaling, and tokens
that follow it one by one."""
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
    settings = {**_LONG, **changes}
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
    config = AutoConfig.for_model(**settings)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for index, (name, value) in enumerate(model.named_parameters()):
        noise = torch.randn(value.shape, generator=generator)
        if "norm" in name:
            drawn = 1 + 0.2 * noise
        elif value.ndim == 1:
            drawn = 0.3 * noise
        elif "embed_tokens" in name:
            drawn = noise if not config.tie_word_embeddings else 0.5 * noise
        else:
            drawn = 1.5 * noise / value.shape[-1] ** 0.5
        weights[name] = drawn.to((torch.float16, torch.bfloat16, torch.float32)[0 if index % 5 else index // 5 % 3])
    config.save_pretrained(folder)
    if "fused" not in folder.name:
        weights = dict(_published(settings["model_type"], weights))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _published(family: str, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights as published checkpoints have them: each expert's matrices apart."""
    called = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    if family == "mixtral":
        called = {"gate": "w1", "up": "w3", "down": "w2"}
        weights = {name.replace(".mlp.", ".block_sparse_moe."): value for name, value in weights.items()}
    for name, value in weights.items():
        if value.ndim < 3:
            yield name, value
            continue
        module, _, fused = name.rpartition(".")
        parts = ("gate", "up") if fused == "gate_up_proj" else ("down",)
        for number, expert in enumerate(value):
            for part, matrix in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{module}.{number}.{called[part]}.weight", matrix.contiguous()


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
        settings = {**_BASE, **changes}
        _write_model(folder, settings, seed=number)
        found = next(filter(None, (_continue(folder, settings["vocab_size"], seed) for seed in range(100))))
        tokens, logits = found
        np.savez_compressed(folder / "expected.npz", tokens=tokens, prompt=PROMPT, logits=logits)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(json.dumps({"case": name, "bytes": size, "largest_logit": float(np.abs(logits).max())}))


if __name__ == "__main__":
    main()
