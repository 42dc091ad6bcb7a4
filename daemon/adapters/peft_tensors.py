"""The tensors of an adapter in PEFT's format: a safetensors file that has an A and a B for each module, and whole
matrices: of modules that were trained as they are (``modules_to_save``), and what A and B are added to where PEFT was
to save that too (``save_embedding_layers``)."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from motley.daemon.adapters.config import PREFIX, Sides, Whole
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.safetensors_checkpoint import READABLE, parse_header
from motley.plugins.adapted_engine import Factor

_MATRIX = re.compile(re.escape(PREFIX) + r"(?P<module>.+)\.lora_(?:(?P<side>[AB])\.weight|(?P<rows>embedding_[AB]))")
_WHOLE = re.compile(re.escape(PREFIX) + r"(?P<module>(?!.*\.lora_).+)\.weight")


def peft_tensors(file: Path, content: npt.NDArray[np.uint8]) -> tuple[Sides, Whole]:
    """The matrices of a file, given its content, u8[bytes]: those of LoRA, and whole ones.

    Raises:
        CheckpointError: it is broken, or has something else.
    """
    sides: Sides = {}
    whole: Whole = {}
    for name, matrix in _tensors(file, content).items():
        if found := _MATRIX.fullmatch(name):
            sides.setdefault(found["module"], {})[found["side"] or found["rows"]] = matrix
        elif found := _WHOLE.fullmatch(name):
            whole[found["module"]] = matrix
        else:
            raise CheckpointError(
                f"{file}: tensor {name!r} is no matrix of LoRA for a linear module, nor an embedding table or a head;"
                " of adapters, only those are computed here: no biases, no magnitudes of DoRA"
            )
    return sides, whole


def _tensors(file: Path, content: npt.NDArray[np.uint8]) -> dict[str, Factor]:
    """The tensors of a safetensors file, by their names, given its content."""
    size = len(content)
    length = int.from_bytes(content[:8].tobytes(), "little")
    if size < 8 or 8 + length > size:
        raise CheckpointError(f"{file}: truncated: {size} bytes, fewer than its header alone should have")
    infos = parse_header(file, content[8 : 8 + length].tobytes(), size)
    tensors = {}
    for name, info in infos.items():
        if info.dtype not in READABLE:
            raise CheckpointError(f"{file}: tensor {name!r} is {info.dtype}; supported: {', '.join(READABLE)}")
        # A copy: what lies at odd places of a file cannot be computed with.
        values = content[info.offset : info.offset + info.size].copy()
        tensors[name] = values.view(READABLE[info.dtype]).reshape(info.shape)
    return tensors
