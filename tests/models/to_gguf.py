"""Makes GGUF files of Hugging Face folders as llama.cpp's converter does, for tests.

The permutation is that of its ``LlamaModel.permute``, the rope factors those of its ``generate_extra_tensors``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from motley.daemon.models.description.model import tensors
from motley.daemon.models.files import open_model, open_weights
from motley.daemon.weights.checkpoints.gguf.order import INTERLEAVED
from motley.daemon.weights.places import WHOLE
from motley.daemon.weights.spec import Piece
from tests.models.gguf_config import add_byte_level, add_config, rope_factors, text_config

F32 = npt.NDArray[np.float32]

ARCHITECTURES = {
    "mistral": "llama",
    "olmo3": "olmo2",
    "ministral3": "mistral3",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "exaone_moe": "exaone-moe",
    "bailing_hybrid": "bailingmoe3",
    "falcon_h1": "falcon-h1",
    "kimi_linear": "kimi-linear",
    "glm_moe_dsa": "glm-dsa",
    "llama4_text": "llama4",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "granitemoeshared": "granitemoe",
    "cohere": "command-r",
    "internlm3": "llama",
    "ernie4_5_moe": "ernie4_5-moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "minimax_m2": "minimax-m2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "granitemoehybrid": "granitehybrid",
    "lfm2_moe": "lfm2moe",
    "qwen2_5_vl_text": "qwen2vl",
    "qwen3_vl_text": "qwen3vl",
    "qwen3_vl_moe_text": "qwen3vlmoe",
}
"""Where it is not the model type."""
SAME_NAMES = {"bailingmoe3": "kimi-linear", "laguna": "step35"}
"""Of an architecture that the package does not know yet, one whose tensors have the same names."""
EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
DERIVED = re.compile(
    r"\d\.per_layer_model_projection|\.prediction_coefs\.\d|\.(mixer|mamba)\.(in_proj|conv1d)_|_(halves|query|gate|up|turned|latent)_(proj|norm)\.|\.w(q_b|k)_halves\.|in_proj_[qkvzba]\.|conv1d_[qkv]\.|\.decay$|conv\.in_proj_[bcx]\.|conv_taps\."
)
"""Matrices that a model has, and no file."""
LAYERS = 8
"""That a model has at most."""
FUSED_MLP = {"gate_up_proj": ("gate_proj", "up_proj")}
FUSED = {"glm4": FUSED_MLP, "phi3": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), **FUSED_MLP}}
"""What architectures have in the place of these."""
EXPERT_MODULES = re.compile(r"(?<=\d\.)(feed_forward\.|mixer\.|block_sparse_moe\.|)experts(?=\.)")
OF_EXPERTS = {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
"""What is the usual name of experts that some call otherwise."""


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
    if architecture == "nemotron_h" and "E" in config["hybrid_override_pattern"]:
        architecture = "nemotron_h_moe"
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
    if "mamba_d_state" in config or "ssm_state_size" in config:
        found = dict(mamba(found, config))
    if architecture == "falcon-h1":
        found = dict(multiplied(found, config))
    if architecture == "kimi-linear":
        found = dict(kimi(found))
    if architecture == "bailingmoe3":
        found = dict(ling(found))
    if "kv_lora_rank" in config and architecture != "minicpm3":
        found = dict(by_heads(found, config))
    if architecture == "gemma3n":
        found = dict(stacked(found))
    for name, values in found.items():
        if architecture in INTERLEAVED and ".q_proj" in name:
            values = interleaved(values, config["num_attention_heads"])
        if architecture in INTERLEAVED and ".k_proj" in name:
            values = interleaved(values, config["num_key_value_heads"])
        if architecture in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
            values = values + 1
        if architecture == "gemma4":
            experts = "fused"
            name = name.replace(".layer_scalar", ".layer_scalar.weight")
        if EXPERT.fullmatch(name):
            continue
        if name.endswith("mlp.shared_expert_gate.weight"):
            values = values[0]
        vector = values.ndim < 2 or name.endswith((".A_log", ".D", "norm.weight"))
        plain = vector or name.endswith(("mlp.gate.weight", "mlp.router.weight"))
        own = gguf_name(name, architecture, "_shexp" if config.get("num_local_experts") else "")
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
                name = name.removesuffix("[:, 0]") if ".linear_attn." not in name else name
                name, tensor_name = name.removesuffix(WHOLE), part.tensor.removesuffix(WHOLE)
                if len(files.shape(tensor_name)) > 2:
                    tensor_name = part.tensor
                found.setdefault(name, files.read(Piece(tensor_name, *map(range, files.shape(tensor_name)))))
            else:
                name = tensor.name
                if EXPERT_MODULES.search(name):
                    name = EXPERT_MODULES.sub("mlp.experts", name)
                    for own, usual in OF_EXPERTS.items():
                        name = name.replace(own, usual)
                found[name] = opened.source.read(Piece(tensor.name, *map(range, tensor.shape)))
        unused = [name for name in files.names() if ".indexer." in name]
        return found | {name: files.read(Piece(name, *map(range, files.shape(name)))) for name in unused}


def fused(tensors: dict[str, F32], fusing: dict[str, tuple[str, ...]]) -> dict[str, F32]:
    """Tensors with some of them one after another in the first one's place."""
    found: dict[str, list[F32]] = {}
    for name, values in tensors.items():
        whole = next(
            (name.replace(part, both) for both, parts in fusing.items() for part in parts if part in name), name
        )
        found.setdefault(whole, []).append(values)
    return {name: np.concatenate(parts) for name, parts in found.items()}


