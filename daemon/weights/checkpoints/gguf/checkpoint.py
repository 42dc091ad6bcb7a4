"""A GGUF file as a checkpoint: the same tensors by the same names, rows in the same order.

llama.cpp names tensors differently, and puts some rows and columns elsewhere
(`motley.daemon.weights.checkpoints.gguf.order`). Both are undone here while reading; rows move as they are, so no value
changes. Of a recurrent state's decay it has ``-exp(A_log)``, of which the logarithm is taken here.

The experts of a layer lie in one tensor per projection, one after another (in the first files of Mixtrals in a tensor
each): an expert is its bytes of it. As in checkpoints, they are apart here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.gguf.blocks import READABLE, block_size, dequantise, exact_format, unpack
from motley.daemon.weights.checkpoints.gguf.header import read_header
from motley.daemon.weights.checkpoints.gguf.order import Interleaving, Tiling, order_of
from motley.daemon.weights.checkpoints.tensor_files import FLAT, Bring, TensorFiles, TensorInfo
from motley.daemon.weights.spec import Piece
from motley.daemon.weights.stored import F32, U8, Codes, Format, converted, whole_blocks, within

ROPE_FACTORS = "rope_freqs.weight"
"""What each rotary frequency is divided by, f32[head_dim / 2]; it keeps this name."""

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAST_NORM = {"token_embd_norm": "model.embedding_norm"}
_WHOLE_IN = {"lfm2": _LAST_NORM, "lfm2moe": _LAST_NORM}
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
_OF_LAYER_IN = {
    "deepseek2": {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_up_proj",
        "attn_v_b": "self_attn.v_up_proj",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        **_SHARED_EXPERTS,
    },
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _DELTA_NET),
    "ernie4_5-moe": {
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        **_SHARED_EXPERTS,
    },
    "minimax-m2": {"exp_probs_b.bias": "mlp.e_score_correction_bias"},
    "exaone4": {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    **dict.fromkeys(("gemma2", "gemma3"), _GEMMA),
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
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
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        **_SHARED_EXPERTS,
    },
    "olmo2": {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
}
"""What an architecture calls otherwise, or alone has; a key that ends in ``.weight`` or ``.bias`` stands for its whole
name."""
_DECAY = "ssm_a"
"""The one tensor whose name ends in neither ``.weight`` nor ``.bias``."""
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
_EXPERTS_IN = {"lfm2moe": ("feed_forward", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"})}
"""The module that experts are in, and what their parts are called, where it is not ``mlp``."""
_NAME = re.compile(
    r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>(?:shortconv\.)?\w+)(?(layer)(?:\.(?P<expert>\d+))?)(?:\.(?P<kind>weight|bias))?",
    re.ASCII,
)
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)


def hugging_face_name(name: str, architecture: str = "llama") -> str:
    """What Hugging Face calls a tensor of a GGUF file; one that has no such name keeps its own."""
    parts = _NAME.fullmatch(name)
    if parts is None or (not parts["kind"] and parts["part"] != _DECAY):
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
    return f"{layer}.{known[part]}.{kind}" if part in known else name


def _expert(layer: str, number: int | str, part: str, architecture: str) -> str:
    """What Hugging Face calls a matrix of an expert, but for its kind."""
    module, called = _EXPERTS_IN.get(architecture, ("mlp", {}))
    return f"{layer}.{module}.experts.{number}.{called.get(part, part)}"


def by_hugging_face_name(name: str, info: TensorInfo, architecture: str = "llama") -> Iterator[tuple[str, TensorInfo]]:
    """A tensor of a GGUF file by its Hugging Face name; every matrix (or bias) in it, if it holds a layer's experts."""
    found = _NAME.fullmatch(name)
    part = found["part"] if found and found["layer"] else ""
    parts = _OF_EXPERTS.get(part, ())
    dimensions = 3 if found and found["kind"] == "weight" else 2
    if found is None or not parts or len(info.shape) != dimensions or info.shape[1] % len(parts):
        shape = info.shape
        if part == "ffn_gate_inp_shexp" and len(shape) == 1:
            shape = (1, *shape)
        elif part in ("ssm_conv1d", "shortconv.conv") and len(shape) == 2:
            shape = (shape[0], 1, shape[1])
        elif part in _HEADS and len(shape) == 3:
            shape = (shape[0] * shape[1], shape[2])
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


def gguf_parts(file: Path) -> list[Path]:
    """The files of a model that is split (``name-00001-of-00003.gguf``), given the first; else the file alone.

    Raises:
        CheckpointError: it is another than the first.
    """
    part = _PART.fullmatch(file.name)
    if part is None:
        return [file]
    first, *others = (
        file.with_name(f"{part['stem']}-{number:05}-of-{part['count']}.gguf")
        for number in range(1, max(1, int(part["count"])) + 1)
    )
    if file != first:
        raise CheckpointError(f"{file}: a later part of a split model; give the first, {first.name}")
    return [first, *others]


