"""Packed checkpoints for tests, written and read value by value, straight from the definition of their formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Array = npt.NDArray[Any]
Tensors = dict[str, Array]

AWQ_NIBBLE = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in an AWQ word each of eight neighbouring outputs is."""


def random_matrix(rows: int, columns: int, group: int, bits: int, seed: int, zeros: int | None = None) -> list[Array]:
    """Codes [N, K], zero points [N, G] (all alike where given) and f16 scales [N, G]."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 1 << bits, (rows, columns))
    centres = random.integers(1, 1 << bits, (rows, columns // group))
    scales = random.uniform(0.5, 1.5, centres.shape) * 0.5 ** (bits - 1) * columns**-0.5
    return [codes, centres if zeros is None else np.full_like(centres, zeros), scales.astype(np.float16)]


def gptq(codes: Array, zeros: Array, scales: Array, bits: int, version: int = 1) -> Tensors:
    """The tensors of a GPTQ matrix, by the last part of their names."""
    (rows, columns), groups = codes.shape, zeros.shape[1]
    qweight = np.zeros((columns * bits // 32, rows), np.uint32)
    for column in range(columns):
        bit = column * bits
        qweight[bit // 32] |= codes[:, column].astype(np.uint32) << np.uint32(bit % 32)
    qzeros = np.zeros((groups, rows * bits // 32), np.uint32)
    for row in range(rows):
        bit = row * bits
        stored = zeros[row] - (1 if version == 1 else 0)
        qzeros[:, bit // 32] |= stored.astype(np.uint32) << np.uint32(bit % 32)
    return {
        "qweight": qweight.view(np.int32),
        "qzeros": qzeros.view(np.int32),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": (np.arange(columns) // (columns // groups)).astype(np.int32),
    }


def awq(codes: Array, zeros: Array, scales: Array) -> Tensors:
    """The tensors of an AWQ matrix (``gemm``), by the last part of their names."""

    def packed(values: Array) -> Array:
        """u32[R, N/8] of values [N, R]."""
        words = np.zeros((values.shape[1], values.shape[0] // 8), np.uint32)
        for output, line in enumerate(values):
            words[:, output // 8] |= line.astype(np.uint32) << np.uint32(4 * AWQ_NIBBLE[output % 8])
        return words.view(np.int32)

    return {"qweight": packed(codes), "qzeros": packed(zeros), "scales": np.ascontiguousarray(scales.T)}


def dequantised_gptq(tensors: Tensors, bits: int, version: int = 1) -> Array:
    """f64[N, K] by the definition: ``scales[g] * (code - (zero + 1))``, g from ``g_idx``; version 2: without the 1."""
    qweight, scales = tensors["qweight"].view(np.uint32), tensors["scales"].astype(np.float64)
    rows, mask = scales.shape[1], (1 << bits) - 1
    zeros = np.empty(scales.shape)
    for group, line in enumerate(tensors["qzeros"].view(np.uint32)):
        for row in range(rows):
            zeros[group, row] = (int(line[row * bits // 32]) >> row * bits % 32 & mask) + (1 if version == 1 else 0)
    values = np.empty((rows, len(tensors["g_idx"])))
    for column, group in enumerate(tensors["g_idx"]):
        codes = qweight[column * bits // 32] >> np.uint32(column * bits % 32) & np.uint32(mask)
        values[:, column] = scales[group] * (codes - zeros[group])
    return values


def dequantised_awq(tensors: Tensors, group: int) -> Array:
    """f64[N, K] by the definition: ``scales[g] * (code - zero)``, g the column over the size of groups."""
    qweight, qzeros = tensors["qweight"].view(np.uint32), tensors["qzeros"].view(np.uint32)
    groups = np.arange(len(qweight)) // group
    values = np.empty((8 * qweight.shape[1], len(qweight)))
    for row in range(len(values)):
        shift = np.uint32(4 * AWQ_NIBBLE[row % 8])
        codes = (qweight[:, row // 8] >> shift & np.uint32(15)).astype(np.float64)
        zeros = (qzeros[:, row // 8] >> shift & np.uint32(15)).astype(np.float64)
        values[row] = tensors["scales"][groups, row].astype(np.float64) * (codes - zeros[groups])
    return values


def save(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {}), encoding="utf-8")
    return folder
