"""What Hugging Face calls the tensors of GGUF files, and how llama.cpp shapes some of them otherwise.

The experts of a layer lie in one tensor per projection, one after another (in the first files of Mixtrals in a tensor
each): an expert is its bytes of it. As in checkpoints, they are apart here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from motley.daemon.weights.checkpoints.tensor_files import TensorInfo

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAST_NORM = {"token_embd_norm": "model.embedding_norm"}
_NEMOTRON_NORM = {"output_norm": "model.norm_f"}
_FALCON_NORM = {"output_norm": "model.final_layernorm"}
_BESIDE = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_WHOLE_IN = {
    **dict.fromkeys(("gemma3n", "gemma4"), _BESIDE),
    **dict.fromkeys(("lfm2", "lfm2moe"), _LAST_NORM),
    "falcon-h1": _FALCON_NORM,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON_NORM),
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SHARED_EXPERTS = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_CORRECTED = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias", **_SHARED_EXPERTS}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_up_proj",
    "attn_v_b": "self_attn.v_up_proj",
    **_CORRECTED,
}
_INDEXER = {
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
}
_LLAMA4 = {
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "feed_forward.router",
}
_DELTA_NET = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_a": "linear_attn.A_log",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GIVEN_ROWS = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GEMMA3N = {
    **_GEMMA,
    **_GIVEN_ROWS,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_GEMMA4 = {
    **_GEMMA,
    **_GIVEN_ROWS,
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_CONVOLUTIONS = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_MAMBA = {
    "ssm_a": "A_log",
    "ssm_conv1d": "conv1d",
    "ssm_d": "D",
    "ssm_dt.bias": "dt_bias",
    "ssm_in": "in_proj",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
_NEMOTRON = {
    "attn_norm": "norm",
    **{part: f"mixer.{name}" for part, name in _MAMBA.items()},
    **{f"attn_{letter}": f"mixer.{letter}_proj" for letter in "qkv"},
    "attn_output": "mixer.o_proj",
    **{f"ffn_{part}": f"mixer.{part}_proj" for part in ("up", "down")},
    **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_FALCON = {
    **{part: f"mamba.{name}" for part, name in _MAMBA.items()},
    **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight"),
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
}
_KIMI = {
    **_LATENT,
    **{f"ssm_conv1d_{letter}": f"self_attn.{letter}_conv1d" for letter in "qkv"},
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_a": "self_attn.A_log",
    "ssm_beta": "self_attn.b_proj",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
    "ffn_gate_inp": "block_sparse_moe.gate",
    "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
    **{f"ffn_{part}_shexp": f"block_sparse_moe.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
_LING = {
    **_LATENT,
    **{f"ssm_conv1d_{letter}": f"self_attn.{letter}_conv1d" for letter in "qkv"},
    **{part: f"self_attn.{module}_proj" for part, module in (("ssm_f_a", "f"), ("ssm_g_a", "g"), ("attn_gate", "g"))},
    "ssm_a": "self_attn.A_log",
    "ssm_beta": "self_attn.b_proj",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
_SHARED_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "output_linear"}
_GRANITE_MOE = {
    **{f"ffn_{part}_shexp": f"shared_mlp.{name}" for part, name in _SHARED_MLP.items()},
    "ffn_gate_inp": "block_sparse_moe.router.layer",
}
_OF_LAYER_IN = {
    **dict.fromkeys(("deepseek2", "minicpm3", "mistral4"), _LATENT),
    "glm-dsa": _LATENT | _INDEXER,
    **dict.fromkeys(("dots1", "exaone-moe"), _CORRECTED),
    "laguna": {**_CORRECTED, "attn_gate": "self_attn.g_proj"},
    "llama4": _LLAMA4,
    "falcon-h1": _FALCON,
    "kimi-linear": _KIMI,
    "bailingmoe3": _LING,
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _DELTA_NET),
    "ernie4_5-moe": _CORRECTED,
    "minimax-m2": {"exp_probs_b.bias": "mlp.e_score_correction_bias"},
    "exaone4": {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    **dict.fromkeys(("gemma2", "gemma3"), _GEMMA),
    "gemma3n": _GEMMA3N,
    "gemma4": _GEMMA4,
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "granitehybrid": {
        **{part: f"mamba.{name}" for part, name in _MAMBA.items()},
        **{f"ffn_{part}": f"shared_mlp.{name}" for part, name in _SHARED_MLP.items()},
        **_GRANITE_MOE,
    },
    "granitemoe": _GRANITE_MOE,
    "hunyuan-dense": _HUNYUAN,
    "hunyuan-moe": {
        "ffn_gate_inp": "mlp.gate.wg",
        **{f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
        **_HUNYUAN,
    },
    **dict.fromkeys(("lfm2", "lfm2moe"), _CONVOLUTIONS),
    "gpt-oss": {
        "attn_sinks.weight": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    "glm4moe": {
        "post_attention_norm": "post_attention_layernorm",
        **_CORRECTED,
    },
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON),
    "olmo2": {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
}
"""What an architecture calls otherwise, or alone has; a key that ends in ``.weight``, ``.bias`` or ``.scale`` stands
for its whole name."""
_BARE = ("ssm_a", "ssm_d", "ffn_norm")
"""The tensors whose names may end in neither ``.weight`` nor ``.bias``: the last is so of Falcon-H1."""
_FLAT = (*_BARE, "ssm_norm")
"""Vectors of a recurrent state that a file may have as matrices: a column, or a row for each group of heads."""
_FILTERS = ("ssm_conv1d", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v", "shortconv.conv")
"""Filters [C, R] of convolutions, which Hugging Face has as [C, 1, R], and some files as [1, C, 1, R]."""
_HEADS = ("attn_k_b", "attn_v_b")
"""Matrices of which a file has each head's for itself."""
_OF_EXPERT = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
_OF_EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_down_exps": ("down_proj",),
}
"""The parts that each expert has in such a tensor, by rows."""
_STACKED = {"altup_proj": "model.altup_projections", "altup_unembd_proj": "model.altup_unembed_projections"}
"""The tensors that are matrices which Hugging Face has apart, numbered from 0 on."""
_EXPERTS_IN: dict[str, tuple[str, dict[str, str]]] = {
    "gemma4": ("experts", {}),
    **dict.fromkeys(("granitehybrid", "granitemoe"), ("block_sparse_moe.experts", {})),
    "llama4": ("feed_forward.experts", {}),
    "kimi-linear": ("block_sparse_moe.experts", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}),
    "lfm2moe": ("feed_forward.experts", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}),
    "nemotron_h_moe": ("mixer.experts", {}),
}
"""The module that experts are in, and what their parts are called, where it is not ``mlp.experts``."""
_NAME = re.compile(
    r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>(?:(?:shortconv|indexer)\.)?\w+)(?(layer)(?:\.(?P<expert>\d+))?)(?:\.(?P<kind>weight|bias|scale))?",
    re.ASCII,
)