def stacked(tensors: dict[str, F32]) -> Iterator[tuple[str, F32]]:
    """Tensors with what makes residual streams, and a row of them again, one matrix after another."""
    for name, own in tensors.items():
        module = re.fullmatch(r"(model\.altup_\w+)\.(\d+)\.weight", name)
        if module is None:
            yield name.replace("correct_output_scale", "correct_output_scale.weight"), own
        elif module[2] == "0":
            every = [each for other, each in tensors.items() if other.startswith(f"{module[1]}.")]
            yield f"{module[1]}.weight", np.stack(every)


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


def mamba(tensors: dict[str, F32], config: dict[str, Any]) -> Iterator[tuple[str, F32]]:
    """Tensors as its converter changes those of Mamba2 layers: a column for each head, and a row for each group."""
    groups = config.get("n_groups") or config["mamba_n_groups"]
    for name, own in tensors.items():
        if name.endswith(".A_log"):
            yield name, -np.exp(own)[:, np.newaxis]
        elif name.endswith((".mixer.D", ".mamba.D")):
            yield name, own[:, np.newaxis]
        elif name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
            yield name, own.reshape(groups, -1)
        else:
            yield name.replace(".dt_bias", ".dt_proj.bias"), own


def multiplied(tensors: dict[str, F32], config: dict[str, Any]) -> Iterator[tuple[str, F32]]:
    """Tensors as its converter multiplies those of Falcon-H1; biases, which no published model has, as products are."""
    inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = inner, inner, shared, shared, config["mamba_n_heads"]
    gate, down = config["mlp_multipliers"]
    attention, mamba = config["attention_in_multiplier"], config["ssm_in_multiplier"]
    by = {
        "gate_proj": gate,
        "down_proj": down,
        "k_proj": config["key_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    for name, own in tensors.items():
        module, kind = name.split(".")[-2:]
        if module in ("q_proj", "k_proj", "v_proj") and kind == "weight":
            own = own * attention
        if module == "in_proj":
            own = own * mamba if kind == "weight" else own
            own = (own.T * np.repeat(config["ssm_multipliers"], sizes)).T
        yield name, np.ascontiguousarray(own * by.get(module, 1.0), np.float32)


def kimi(tensors: dict[str, F32]) -> Iterator[tuple[str, F32]]:
    """Tensors as its converter changes those of Kimi's DeltaNets."""
    for name, own in tensors.items():
        if name.endswith(".A_log"):
            yield name, -np.exp(own).reshape(1, 1, -1, 1)
        elif "_conv1d." in name:
            yield name, own.reshape(1, len(own), 1, -1)
        else:
            yield name.replace(".dt_bias", ".dt_proj.bias"), own


def ling(tensors: dict[str, F32]) -> Iterator[tuple[str, F32]]:
    """The same of Ling 3's, which have whole projections."""
    tensors = {name.replace(".attention.", ".self_attn."): own for name, own in tensors.items()}
    for name, own in kimi(tensors):
        layer = name.rpartition(".self_attn.")[0]
        recurrent = f"{layer}.self_attn.A_log" in tensors
        if name.endswith(".A_log"):
            yield name, -own.reshape(-1, 1)
        elif recurrent and name.endswith((".f_proj.weight", ".g_proj.weight")):
            yield name.replace("_proj.", "_a_proj."), own
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


def gguf_name(name: str, architecture: str, shared: str = "") -> str:
    """llama.cpp's name of a tensor, by its tables: those of Llama where it knows no layer of this kind in a model.

    Some names are changed before they are looked up, as its converter does.

    Args:
        shared: what ends the names of an MLP that stands beside experts.
    """
    known = name.replace("e_score_correction_bias", "e_score_correction.bias").replace(".sinks", ".sinks.weight")
    known = known.replace(".expert_bias", ".expert_bias.bias")
    if architecture in ("ernie4_5-moe", "minimax-m2"):  # spelled as their files spell it
        module = "moe_statics" if architecture == "ernie4_5-moe" else "block_sparse_moe"
        known = known.replace("mlp.e_score", f"{module}.e_score").replace("gate.e_score", f"{module}.e_score")
    if architecture.startswith("nemotron_h"):
        known = known.replace("model.layers.", "backbone.layers.")
    if architecture in ("granitehybrid", "granitemoe") and ".shared_mlp." in known:  # which its converter names
        part = {"gate_proj": "gate", "up_proj": "up", "output_linear": "down"}[name.split(".")[-2]]
        return f"blk.{name.split('.')[2]}.ffn_{part}{shared}.weight"
    scales = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    if architecture == "bailingmoe3" and name.endswith(".g_proj.weight"):
        return f"blk.{name.split('.')[2]}.attn_gate.weight"
    if scale := next((own for called, own in scales.items() if name.endswith(called)), None):
        return f"blk.{name.split('.')[2]}.{scale}"
    tables = map(_names, (architecture, "llama"))
    return next(found for table in tables if (found := table.get_name(known, try_suffixes=(".weight", ".bias"))))


@cache  # llama.cpp makes all its names for so many layers each time
def _names(architecture: str) -> gguf.TensorNameMap:
    kinds = {called: kind for kind, called in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(kinds[SAME_NAMES.get(architecture, architecture)], LAYERS)


def interleaved(values: F32, heads: int) -> F32:
    """Rows of a query or key projection in the order of GGML's rotation."""
    rows = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(values.shape))
