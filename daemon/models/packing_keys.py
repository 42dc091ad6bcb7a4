"""How a checkpoint that is quantised already is packed, from its ``config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from motley.daemon.models.keys import Keys
from motley.daemon.weights.checkpoints.fp8_checkpoint import Fp8Blocks
from motley.daemon.weights.checkpoints.packed import Packing

PACKED_GROUPS = (16, 32, 64, 128, 256)
"""Sizes of groups that packed checkpoints may have."""


def read_packing(folder: Path) -> Packing | Fp8Blocks | Literal["mxfp4"] | None:
    """How a checkpoint that is quantised already is packed, from the ``quantization_config``; None: it is not.

    Which tensors are packed, the checkpoint tells: ``modules_to_not_convert`` is not read.

    Raises:
        ConfigError: it is quantised in a way that cannot be read.
    """
    config = Keys.load(folder / "config.json")
    if config.values.get("quantization_config") is None:
        return None
    keys = config.inner("quantization_config")
    given = keys.values
    method = given.get("quant_method")
    if method == "mxfp4":
        return "mxfp4"
    if method == "fp8":
        return _fp8_blocks(keys)
    if method not in ("gptq", "awq"):
        raise keys.refusal(
            "quant_method",
            '"gptq", "awq", "fp8" or "mxfp4"; or take the model unquantised, it can be quantised while loading',
        )
    for key, also in (("bits", "w_bit"), ("group_size", "q_group_size")):
        if key not in given and also in given:
            given[key] = given[also]
    bits = keys.size("bits")
    group = given.get("group_size")
    if group != -1 and (group not in PACKED_GROUPS or isinstance(group, bool)):
        raise keys.refusal("group_size", f"{', '.join(map(str, PACKED_GROUPS))}, or -1 for whole rows")
    group = max(group, 0)
    keys.only("pack_dtype", "int32")
    keys.only("dynamic", {})
    keys.only("is_marlin_format", False)
    if method == "awq":
        if bits != 4:
            raise keys.refusal("bits", "only 4 with AWQ")
        if not isinstance(version := given.get("version", "gemm"), str) or version.lower() != "gemm":
            raise keys.refusal("version", 'only "gemm"')
        keys.only("zero_point", True)
        return Packing("awq", bits, group)
    if bits not in (4, 8):
        raise keys.refusal("bits", "4 or 8 with GPTQ")
    layouts = {"gptq": 1, "gptq_v2": 0}
    keys.only("format", *layouts)
    layout = keys.one_of("checkpoint_format", layouts, default=given.get("format") or "gptq")
    return Packing("gptq", bits, group, zero_offset=layouts[layout], reordered=keys.flag("desc_act", False))


def _fp8_blocks(keys: Keys) -> Fp8Blocks:
    keys.only("fmt", "e4m3", "float8_e4m3fn")
    keys.only("activation_scheme", "dynamic")
    size = keys.get("weight_block_size")
    whole = isinstance(size, list) and len(size) == 2 and all(type(each) is int and each > 0 for each in size)
    if not whole:
        raise keys.refusal("weight_block_size", "two whole numbers: the rows and columns that share a scale")
    return Fp8Blocks(*size)
