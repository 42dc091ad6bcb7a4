"""What PEFT computes with adapters of the golden models; needs torch, transformers and peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from motley.plugins.engine import F32
from tests.models.causal import AutoModelForCausalLM

SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"},
    "attention": {"r": 3, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "o_proj"]},
    "pattern": {"r": 2, "lora_alpha": 4, "target_modules": r".*\.layers\.\d+\.(self_attn|mlp)\.[a-z_]*(o|down)_proj"},
    "fused": {"r": 4, "lora_alpha": 5, "target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]},
    "uneven": {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "k_proj", "gate_proj", "up_proj", "down_proj"],
        "exclude_modules": ["layers.0.mlp.up_proj"],
        "rank_pattern": {"k_proj": 2, r"layers\.1\.mlp\.down_proj": 7},
        "alpha_pattern": {"down_proj": 3, "self_attn.q_proj": 10},
    },
    "stacked": {
        "r": 3,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "saved": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "saved embeddings": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved head": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved, tied": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "embeddings": {"r": 3, "lora_alpha": 30, "target_modules": ["q_proj", "embed_tokens"]},
    "embeddings and head": {"r": 3, "lora_alpha": 30, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "embeddings, tied": {
        "r": 3,
        "lora_alpha": 30,
        "target_modules": ["q_proj", "embed_tokens"],
        "ensure_weight_tying": True,
    },
    "some layers": {"r": 2, "lora_alpha": 3, "target_modules": ["gate_proj", "k_proj"], "layers_to_transform": [1]},
}
"""Of adapters, by names of ours."""


def make_adapter(
    model: Path, folder: Path, settings: dict[str, Any], seed: int, dtype: torch.dtype, bases: bool = False
) -> None:
    """Write a random adapter of a model, as PEFT saves one; `bases`: with the tables that matrices are added to."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if ".lora_" in name:
                spread = 0.5 if ".lora_B" in name else value.shape[1] ** -0.5
                value.copy_(spread * torch.randn(value.shape, generator=generator))
                value.data = value.data.to(dtype)
            elif ".modules_to_save." in name:
                value.add_(value.std() * torch.randn(value.shape, generator=generator))
    adapted.save_pretrained(folder, save_embedding_layers=bases)


def peft_logits(model: Path, folder: Path, tokens: list[int]) -> F32:
    """f32[T, V]: what PEFT computes of some tokens, in float64 wherever the model's code does not force float32."""
    base = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    adapted = PeftModel.from_pretrained(base, folder).to(torch.float64)
    with torch.inference_mode():
        logits: F32 = adapted(torch.tensor([tokens])).logits[0].to(torch.float32).numpy()
    return np.ascontiguousarray(logits)
