"""How compressed-tensors has packed a checkpoint, from the ``quantization_config`` of its ``config.json``."""

from __future__ import annotations

from typing import Any

from motley.daemon.models.keys import Keys
from motley.daemon.weights.checkpoints.compressed_checkpoint import CompressedInts
from motley.daemon.weights.checkpoints.fp8_checkpoint import Fp8Blocks
from motley.daemon.weights.checkpoints.nvfp4_checkpoint import Nvfp4Blocks

_INTS, _PACKED, _FP8, _NVFP4 = "int-quantized", "pack-quantized", "float-quantized", "nvfp4-pack-quantized"
_REORDERED = ("group", "dynamic")
"""What ``actorder`` says where columns are in groups out of order; other words say how their values were found."""


def compressed_packing(keys: Keys) -> CompressedInts | Fp8Blocks | Nvfp4Blocks:
    """How matrices are packed. What inputs would be rounded to is not read: ours stay what they are.

    Raises:
        ConfigError: in a way that cannot be read, or in several.
    """
    keys.only("quantization_status", "compressed", "frozen")
    if (keys.inner("sparsity_config").get("format") or "dense") != "dense":
        raise keys.refusal("sparsity_config", "only matrices that are not sparse")
    if keys.inner("transform_config").get("config_groups"):
        raise keys.refusal("transform_config", "only matrices that are not rotated")
    form, weights = _scheme(keys)
    bits = weights.size("num_bits", 0)
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block", "tensor_group"), default="tensor")
    if form == _NVFP4:
        weights.only("num_bits", 4)
        weights.only("group_size", 16)
        return Nvfp4Blocks()
    if form == _FP8:
        weights.only("type", "float")
        weights.only("num_bits", 8)
        return _fp8(weights, strategy)
    weights.only("type", "int")
    if bits not in ((4, 8) if form == _PACKED else (8,)):
        raise weights.refusal("num_bits", "4 or 8" if form == _PACKED else f"8 with {_INTS}")
    if strategy not in ("channel", "group"):
        raise weights.refusal("strategy", "channel, group")
    actorder = weights.get("actorder")
    if actorder not in (None, False, "weight", "static", *_REORDERED):
        raise weights.refusal("actorder", 'null, "weight" or "group"')
    return CompressedInts(
        bits,
        weights.size("group_size") if strategy == "group" else 0,
        words=form == _PACKED,
        symmetric=weights.flag("symmetric", True),
        reordered=actorder in _REORDERED and strategy == "group",
    )


def _scheme(keys: Keys) -> tuple[str, Keys]:
    """The format of all matrices that are packed, and what the config says of their weights."""
    groups = keys.inner("config_groups")
    forms = (_PACKED, _INTS, _FP8, _NVFP4)
    if not groups.values:
        raise keys.refusal("config_groups", "groups of matrices that are packed alike")
    found: list[tuple[Any, Any]] = []
    for name in groups.values:
        group = groups.inner(name)
        form = group.get("format") or keys.get("format")
        if form not in forms:
            raise keys.refusal("format", ", ".join(forms))
        found.append((form, group.inner("weights")))
    form, weights = found[0]
    if any(other != form or each.values != weights.values for other, each in found):
        raise keys.refusal("config_groups", "groups of matrices that are all packed alike")
    return form, weights


def _fp8(weights: Keys, strategy: str) -> Fp8Blocks:
    if strategy == "group":
        return Fp8Blocks(1, weights.size("group_size"))
    if strategy != "block":
        return Fp8Blocks()
    size = weights.get("block_structure")
    if isinstance(size, str) and all(each.isdecimal() for each in size.split("x")):
        size = [int(each) for each in size.split("x")]  # "128x128", as its first versions write
    if not (isinstance(size, list) and len(size) == 2 and all(type(each) is int and each > 0 for each in size)):
        raise weights.refusal("block_structure", "two whole numbers: the rows and columns that share a scale")
    return Fp8Blocks(*size)
