"""Safetensors files read and written whole, with NumPy alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.safetensors_checkpoint import READABLE, parse_header
from motley.training.errors import TrainingError

Array = npt.NDArray[Any]
_NAMES = {dtype: name for name, dtype in READABLE.items()}


def tensors_of(file: Path) -> dict[str, Array]:
    """Read all tensors of a safetensors file, in the order in which they lie in it; they are mapped, not read yet.

    Raises:
        TrainingError: the file cannot be read, is damaged, or has a tensor of another dtype than float.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = opened.read(min(length, size))
        infos = parse_header(file, header, size)
        mapped = np.memmap(file, np.uint8, "r")
    except OSError as error:
        raise TrainingError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (CheckpointError, ValueError) as error:
        raise TrainingError(f"{file}: {error}") from error
    strange = {name: info.dtype for name, info in infos.items() if info.dtype not in READABLE}
    if strange:
        name, dtype = next(iter(strange.items()))
        raise TrainingError(f"{file}: tensor {name!r} is {dtype}: what is quantised cannot be added to")
    in_order = sorted(infos.items(), key=lambda item: item[1].offset)
    return {
        name: mapped[info.offset : info.offset + info.size].view(READABLE[info.dtype]).reshape(info.shape)
        for name, info in in_order
    }


def write_tensors(file: Path, tensors: Mapping[str, Array]) -> None:
    """Write a safetensors file, a tensor at a time.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in tensors.items():
        begin, end = end, end + values.nbytes
        entries[name] = {"dtype": _NAMES[values.dtype], "shape": values.shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            opened.write(np.ascontiguousarray(values).view(np.uint8).data)
