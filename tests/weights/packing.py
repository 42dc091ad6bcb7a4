"""Packed checkpoints for tests, written and read value by value, straight from the definition of their formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
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


FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
"""The values of four-bit floats."""


def in_words(values: Array, bits: int) -> Array:
    """Unsigned values u[N, K] packed along rows: i32[N, K * bits / 32], rounded up."""
    per_word = 32 // bits
    words = np.zeros((len(values), -(-values.shape[1] // per_word)), np.uint32)
    for column, line in enumerate(values.T):
        words[:, column // per_word] |= line.astype(np.uint32) << np.uint32(bits * (column % per_word))
    return words.view(np.int32)


def compressed(
    codes: Array, zeros: Array, scales: Array, bits: int, order: Array | None = None, words: bool = True
) -> tuple[Tensors, Array]:
    """A matrix of compressed-tensors, by the last part of its tensors' names, and its values f64[N, K].

    Args:
        codes, zeros: unsigned.
        order: a column's group, where they are out of order.
        words: ``pack-quantized``; else ``int-quantized``, of 8 bits.
    """
    centre, (rows, columns) = 1 << bits - 1, codes.shape
    groups = np.arange(columns) // (columns // scales.shape[1]) if order is None else order
    parts: Tensors = {"weight_scale": scales}
    if words:
        parts |= {"weight_packed": in_words(codes, bits), "weight_shape": np.array([rows, columns], np.int64)}
    else:
        parts["weight"] = (codes - centre).astype(np.int8)
    if (zeros != centre).any():
        packed = np.ascontiguousarray(in_words(zeros.T, bits).T) if words else (zeros - centre).astype(np.int8)
        parts["weight_zero_point"] = packed
    if order is not None:
        parts["weight_g_idx"] = order.astype(np.int32)
    values = (codes.astype(np.float64) - zeros[:, groups]) * scales.astype(np.float64)[:, groups]
    return parts, values


def nvfp4(rows: int, columns: int, seed: int, modelopt: bool) -> tuple[Tensors, Array]:
    """A matrix of any nibbles, by the last part of its tensors' names, and its values."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    fine = random.uniform(1, 400, (rows, columns // 16)).astype(ml_dtypes.float8_e4m3fn)
    whole = np.float32(7e-4 * columns**-0.5)
    values = np.stack([np.take(FP4, raw & 15), np.take(FP4, raw >> 4)], axis=-1).reshape(rows, columns)
    if modelopt:
        parts: Tensors = {"weight": raw, "weight_scale_2": np.array(whole), "input_scale": np.array(np.float32(1))}
        scales = fine.astype(np.float32) * whole
    else:
        parts = {"weight_packed": raw, "weight_global_scale": np.array([1 / whole], np.float32)}
        scales = fine.astype(np.float32) / parts["weight_global_scale"]
    return parts | {"weight_scale": fine}, values * np.repeat(scales, 16, axis=1).astype(np.float64)


def nf4(rows: int, columns: int, seed: int, nested: bool, block: int = 64) -> tuple[Tensors, Array]:
    """A matrix of any nibbles, by the last part of its tensors' names, and its values."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows * columns // 2, 1), dtype=np.uint8)
    levels = np.sort(random.uniform(-1, 1, 16)).astype(np.float32)
    count = rows * columns // block
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [rows, columns]}
    parts: Tensors = {"weight": raw, "weight.quant_map": levels}
    if nested:
        state |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": float(columns**-0.5)}
        parts["weight.absmax"] = random.integers(0, 256, count, dtype=np.uint8)
        parts["weight.nested_quant_map"] = np.linspace(-0.5, 0.5, 256, dtype=np.float32)
        parts["weight.nested_absmax"] = random.uniform(0.5, 1, -(-count // 8)).astype(np.float32) / columns**0.5
        outer = np.repeat(parts["weight.nested_absmax"], 8)[:count]
        peaks = parts["weight.nested_quant_map"][parts["weight.absmax"]] * outer + np.float32(columns**-0.5)
    else:
        peaks = parts["weight.absmax"] = random.uniform(0.5, 2, count).astype(np.float32) / columns**0.5
    told = np.frombuffer(json.dumps(state).encode(), np.uint8)
    nibbles = np.stack([raw[:, 0] >> 4, raw[:, 0] & 15], axis=-1).reshape(count, block)
    values = (levels[nibbles] * peaks[:, None]).reshape(rows, columns)
    return parts | {"weight.quant_state.bitsandbytes__nf4": told}, values.astype(np.float64)


def fp8(rows: int, columns: int, seed: int, scales: tuple[int, ...], ending: str = "_scale") -> tuple[Tensors, Array]:
    """A matrix with a scale for all of it, or for each row, by the last part of its tensors' names, and its values."""
    random = np.random.default_rng(seed)
    codes = random.normal(0, 100, (rows, columns)).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    own = np.asarray(random.uniform(0.5, 2, scales) / 100 / columns**0.5, ml_dtypes.bfloat16)
    factors = own.astype(np.float32).reshape(-1, 1)
    return {"weight": codes, f"weight{ending}": own}, (codes.astype(np.float32) * factors).astype(np.float64)


def save(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {}), encoding="utf-8")
    return folder