class GgufCheckpoint(TensorFiles):
    """The weights in a GGUF file or in the parts of one.

    Attributes:
        file: the one it was opened by.
        metadata: without the lists that are the tokenizer's vocabulary, which nobody but the tokenizer needs.

    Raises:
        CheckpointError: a file cannot be read, is not GGUF, or is not what its header says; a part is missing.
    """

    readable = READABLE
    naming = " (by its Hugging Face name)"

    def __init__(self, file: Path, bring: Bring | None = None) -> None:
        self.file = file
        self.metadata: dict[str, Any] = {}
        self._data: dict[Path, int] = {}
        super().__init__(file, bring)

    def _open(self) -> None:
        parts = gguf_parts(self.file)
        missing = [part.name for part in parts if not part.is_file()]
        if missing:
            raise CheckpointError(f"{self.file.parent}: missing parts of a split model: {', '.join(missing)}")
        for part in parts:
            self._add(part)
        count = self.metadata.get("split.count", 1)
        if count != len(parts):
            raise CheckpointError(
                f"{self.file}: one of {count} parts of a split model by its metadata, one of {len(parts)} by its name; "
                "give the parts the names they were made with"
            )

    def _add(self, file: Path) -> None:
        header = read_header(file)
        self._add_file(file)
        self._data[file] = header.data
        if file == self.file:
            self.metadata = {
                key: value
                for key, value in header.metadata.items()
                if not (key.startswith("tokenizer.") and isinstance(value, list))
            }
        architecture = str(self.metadata.get("general.architecture"))
        for own_name, whole in header.tensors.items():
            for name, info in by_hugging_face_name(own_name, whole, architecture):
                self._add_tensor(name, info, own_name)

    def format(self, name: str) -> Format:
        type_ = self.tensor(name).dtype
        exact = exact_format(type_)
        return exact if exact and not self._order.columns(name) % exact.block else Format.floats(type_)

    def codes(self, piece: Piece) -> Codes:
        self.check(piece)
        info, held = self.tensor(piece.tensor), self.format(piece.tensor)
        assert piece.columns is not None
        assert piece.columns == whole_blocks(piece.columns, held.block)
        if self._order.columns(piece.tensor):
            whole = unpack(self._raw(info, piece.rows, range(info.shape[1])), info.dtype)
            return self._in_order(whole, piece.tensor, held, piece.columns)
        columns = whole_blocks(piece.columns, block_size(info.dtype)[0])
        codes = unpack(self._raw(info, self._places(piece.tensor, piece.rows), columns), info.dtype)
        left = piece.columns.start - columns.start
        return converted(codes, held, range(left, left + len(piece.columns)), held)

    def fingerprint(self) -> str:
        """Identify the model: equal on two machines whose files are equal.

        Hex SHA-256 over everything before the tensors' data and a few bytes from the middle of every tensor.

        Raises:
            CheckpointError: a file cannot be read.
        """
        digest = sha256()
        for file, end in self._data.items():
            header = bytearray(min(end, self._sizes[file]))
            self._read_at(file, 0, memoryview(header))
            digest.update(header)
        for _, _, sample in self._samples():
            digest.update(sample)
        return digest.hexdigest()

    def _values(self, name: str, rows: Sequence[int], columns: range) -> F32:
        info = self.tensor(name)
        if len(info.shape) == 1:
            line = dequantise(self._raw(info, rows, range(info.shape[0])), info.dtype)
            values: F32 = line[:, self._places(name, columns)]
            return np.log(-values) if name.endswith(".A_log") else values
        if (size := self._order.columns(name)) and isinstance(self._order, Tiling):
            whole = dequantise(self._raw(info, rows, range(info.shape[1])), info.dtype)
            return np.ascontiguousarray(whole[:, self._order.places(columns, size)])
        covered = whole_blocks(columns, block_size(info.dtype)[0])
        values = dequantise(self._raw(info, self._places(name, rows), covered), info.dtype)
        return np.ascontiguousarray(values[:, within(columns, covered)])

    @cached_property
    def _order(self) -> Interleaving | Tiling:
        return order_of(self.file, self.metadata)

    def _places(self, name: str, rows: Sequence[int]) -> Sequence[int]:
        """Where rows of a tensor (or elements of a vector) lie in the file's."""
        return self._order.rows(name.removesuffix(FLAT), rows, self.tensor(name).shape[0])

    def _in_order(self, codes: Codes, name: str, held: Format, columns: range) -> Codes:
        """Some columns of whole rows of codes whose columns stand elsewhere."""
        order, size = self._order, self._order.columns(name)
        assert isinstance(order, Tiling)
        blocks = order.places(range(columns.start // held.block, columns.stop // held.block), size // held.block)
        count, width = codes.scales.shape
        chosen = codes.codes.reshape(count, width, -1)[:, blocks].reshape(count, -1)
        return Codes(chosen, codes.scales[:, blocks])

    def _raw(self, info: TensorInfo, rows: Sequence[int], columns: range) -> U8:
        """The bytes of some rows and columns, whole blocks: u8[rows, bytes]."""
        elements, size = block_size(info.dtype)
        wanted = range(columns.start // elements * size, columns.stop // elements * size)
        return self._items(info, np.dtype(np.uint8), rows, wanted)
