"""Makes GGUF files of Hugging Face folders as llama.cpp's converter does, for tests.

The permutation is that of its ``LlamaModel.permute``, the rope factors those of its ``generate_extra_tensors``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from math import log, sqrt, tau
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from motley.daemon.models.description.model import tensors
from motley.daemon.models.files import open_model, open_weights
from motley.daemon.weights.checkpoints.gguf.order import INTERLEAVED
from motley.daemon.weights.spec import Piece

F32 = npt.NDArray[np.float32]

ARCHITECTURES = {
    "mistral": "llama",
    "olmo3": "olmo2",
    "ministral3": "mistral3",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "deepseek_v3": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "minimax_m2": "minimax-m2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "lfm2_moe": "lfm2moe",
    "qwen2_5_vl_text": "qwen2vl",
    "qwen3_vl_text": "qwen3vl",
    "qwen3_vl_moe_text": "qwen3vlmoe",
}
"""Where it is not the model type."""
EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
DERIVED = re.compile(
    r"_(halves|up|turned|latent)_proj\.|in_proj_[qkv]\.|conv1d_[qkv]\.|conv\.in_proj_[bcx]\.|conv_taps\."
)
"""Matrices that a model has, and no file."""
EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
OWN_WIDTH = (
    *("qwen2moe", "qwen3moe", "qwen3vlmoe", "qwen3next", "qwen35moe"),
    *("glm4moe", "deepseek2", "lfm2moe"),
)
"""Architectures whose experts have a width of their own."""
LAYERS = 8
"""That a model has at most."""
FUSED_MLP = {"gate_up_proj": ("gate_proj", "up_proj")}
FUSED = {"glm4": FUSED_MLP, "phi3": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), **FUSED_MLP}}
"""What architectures have in the place of these."""
OF_EXPERTS = {"feed_forward.experts": "mlp.experts", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
"""What is the usual name of experts that LFM2 calls otherwise."""


def to_gguf(
    folder: Path,
    file: Path,
    type_of: Callable[[str], Type] = lambda name: Type.F32,
    adapt: Callable[[gguf.GGUFWriter], None] | None = None,
    parts: int = 0,
    experts: str = "stacked",
) -> Path:
    """Convert a folder; returns the file to open.

    Args:
        type_of: of a matrix, by its name in the file. Vectors are F32.
        adapt: adds more to the file before it is written.
        parts: tensors in each file of a split model; 0: one file.
        experts: ``stacked`` in a tensor per projection, with gate and up ``fused`` in one, or each ``apart``.
    """
    config = text_config(folder)
    found = read(folder)
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=parts)
    add_config(writer, config)
    if (folder / "tokenizer.json").exists():
        add_byte_level(writer, json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")), config)
    for name, factors in rope_factors(config).items():
        writer.add_tensor(name, np.array(factors, np.float32))
    if architecture in FUSED:
        found = fused(found, FUSED[architecture])
    if "linear_num_key_heads" in config:
        found = dict(recurrent(found, config, tiled=architecture != "qwen3next"))
    if "kv_lora_rank" in config:
        found = dict(by_heads(found, config))
    for name, values in found.items():
        if architecture in INTERLEAVED and ".q_proj" in name:
            values = interleaved(values, config["num_attention_heads"])
        if architecture in INTERLEAVED and ".k_proj" in name:
            values = interleaved(values, config["num_key_value_heads"])
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            values = values + 1
        if EXPERT.fullmatch(name):
            continue
        if name.endswith("mlp.shared_expert_gate.weight"):
            values = values[0]
        plain = values.ndim < 2 or name.endswith(("mlp.gate.weight", "mlp.router.weight"))
        own = gguf_name(name, architecture)
        add(writer, own, values, Type.F32 if plain else type_of(own))
    for name, values in of_experts(found, experts):
        add(writer, name, values, type_of(name) if name.endswith(".weight") else Type.F32)
    if adapt:
        adapt(writer)
    write(writer)
    return sorted(file.parent.glob(f"{file.stem}-*-of-*"))[0] if parts else file


def read(folder: Path) -> dict[str, F32]:
    """Every tensor, those of experts by their usual names, others by those of the file where they lie in a larger."""
    found: dict[str, F32] = {}
    with open_model(folder) as opened, open_weights(folder) as files:
        for tensor in tensors(opened.model):
            part = next((part for part in tensor.parts if part.tensor in files), None)
            if DERIVED.search(tensor.name) and part is not None and tensor.name not in files:
                name = part.tensor.replace("model.language_model.", "model.")
                name = name.replace("conv.conv.weight[:, 0]", "conv.conv.weight")
                found.setdefault(name, files.read(Piece(part.tensor, *map(range, files.shape(part.tensor)))))
            else:
                name = tensor.name
                if ".feed_forward.experts." in name:
                    for own, usual in OF_EXPERTS.items():
                        name = name.replace(own, usual)
                found[name] = opened.source.read(Piece(tensor.name, *map(range, tensor.shape)))
    return found


def fused(tensors: dict[str, F32], fusing: dict[str, tuple[str, ...]]) -> dict[str, F32]:
    """Tensors with some of them one after another in the first one's place."""
    found: dict[str, list[F32]] = {}
    for name, values in tensors.items():
        whole = next(
            (name.replace(part, both) for both, parts in fusing.items() for part in parts if part in name), name
        )
        found.setdefault(whole, []).append(values)
    return {name: np.concatenate(parts) for name, parts in found.items()}


