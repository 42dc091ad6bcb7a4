"""Adapters in GGUF files, as llama.cpp's ``convert_lora_to_gguf.py`` writes them.

``general.type`` is ``adapter``, ``adapter.type`` is ``lora``. A tensor ``X.lora_a`` is the A of the base's tensor X,
``X.lora_b`` its B, the rows of which are in the order of a base's in GGUF
(`motley.daemon.weights.checkpoints.gguf.order`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from motley.daemon.adapters.config import Sides
from motley.daemon.models.description.model import Model
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.gguf.blocks import READABLE, dequantise
from motley.daemon.weights.checkpoints.gguf.header import GgufHeader, read_header
from motley.daemon.weights.checkpoints.gguf.names import hugging_face_name
from motley.daemon.weights.checkpoints.gguf.order import INTERLEAVED, RECURRENT, TILED
from motley.daemon.weights.checkpoints.tensor_files import TensorInfo
from motley.plugins.adapted_engine import Factor

GGUF = ".gguf"
"""What the names of such files end in."""
_AS_STORED: dict[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_SIDES = {".lora_a": "A", ".lora_b": "B"}
_WEIGHT = ".weight"
_EMBEDDING = "token_embd.weight"
_KNOWN = ("adapter.type", "adapter.lora.alpha", "adapter.lora.task_name", "adapter.lora.prompt_prefix")
"""Keys that say what is computed, or nothing about it."""


@dataclass(frozen=True)
class GgufSaid:
    """What a file says of its matrices (`motley.daemon.adapters.config.Said`): a rank is what a matrix has.

    Attributes:
        names: of the base's tensors, by its modules.
        ranks: by modules.
        alpha: 0: products are taken as they are.
    """

    names: dict[str, str]
    ranks: dict[str, int]
    alpha: float

    def adapts(self, module: str) -> bool:
        """Whatever is there."""
        return True

    def promises(self, module: str) -> bool:
        """Nothing is."""
        return False

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices."""
        return self.ranks[module]

    def scale_of(self, module: str) -> float:
        """What the product of a module's matrices is multiplied by."""
        rank = self.ranks[module]
        return self.alpha / rank if self.alpha and rank else 1.0

    def called(self, module: str, side: str) -> str:
        """What the file calls a module's A or B."""
        return f"{self.names[module]}.lora_{side[-1].lower()}"


def read_adapter_header(file: Path) -> GgufHeader:
    """All but the matrices of a file.

    Raises:
        CheckpointError: it cannot be read, is broken, or is no adapter of the kind that is computed here.
    """
    header = read_header(file)
    kind, own = header.metadata.get("general.type"), header.metadata.get("adapter.type")
    if (kind, own) != ("adapter", "lora"):
        raise CheckpointError(
            f"{file}: its general.type is {kind!r} and its adapter.type {own!r}; adapters here are 'adapter' and 'lora'"
        )
    return header


def gguf_adapter(
    file: Path, header: GgufHeader, content: npt.NDArray[np.uint8], model: Model
) -> tuple[Sides, GgufSaid]:
    """The matrices of a file, given all that it has, u8[bytes], in the order of the model's rows; and what it says of
    them.

    Raises:
        CheckpointError: it is broken, or asks for something that is not computed here.
    """
    alpha = _alpha(file, header.metadata)
    architecture = str(header.metadata.get("general.architecture"))
    interleaved = architecture in INTERLEAVED
    sides: Sides = {}
    names: dict[str, str] = {}
    ranks: dict[str, int] = {}
    for name, info in header.tensors.items():
        base, side = name[: -len(".lora_a")], _SIDES.get(name[-len(".lora_a") :], "")
        if not side or not base.endswith(_WEIGHT) or len(info.shape) != 2:
            raise CheckpointError(
                f"{file}: tensor {name!r} is no matrix of LoRA for one matrix of the base; of adapters, only those are"
                " computed here: no vectors, and no matrices of routed experts"
            )
        module = hugging_face_name(base, architecture).removesuffix(_WEIGHT)
        if architecture in TILED and RECURRENT in module:
            raise CheckpointError(
                f"{file}: tensor {name!r} is for a layer with a recurrent state, whose heads {architecture} has in"
                " another order; give the adapter in PEFT's format"
            )
        matrix = _matrix(file, name, info, content)
        if base == _EMBEDDING:
            matrix, side = matrix.T if side == "A" else matrix, f"embedding_{side}"  # a row of A for each token
        if side == "B" and interleaved and module.endswith((".q_proj", ".k_proj")):
            matrix = _in_halves(file, name, matrix, model)
        sides.setdefault(module, {})[side] = matrix
        names[module] = base
        ranks[module] = matrix.shape[0 if side.endswith("A") else 1]
    return sides, GgufSaid(names, ranks, alpha)


def _alpha(file: Path, metadata: dict[str, Any]) -> float:
    """What a scale is made of.

    Raises:
        CheckpointError: that is no number, or the file says something that is not known here.
    """
    for key in sorted(metadata):
        if key.startswith("adapter.") and key not in _KNOWN:
            raise CheckpointError(f"{file}: {key} is not known here, and may change what is computed")
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float) or not isfinite(alpha):
        raise CheckpointError(f"{file}: adapter.lora.alpha should be a number, and is {alpha!r}")
    return float(alpha)


def _matrix(file: Path, name: str, info: TensorInfo, content: npt.NDArray[np.uint8]) -> Factor:
    """A tensor: floats as they are stored, other types as the float32 that they stand for."""
    if info.dtype not in READABLE:
        raise CheckpointError(f"{file}: tensor {name!r} is {info.dtype}; supported: {', '.join(READABLE)}")
    if info.offset + info.size > len(content):
        raise CheckpointError(f"{file}: truncated: {len(content)} bytes, which do not reach tensor {name!r}")
    raw = content[info.offset : info.offset + info.size].copy()
    if info.dtype in _AS_STORED:
        return raw.view(_AS_STORED[info.dtype]).reshape(info.shape)
    return dequantise(raw.reshape(info.shape[0], -1), info.dtype)


def _in_halves(file: Path, name: str, matrix: Factor, model: Model) -> Factor:
    """The rows of heads of which neighbours turn together, as those of which a half lies between them."""
    attention = next((layer.attention for layer in model.layers if layer.attention), None)
    size = attention.heads.size if attention else 0
    if not size or len(matrix) % size:
        raise CheckpointError(f"{file}: tensor {name!r} has {len(matrix)} rows, which are no heads of this model")
    return matrix.reshape(-1, size // 2, 2, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)
