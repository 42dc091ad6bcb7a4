"""Families of models, one file each: from a model's keys to its description.

Rooms tell what their layers have: ``dense`` ones an MLP, ``experts`` a mixture instead in at least one size, ``latent``
ones attention to latent keys as well, ``recurrent`` ones a state or a convolution in the place of most attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from motley.daemon.models.description.model import Model
from motley.daemon.models.families.dense.apertus import apertus, apertus1p5
from motley.daemon.models.families.dense.arcee import arcee
from motley.daemon.models.families.dense.cohere import cohere, cohere2
from motley.daemon.models.families.dense.cohere_compass import cohere_compass
from motley.daemon.models.families.dense.exaone import exaone
from motley.daemon.models.families.dense.exaone4 import exaone4
from motley.daemon.models.families.dense.gemma import gemma
from motley.daemon.models.families.dense.gemma2 import gemma2, vaultgemma
from motley.daemon.models.families.dense.gemma3 import gemma3
from motley.daemon.models.families.dense.gemma3n import gemma3n
from motley.daemon.models.families.dense.glm4 import glm, glm4
from motley.daemon.models.families.dense.granite import granite, granite_swa, hyperclovax
from motley.daemon.models.families.dense.helium import helium
from motley.daemon.models.families.dense.jais2 import jais2
from motley.daemon.models.families.dense.llama import internlm3, iquestcoder, llama
from motley.daemon.models.families.dense.ministral3 import ministral3
from motley.daemon.models.families.dense.mistral import cwm, ministral, mistral
from motley.daemon.models.families.dense.muse_glimmer import muse_glimmer
from motley.daemon.models.families.dense.nanochat import nanochat
from motley.daemon.models.families.dense.nemotron import nemotron
from motley.daemon.models.families.dense.olmo2 import olmo2
from motley.daemon.models.families.dense.olmo3 import olmo3
from motley.daemon.models.families.dense.phi3 import phi3
from motley.daemon.models.families.dense.qwen2 import qwen2
from motley.daemon.models.families.dense.qwen3 import qwen3
from motley.daemon.models.families.dense.seed_oss import seed_oss
from motley.daemon.models.families.dense.smollm3 import smollm3
from motley.daemon.models.families.dense.stablelm import stablelm
from motley.daemon.models.families.dense.starcoder2 import starcoder2
from motley.daemon.models.families.experts.afmoe import afmoe
from motley.daemon.models.families.experts.cohere2_moe import cohere2_moe
from motley.daemon.models.families.experts.dots1 import dots1
from motley.daemon.models.families.experts.ernie4_5 import ernie4_5, ernie4_5_moe
from motley.daemon.models.families.experts.exaone_moe import exaone_moe
from motley.daemon.models.families.experts.flint import flint
from motley.daemon.models.families.experts.gemma4 import gemma4, gemma4_unified
from motley.daemon.models.families.experts.glm4_moe import glm4_moe, glm4_moe_ahead, solar_open
from motley.daemon.models.families.experts.gpt_oss import gpt_oss
from motley.daemon.models.families.experts.granitemoe import granitemoe, granitemoe_swa, granitemoeshared
from motley.daemon.models.families.experts.hunyuan import hunyuan_v1_dense, hunyuan_v1_moe, hunyuan_vl
from motley.daemon.models.families.experts.hy_v3 import hy_v3
from motley.daemon.models.families.experts.kolibri1 import kolibri1
from motley.daemon.models.families.experts.laguna import laguna
from motley.daemon.models.families.experts.llama4 import llama4
from motley.daemon.models.families.experts.mellum import mellum
from motley.daemon.models.families.experts.mimo_v2_flash import mimo_v2_flash
from motley.daemon.models.families.experts.minimax_m2 import minimax_m2
from motley.daemon.models.families.experts.minimax_m3 import minimax_m3
from motley.daemon.models.families.experts.mixtral import mixtral
from motley.daemon.models.families.experts.olmoe import flex_olmo, olmoe
from motley.daemon.models.families.experts.phimoe import phimoe
from motley.daemon.models.families.experts.qwen2_moe import qwen2_moe
from motley.daemon.models.families.experts.qwen3_moe import qwen3_moe, qwen3_omni_moe, qwen3_vl_moe
from motley.daemon.models.families.experts.sarvam_moe import sarvam_moe
from motley.daemon.models.families.experts.step3p5 import step3p5
from motley.daemon.models.families.latent.axk1 import axk1
from motley.daemon.models.families.latent.axk2 import axk2
from motley.daemon.models.families.latent.deepseek_v2 import deepseek_v2
from motley.daemon.models.families.latent.deepseek_v3 import deepseek_v3, deepseek_v3_ahead
from motley.daemon.models.families.latent.deepseek_v32 import deepseek_v32, glm_moe_dsa
from motley.daemon.models.families.latent.glm4_moe_lite import glm4_moe_lite, glm4_moe_lite_ahead
from motley.daemon.models.families.latent.hy_v4 import hy_v4, hy_v4_vl
from motley.daemon.models.families.latent.longcat_flash import longcat_flash
from motley.daemon.models.families.latent.minicpm3 import minicpm3
from motley.daemon.models.families.latent.mistral4 import mistral4
from motley.daemon.models.families.latent.sarvam_mla import sarvam_mla
from motley.daemon.models.families.latent.youtu import youtu
from motley.daemon.models.families.recurrent.bailing_hybrid import bailing_hybrid
from motley.daemon.models.families.recurrent.falcon_h1 import falcon_h1
from motley.daemon.models.families.recurrent.glm5_next import glm5_next
from motley.daemon.models.families.recurrent.granitemoehybrid import granitemoehybrid
from motley.daemon.models.families.recurrent.kimi_linear import kimi_linear
from motley.daemon.models.families.recurrent.lfm2 import lfm2, lfm2_moe
from motley.daemon.models.families.recurrent.lfm3 import lfm3
from motley.daemon.models.families.recurrent.nemotron_h import nemotron_h
from motley.daemon.models.families.recurrent.olmo_hybrid import olmo_hybrid
from motley.daemon.models.families.recurrent.qwen3_5 import qwen3_5, qwen3_5_ahead, qwen3_5_moe, qwen3_5_moe_ahead
from motley.daemon.models.families.recurrent.qwen3_next import qwen3_next, qwen3_next_ahead
from motley.daemon.models.families.recurrent.qwen4_exp import qwen4_exp
from motley.daemon.models.keys import Keys

FAMILIES: Mapping[str, Callable[[Keys], Model]] = {
    "afmoe": afmoe,
    "apertus": apertus,
    "apertus1p5_text": apertus1p5,
    "arcee": arcee,
    "axk1": axk1,
    "axk2": axk2,
    "bailing_hybrid": bailing_hybrid,
    "cohere": cohere,
    "cohere2": cohere2,
    "cohere2_moe": cohere2_moe,
    "cohere_compass_text": cohere_compass,
    "cwm": cwm,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v32,
    "dots1": dots1,
    "ernie4_5": ernie4_5,
    "ernie4_5_moe": ernie4_5_moe,
    "exaone": exaone,
    "exaone4": exaone4,
    "exaone_moe": exaone_moe,
    "flex_olmo": flex_olmo,
    "falcon_h1": falcon_h1,
    "flint": flint,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma3n_text": gemma3n,
    "gemma4_text": gemma4,
    "gemma4_unified_text": gemma4_unified,
    "glm": glm,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": glm4_moe_lite,
    "glm4v_moe_text": glm4_moe,
    "glm4v_text": glm4,
    "glm5_next_text": glm5_next,
    "glm_moe_dsa": glm_moe_dsa,
    "gpt_oss": gpt_oss,
    "granite": granite,
    "granite4_vision_text": granite,
    "granite_swa": granite_swa,
    "granitemoe": granitemoe,
    "granitemoe_swa": granitemoe_swa,
    "granitemoeshared": granitemoeshared,
    "helium": helium,
    "hunyuan_v1_dense": hunyuan_v1_dense,
    "hunyuan_v1_moe": hunyuan_v1_moe,
    "hunyuan_vl_text": hunyuan_vl,
    "granitemoehybrid": granitemoehybrid,
    "hy_v3": hy_v3,
    "hy_v4": hy_v4,
    "hy_v4_vl_text": hy_v4_vl,
    "hyperclovax": hyperclovax,
    "internlm3": internlm3,
    "iquestcoder": iquestcoder,
    "jais2": jais2,
    "kimi_k2": deepseek_v3,
    "kimi_linear": kimi_linear,
    "kolibri1": kolibri1,
    "laguna": laguna,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "lfm3": lfm3,
    "llama": llama,
    "llama4_text": llama4,
    "longcat_flash": longcat_flash,
    "mellum": mellum,
    "mimo_v2_flash": mimo_v2_flash,
    "minicpm3": minicpm3,
    "minimax_m2": minimax_m2,
    "minimax_m3_vl_text": minimax_m3,
    "ministral": ministral,
    "ministral3": ministral3,
    "mistral": mistral,
    "mistral4": mistral4,
    "mixtral": mixtral,
    "muse_glimmer_text": muse_glimmer,
    "nanochat": nanochat,
    "nemotron": nemotron,
    "nemotron_h": nemotron_h,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "olmo_hybrid": olmo_hybrid,
    "olmoe": olmoe,
    "phi3": phi3,
    "phimoe": phimoe,
    "qwen2": qwen2,
    "qwen2_5_omni_text": qwen2,
    "qwen2_5_vl_text": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen2_vl_text": qwen2,
    "qwen3": qwen3,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_5_text": qwen3_5,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "qwen3_omni_moe_text": qwen3_omni_moe,
    "qwen3_vl_moe_text": qwen3_vl_moe,
    "qwen3_vl_text": qwen3,
    "qwen4_exp_text": qwen4_exp,
    "sarvam_mla": sarvam_mla,
    "sarvam_moe": sarvam_moe,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
    "solar_open": solar_open,
    "step3p5": step3p5,
    "vaultgemma": vaultgemma,
    "stablelm": stablelm,
    "starcoder2": starcoder2,
    "youtu": youtu,
}
"""What describes a model, by the ``model_type`` of its config. Each raises `ConfigError`."""

AHEAD: Mapping[str, Callable[[Keys], Model]] = {
    "deepseek_v3": deepseek_v3_ahead,
    "glm4_moe": glm4_moe_ahead,
    "glm4_moe_lite": glm4_moe_lite_ahead,
    "qwen3_5_moe_text": qwen3_5_moe_ahead,
    "qwen3_5_text": qwen3_5_ahead,
    "qwen3_next": qwen3_next_ahead,
}
"""What describes the head of a model that predicts a token further ahead, by the same. Each raises `ConfigError`."""

TEXT_PARTS: Mapping[str, tuple[str, ...]] = {
    "apertus1p5": ("apertus1p5_text",),
    "aya_vision": ("cohere2",),
    "cohere2_vision": ("cohere2",),
    "cohere_compass": ("cohere_compass_text",),
    "exaone4_5": ("exaone4",),
    "gemma3": ("gemma3_text",),
    "gemma3n": ("gemma3n_text",),
    "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "glm46v": ("glm4v_text", "glm4v_moe_text"),
    "glm4v": ("glm4v_text",),
    "glm4v_moe": ("glm4v_moe_text",),
    "glm5_next": ("glm5_next_text",),
    "glmga": ("glm4v_text", "glm4v_moe_text"),
    "granite4_vision": ("granite4_vision_text", "granite"),
    "granite_speech": ("granite",),
    "granite_speech_plus": ("granite",),
    "hunyuan_vl": ("hunyuan_vl_text",),
    "hy_v4_vl": ("hy_v4_vl_text",),
    "hyperclovax_vision_v2": ("hyperclovax",),
    "idefics2": ("mistral",),
    "idefics3": ("llama",),
    "internvl": ("qwen2", "qwen3", "qwen3_moe", "llama", "gpt_oss"),
    "kimi_k25": ("deepseek_v3", "kimi_k2"),
    "lfm2_vl": ("lfm2",),
    "llama4": ("llama4_text",),
    "llava": ("llama", "mistral", "qwen2"),
    "llava_next": ("llama", "mistral", "qwen2", "granite"),
    "llava_next_video": ("llama", "mistral", "qwen2"),
    "llava_onevision": ("qwen2",),
    "minicpmv4_6": ("qwen3_5_text",),
    "minicpmv4_7": ("qwen3_5_text",),
    "minimax_m3_vl": ("minimax_m3_vl_text",),
    "mistral3": ("mistral", "ministral3", "mistral4"),
    "muse_glimmer": ("muse_glimmer_text",),
    "nemotron_h_omni": ("nemotron_h",),
    "ovis2": ("qwen2",),
    "perception_lm": ("llama",),
    "qwen2_5_omni": ("qwen2_5_omni_thinker",),
    "qwen2_5_omni_thinker": ("qwen2_5_omni_text",),
    "qwen2_5_vl": ("qwen2_5_vl_text",),
    "qwen2_audio": ("qwen2",),
    "qwen2_vl": ("qwen2_vl_text",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen3_omni_moe": ("qwen3_omni_moe_thinker",),
    "qwen3_omni_moe_thinker": ("qwen3_omni_moe_text",),
    "qwen3_vl": ("qwen3_vl_text",),
    "qwen3_vl_moe": ("qwen3_vl_moe_text",),
    "qwen4_exp": ("qwen4_exp_text",),
    "smolvlm": ("llama",),
    "step3p7": ("step3p5",),
    "voxtral": ("llama",),
}
"""Models of more than text whose text part (``text_config`` and the like) is of a family, or is such a model: what its
``model_type`` may be, first what it is where that is silent."""
