"""Families of models, one file each: from a model's keys to its description."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from motley.daemon.models.description.model import Model
from motley.daemon.models.families.deepseek_v3 import deepseek_v3
from motley.daemon.models.families.deepseek_v32 import deepseek_v32, glm_moe_dsa
from motley.daemon.models.families.ernie4_5 import ernie4_5, ernie4_5_moe
from motley.daemon.models.families.exaone4 import exaone4
from motley.daemon.models.families.exaone_moe import exaone_moe
from motley.daemon.models.families.gemma2 import gemma2
from motley.daemon.models.families.gemma3 import gemma3
from motley.daemon.models.families.gemma4 import gemma4
from motley.daemon.models.families.glm4 import glm4
from motley.daemon.models.families.glm4_moe import glm4_moe, solar_open
from motley.daemon.models.families.glm4_moe_lite import glm4_moe_lite
from motley.daemon.models.families.gpt_oss import gpt_oss
from motley.daemon.models.families.granite import granite
from motley.daemon.models.families.granitemoehybrid import granitemoehybrid
from motley.daemon.models.families.hunyuan import hunyuan_v1_dense, hunyuan_v1_moe
from motley.daemon.models.families.hy_v3 import hy_v3
from motley.daemon.models.families.lfm2 import lfm2, lfm2_moe
from motley.daemon.models.families.llama import llama
from motley.daemon.models.families.llama4 import llama4
from motley.daemon.models.families.minimax_m2 import minimax_m2
from motley.daemon.models.families.ministral3 import ministral3
from motley.daemon.models.families.mistral import mistral
from motley.daemon.models.families.mixtral import mixtral
from motley.daemon.models.families.nemotron_h import nemotron_h
from motley.daemon.models.families.olmo2 import olmo2
from motley.daemon.models.families.olmo3 import olmo3
from motley.daemon.models.families.olmoe import olmoe
from motley.daemon.models.families.phi3 import phi3
from motley.daemon.models.families.qwen2 import qwen2
from motley.daemon.models.families.qwen2_moe import qwen2_moe
from motley.daemon.models.families.qwen3 import qwen3
from motley.daemon.models.families.qwen3_5 import qwen3_5, qwen3_5_moe
from motley.daemon.models.families.qwen3_moe import qwen3_moe, qwen3_vl_moe
from motley.daemon.models.families.qwen3_next import qwen3_next
from motley.daemon.models.families.seed_oss import seed_oss
from motley.daemon.models.families.smollm3 import smollm3
from motley.daemon.models.keys import Keys

FAMILIES: Mapping[str, Callable[[Keys], Model]] = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v32,
    "ernie4_5": ernie4_5,
    "ernie4_5_moe": ernie4_5_moe,
    "exaone4": exaone4,
    "exaone_moe": exaone_moe,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma4_text": gemma4,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": glm4_moe_lite,
    "glm4v_moe_text": glm4_moe,
    "glm4v_text": glm4,
    "glm_moe_dsa": glm_moe_dsa,
    "gpt_oss": gpt_oss,
    "granite": granite,
    "hunyuan_v1_dense": hunyuan_v1_dense,
    "hunyuan_v1_moe": hunyuan_v1_moe,
    "granitemoehybrid": granitemoehybrid,
    "hy_v3": hy_v3,
    "kimi_k2": deepseek_v3,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "llama": llama,
    "llama4_text": llama4,
    "minimax_m2": minimax_m2,
    "ministral3": ministral3,
    "mistral": mistral,
    "mixtral": mixtral,
    "nemotron_h": nemotron_h,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "olmoe": olmoe,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2_5_vl_text": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_5_text": qwen3_5,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "qwen3_vl_moe_text": qwen3_vl_moe,
    "qwen3_vl_text": qwen3,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
    "solar_open": solar_open,
}
"""What describes a model, by the ``model_type`` of its config. Each raises `ConfigError`."""

TEXT_PARTS: Mapping[str, tuple[str, ...]] = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "glm46v": ("glm4v_text", "glm4v_moe_text"),
    "glm4v": ("glm4v_text",),
    "glm4v_moe": ("glm4v_moe_text",),
    "kimi_k25": ("deepseek_v3", "kimi_k2"),
    "lfm2_vl": ("lfm2",),
    "llama4": ("llama4_text",),
    "mistral3": ("mistral", "ministral3"),
    "qwen2_5_vl": ("qwen2_5_vl_text",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen3_vl": ("qwen3_vl_text",),
    "qwen3_vl_moe": ("qwen3_vl_moe_text",),
}
"""Models of more than text whose text part (``text_config``) is of a family: what its ``model_type`` may be, first what
it is where that is silent."""
