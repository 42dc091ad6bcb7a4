"""The tensors of an adapter in PEFT's format: a safetensors file that has an A and a B for each module."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from motley.daemon.adapters.config import PREFIX, Sides
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.safetensors_checkpoint import READABLE, parse_header
from motley.plugins.engine import Factor

_MATRIX = re.compile(re.escape(PREFIX) + r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


def peft_tensors(file: Path, content: npt.NDArray[np.uint8]) -> Sides:
    """The matrices of a file, given its content, u8[bytes].

    Raises:
        CheckpointError: it is broken, or has something else.
    """
    sides: Sides = {}
    for name, matrix in _tensors(file, content).items():
        found = _MATRIX.fullmatch(name)
        if found is None:
            raise CheckpointError(
                f"{file}: tensor {name!r} is no matrix of LoRA for a linear module; of adapters, only those are"
                " computed here: no embeddings, no whole modules, no biases, no magnitudes of DoRA"
            )
        sides.setdefault(found["module"], {})[found["side"]] = matrix
    return sides


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