def of_experts(tensors: dict[str, F32], how: str) -> Iterator[tuple[str, F32]]:
    """The tensors of experts as a GGUF file has them, see `to_gguf`."""
    layers: dict[tuple[str, str], dict[str, dict[int, F32]]] = {}
    for name, values in tensors.items():
        if found := EXPERT.fullmatch(name):
            layer, number, part, kind = found.groups()
            layers.setdefault((layer, kind), {}).setdefault(part, {})[int(number)] = values
    for (layer, kind), parts in layers.items():
        stacks = {part: np.stack([own[number] for number in sorted(own)]) for part, own in parts.items()}
        if how == "fused":
            stacks["gate_up"] = np.concatenate([stacks.pop("gate"), stacks.pop("up")], axis=1)
        for part, stack in stacks.items():
            if how == "apart":
                yield from ((f"blk.{layer}.ffn_{part}.{number}.{kind}", own) for number, own in enumerate(stack))
            else:
                yield f"blk.{layer}.ffn_{part}_exps.{kind}", stack


def recurrent(tensors: dict[str, F32], config: dict[str, Any], tiled: bool) -> Iterator[tuple[str, F32]]:
    """Tensors as its converter changes those of layers with a recurrent state, and adds one to norms.

    Args:
        tiled: the value heads of all key heads take turns.
    """
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]

    def turned(rows: F32, size: int) -> F32:
        heads = rows.reshape(keys, values // keys, size, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape) if tiled else rows

    for name, own in tensors.items():
        module, _, part = name.partition(".linear_attn.")
        if name.endswith("norm.weight") and part != "norm.weight":
            yield name, own + 1
        elif part == "in_proj_qkvz.weight":
            heads = own.reshape(keys, -1, own.shape[1])
            q, k, v, z = np.split(heads, np.cumsum([key, key, values // keys * value]), axis=1)
            both = np.concatenate([each.reshape(-1, own.shape[1]) for each in (q, k, v)])
            yield f"{module}.linear_attn.in_proj_qkv.weight", both
            yield f"{module}.linear_attn.in_proj_z.weight", z.reshape(-1, own.shape[1])
        elif part in ("in_proj_qkv.weight", "conv1d.weight[:, 0]"):
            before = 2 * keys * key
            yield name.removesuffix("[:, 0]"), np.concatenate([own[:before], turned(own[before:], value)])
        elif part == "in_proj_z.weight":
            yield name, turned(own, value)
        elif part in ("in_proj_a.weight", "in_proj_b.weight"):
            yield name, turned(own, 1)
        elif part == "A_log":
            yield name, turned(-np.exp(own), 1)
        elif part == "dt_bias":
            yield f"{module}.linear_attn.dt_proj.bias", turned(own, 1)
        elif part == "out_proj.weight":
            yield name, np.ascontiguousarray(turned(np.ascontiguousarray(own.T), value).T)
        else:
            yield name, own


def by_heads(tensors: dict[str, F32], config: dict[str, Any]) -> Iterator[tuple[str, F32]]:
    """Tensors with each head's keys and values of latent rows apart, those of keys transposed."""
    plain = config["qk_nope_head_dim"]
    for name, own in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            yield name, own
            continue
        heads = own.reshape(config["num_attention_heads"], -1, own.shape[1])
        yield name.replace("kv_b_proj", "k_b_proj"), np.ascontiguousarray(heads[:, :plain].swapaxes(1, 2))
        yield name.replace("kv_b_proj", "v_b_proj"), np.ascontiguousarray(heads[:, plain:])


def add(writer: gguf.GGUFWriter, name: str, values: F32, type_: Type) -> None:
    writer.add_tensor(name, gguf.quants.quantize(values, type_), raw_dtype=type_)


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str, architecture: str) -> str:
    """llama.cpp's name of a tensor, by its tables: those of Llama where it knows no layer of this kind in a model.

    Two names are changed before they are looked up, as its converter does.
    """
    known = name.replace("e_score_correction_bias", "e_score_correction.bias").replace(".sinks", ".sinks.weight")
    known = known.replace(".expert_bias", ".expert_bias.bias")
    if architecture in ("ernie4_5-moe", "minimax-m2"):  # spelled as their files spell it
        module = "moe_statics" if architecture == "ernie4_5-moe" else "block_sparse_moe"
        known = known.replace("mlp.e_score", f"{module}.e_score").replace("gate.e_score", f"{module}.e_score")
    kinds = {called: kind for kind, called in gguf.MODEL_ARCH_NAMES.items()}
    tables = (gguf.get_tensor_name_map(kinds[each], LAYERS) for each in (architecture, "llama"))
    return next(found for table in tables if (found := table.get_name(known, try_suffixes=(".weight", ".bias"))))


def interleaved(values: F32, heads: int) -> F32:
    """Rows of a query or key projection in the order of GGML's rotation."""
    rows = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(values.shape))


def text_config(folder: Path) -> dict[str, Any]:
    """A folder's config, or the text part of it, with the keys that follow from others."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if "qk_rope_head_dim" in config:
        config["head_dim"] = config["qk_rope_head_dim"]
    config |= config.pop("text_config", {}) | {key: config[key] for key in ("eos_token_id",) if key in config}
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return config


def ropes(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rotary embedding of layers that see everything, and that of those with windows if it is another: as
    transformers 5 spells them, whatever the config does."""
    given = config.get("rope_parameters")
    if given is None:
        given = {"rope_theta": config["rope_theta"]} | (config.get("rope_scaling") or {"rope_type": "default"})
        given.setdefault("rope_type", given.get("type"))
        local = config.get("rope_local_base_freq")
        return given, {"rope_theta": local} if local else {}
    return (given["full_attention"], given["sliding_attention"]) if "full_attention" in given else (given, {})


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    architecture = writer.arch
    writer.add_block_count(config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    columns = config["intermediate_size"]
    writer.add_feed_forward_length(columns * 2 // 3 if config.get("block_auto_adjust_ff_dim") else columns)
    writer.add_head_count(config["num_attention_heads"])
    heads = config["num_key_value_heads"]
    if architecture in ("lfm2", "lfm2moe"):
        writer.add_head_count_kv([heads * (kind == "full_attention") for kind in config["layer_types"]])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    else:
        writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    if "kv_lora_rank" in config:
        add_latent(writer, config)
    elif architecture != "phi3":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("model_type") in ("exaone4", "olmo3"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture == "gemma3":
        if "layer_types" in config:
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        else:
            writer.add_sliding_window_pattern(config["sliding_window_pattern"])
        if config.get("final_logit_softcapping"):
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if "linear_num_key_heads" in config:
        writer.add_ssm_conv_kernel(config.get("linear_conv_kernel_dim", 4))
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
        writer.add_full_attention_interval(4)
    add_experts(writer, config)
    add_rope(writer, config)
    ends = config["eos_token_id"]
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)


def add_latent(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])


def add_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    count = next((config[key] for key in EXPERT_COUNTS if key in config), 0)
    if not count:
        return
    writer.add_expert_count(count)
    if writer.arch == "hunyuan-moe":
        writer.add_expert_used_count(config["moe_topk"][0])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"][0])
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_count(config["num_shared_expert"][0])
        return
    writer.add_expert_used_count(config.get("num_experts_per_tok") or config["moe_k"])
    if writer.arch == "lfm2moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if writer.arch in (
        "lfm2moe",
        "qwen2moe",
        "qwen3moe",
        "qwen3vlmoe",
        "glm4moe",
        "deepseek2",
        "qwen3next",
        "qwen35moe",
    ):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if writer.arch == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if writer.arch == "minimax-m2":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if writer.arch == "ernie4_5-moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"] // config["num_key_value_heads"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_interleave_moe_layer_step(1)
    if width := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(width)
    if writer.arch in ("glm4moe", "deepseek2"):
        writer.add_nextn_predict_layers(config["num_nextn_predict_layers"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config.get("norm_topk_prob", True))
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def add_rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope, local = ropes(config)
    usual = 0.25 if "linear_num_key_heads" in config else 1.0
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", usual))
    writer.add_rope_dimension_count(config.get("rotary_dim") or int(config["head_dim"] * partial))
    stretched = rope.get("alpha", 1.0) ** (config["head_dim"] / (config["head_dim"] - 2))
    writer.add_rope_freq_base(rope["rope_theta"] * stretched)
    if "alpha" in rope:
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1.0)
    if local and local["rope_theta"] != rope["rope_theta"]:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        if "mscale_all_dim" in rope:
            by = 1.0 if writer.arch == "mistral3" else 0.1
            writer.add_rope_scaling_yarn_log_mul(by * rope["mscale_all_dim"])
        if writer.arch == "mistral3":
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if writer.arch == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        original = config["original_max_position_embeddings"]
        stretched = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(sqrt(1 + log(stretched) / log(original)))


def rope_factors(config: dict[str, Any]) -> dict[str, list[float]]:
    """The tensors of what rotary frequencies are divided by."""
    rope, _ = ropes(config)
    if rope["rope_type"] == "longrope":
        return {f"rope_factors_{length}.weight": rope[f"{length}_factor"] for length in ("long", "short")}
    if rope["rope_type"] != "llama3":
        return {}
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for index in range(0, config["head_dim"], 2):
        wavelength = tau * rope["rope_theta"] ** (index / config["head_dim"])
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": factors}


def add_byte_level(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """A byte-level BPE ``tokenizer.json``, cut into words as GPT-2 does."""
    special = {token["id"] for token in tokenizer["added_tokens"]}
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index in special else 1 for index in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_add_bos_token(False)