def hugging_face_name(name: str, architecture: str = "llama") -> str:
    """What Hugging Face calls a tensor of a GGUF file; one that has no such name keeps its own."""
    parts = _NAME.fullmatch(name)
    if parts is None or (not parts["kind"] and parts["part"] not in _BARE):
        return name
    part, kind = parts["part"], parts["kind"]
    if parts["layer"] is None:
        whole = _WHOLE | _WHOLE_IN.get(architecture, {})
        return f"{whole[part]}.{kind}" if part in whole else name
    layer = f"model.layers.{parts['layer']}"
    if parts["expert"] is not None:
        return (
            f"{_expert(layer, parts['expert'], _OF_EXPERT[part], architecture)}.{kind}" if part in _OF_EXPERT else name
        )
    known = _OF_LAYER | _OF_LAYER_IN.get(architecture, {})
    if kind is None:
        return f"{layer}.{known[part]}" if part in known else name
    if f"{part}.{kind}" in known:
        return f"{layer}.{known[f'{part}.{kind}']}"
    return f"{layer}.{known[part]}.{kind}" if part in known and kind != "scale" else name


def _expert(layer: str, number: int | str, part: str, architecture: str) -> str:
    """What Hugging Face calls a matrix of an expert, but for its kind."""
    module, called = _EXPERTS_IN.get(architecture, ("mlp.experts", {}))
    return f"{layer}.{module}.{number}.{called.get(part, part)}"


def by_hugging_face_name(name: str, info: TensorInfo, architecture: str = "llama") -> Iterator[tuple[str, TensorInfo]]:
    """A tensor of a GGUF file by its Hugging Face name; every matrix (or bias) in it, if it holds a layer's experts, or
    others that are apart there."""
    found = _NAME.fullmatch(name)
    if found and found["part"] in _STACKED and len(info.shape) == 3:
        count, matrix = info.shape[0], info.shape[1:]
        size, module = info.size // max(1, count), _STACKED[found["part"]]
        for number in range(count):
            apart = replace(info, shape=matrix, offset=info.offset + number * size, size=size)
            yield f"{module}.{number}.{found['kind']}", apart
        return
    part = found["part"] if found and found["layer"] else ""
    parts = _OF_EXPERTS.get(part, ())
    dimensions = 3 if found and found["kind"] == "weight" else 2
    if found is None or not parts or len(info.shape) != dimensions or info.shape[1] % len(parts):
        shape = info.shape
        if part == "ffn_gate_inp_shexp" and len(shape) == 1:
            shape = (1, *shape)
        elif part in _FILTERS and len(shape) in (2, 4):
            shape = (shape[len(shape) // 2 - 1], 1, shape[-1])
        elif part in _HEADS and len(shape) == 3:
            shape = (shape[0] * shape[1], shape[2])
        elif part in _FLAT and len(shape) == 2:
            shape = (shape[0] * shape[1],)
        yield hugging_face_name(name, architecture), replace(info, shape=shape)
        return
    count, rows, *columns = info.shape
    size, layer = info.size // max(1, count * len(parts)), f"model.layers.{found['layer']}"
    for number in range(count * len(parts)):
        expert, part = divmod(number, len(parts))
        yield (
            f"{_expert(layer, expert, parts[part], architecture)}.{found['kind']}",
            replace(info, shape=(rows // len(parts), *columns), offset=info.offset + number * size, size=size),
        )
