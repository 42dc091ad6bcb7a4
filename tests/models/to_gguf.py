"""Makes GGUF files of Hugging Face folders as llama.cpp's converter does, for tests.

The permutation is that of its ``LlamaModel.permute``, the rope factors those of its ``generate_extra_tensors``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from math import tau
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from motley.daemon.models.description import expected_shapes
from motley.daemon.models.files import open_model
from motley.daemon.weights.spec import Piece

F32 = npt.NDArray[np.float32]

WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
OF_LAYER_IN = {
    "olmo2": {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
}
"""What an architecture calls otherwise, or alone has."""
ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
"""Where it is not the model type."""
EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


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
    config = json.loads((folder / "config.json").read_text())
    tensors = read(folder)
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=parts)
    add_config(writer, config)
    if (folder / "tokenizer.json").exists():
        add_byte_level(writer, json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")), config)
    if factors := llama3_factors(config):
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    for name, values in tensors.items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if architecture == "llama" and ".q_proj" in name:
            values = interleaved(values, config["num_attention_heads"])
        if architecture == "llama" and ".k_proj" in name:
            values = interleaved(values, config["num_key_value_heads"])
        if EXPERT.fullmatch(name):
            continue
        if name.endswith("mlp.shared_expert_gate.weight"):
            values = values[0]
        plain = values.ndim < 2 or name.endswith("mlp.gate.weight")
        named = gguf_name(name, architecture)
        add(writer, named, values, Type.F32 if plain else type_of(named))
    for name, values in of_experts(tensors, experts):
        add(writer, name, values, type_of(name))
    if adapt:
        adapt(writer)
    write(writer)
    return sorted(file.parent.glob(f"{file.stem}-*-of-*"))[0] if parts else file


def read(folder: Path) -> dict[str, F32]:
    """Every tensor, those of experts by their usual names."""
    with open_model(folder) as opened:
        shapes = expected_shapes(opened.model)
        return {name: opened.source.read(Piece(name, *map(range, shape))) for name, shape in shapes.items()}


def of_experts(tensors: dict[str, F32], how: str) -> Iterator[tuple[str, F32]]:
    """The tensors of experts as a GGUF file has them, see `to_gguf`."""
    layers: dict[str, dict[str, dict[int, F32]]] = {}
    for name, values in tensors.items():
        if found := EXPERT.fullmatch(name):
            layer, number, part = found.groups()
            layers.setdefault(layer, {}).setdefault(part, {})[int(number)] = values
    for layer, parts in layers.items():
        stacks = {part: np.stack([own[number] for number in sorted(own)]) for part, own in parts.items()}
        if how == "fused":
            stacks["gate_up"] = np.concatenate([stacks.pop("gate"), stacks.pop("up")], axis=1)
        for part, stack in stacks.items():
            if how == "apart":
                yield from ((f"blk.{layer}.ffn_{part}.{number}.weight", own) for number, own in enumerate(stack))
            else:
                yield f"blk.{layer}.ffn_{part}_exps.weight", stack


def add(writer: gguf.GGUFWriter, name: str, values: F32, type_: Type) -> None:
    writer.add_tensor(name, gguf.quants.quantize(values, type_), raw_dtype=type_)


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str, architecture: str = "llama") -> str:
    stem, _, kind = name.rpartition(".")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{(OF_LAYER | OF_LAYER_IN.get(architecture, {}))[part]}.{kind}"


def interleaved(values: F32, heads: int) -> F32:
    """Rows of a query or key projection in the order of GGML's rotation."""
    rows = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(values.shape))


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_vocab_size(config["vocab_size"])
    if count := config.get("num_experts", config.get("num_local_experts")):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("model_type", "").startswith("qwen") and count:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if width := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(width)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    ends = config["eos_token_id"]
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)


def llama3_factors(config: dict[str, Any]) -> list[float]:
    rope = config["rope_parameters"]
    if rope["rope_type"] != "llama3":
        return []
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
    return factors


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
