"""How a checkpoint that is quantised already is packed, from its ``config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Protocol

from motley.daemon.models.compressed_keys import compressed_packing
from motley.daemon.models.keys import Keys
from motley.daemon.weights.checkpoints.bitsandbytes_checkpoint import BitsAndBytes
from motley.daemon.weights.checkpoints.compressed_checkpoint import CompressedInts
from motley.daemon.weights.checkpoints.fp8_checkpoint import Fp8Blocks
from motley.daemon.weights.checkpoints.mxfp4_checkpoint import Mxfp4Blocks
from motley.daemon.weights.checkpoints.nvfp4_checkpoint import Nvfp4Blocks
from motley.daemon.weights.checkpoints.packed import Packing
from motley.daemon.weights.checkpoints.tensor_files import Bring, TensorFiles

PACKED_GROUPS = (16, 32, 64, 128, 256)
"""Sizes of groups that packed checkpoints may have."""


class Packed(Protocol):
    """A way in which matrices are packed.

    Attributes:
        called: for messages.
        endings: what the names of some of a packed matrix's tensors end in.
    """

    endings: ClassVar[tuple[str, ...]]

    @property
    def called(self) -> str: ...

    def open(self, path: Path, bring: Bring | None = None) -> TensorFiles:
        """Open a checkpoint that is packed so."""


PACKINGS: tuple[type[Packed], ...] = (Packing, CompressedInts, Mxfp4Blocks, Fp8Blocks, Nvfp4Blocks, BitsAndBytes)
"""All of them."""


def read_packing(folder: Path) -> Packed | None:
    """How a checkpoint that is quantised already is packed, from the ``quantization_config``; None: it is not.

    Which tensors are packed, the checkpoint tells: ``modules_to_not_convert`` and ``ignore`` are not read.

    Raises:
        ConfigError: it is quantised in a way that cannot be read.
    """
    config = Keys.load(folder / "config.json")
    if config.values.get("quantization_config") is None:
        return None
    keys = config.inner("quantization_config")
    match keys.values.get("quant_method"):
        case "gptq":
            return _gptq(keys)
        case "awq":
            return _awq(keys)
        case "mxfp4":
            return Mxfp4Blocks()
        case "fp8":
            return _fp8_blocks(keys)
        case "compressed-tensors":
            return compressed_packing(keys)
        case "modelopt" | "modelopt_fp4":
            return _modelopt(keys)
        case "bitsandbytes":
            return _bitsandbytes(keys)
    raise keys.refusal(
        "quant_method",
        '"awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "modelopt" or "mxfp4"; or take the model '
        "unquantised, it can be quantised while loading",
    )


def _gptq(keys: Keys) -> Packing:
    bits, group = _sizes(keys)
    if bits not in (4, 8):
        raise keys.refusal("bits", "4 or 8 with GPTQ")
    layouts = {"gptq": 1, "gptq_v2": 0}
    keys.only("format", *layouts)
    layout = keys.one_of("checkpoint_format", layouts, default=keys.values.get("format") or "gptq")
    return Packing("gptq", bits, group, zero_offset=layouts[layout], reordered=keys.flag("desc_act", False))


def _awq(keys: Keys) -> Packing:
    bits, group = _sizes(keys)
    if bits != 4:
        raise keys.refusal("bits", "only 4 with AWQ")
    if not isinstance(version := keys.values.get("version", "gemm"), str) or version.lower() != "gemm":
        raise keys.refusal("version", 'only "gemm"')
    keys.only("zero_point", True)
    return Packing("awq", bits, group)


def _sizes(keys: Keys) -> tuple[int, int]:
    """Bits, and the columns of a group; 0: all of a row."""
    given = keys.values
    for key, also in (("bits", "w_bit"), ("group_size", "q_group_size")):
        if key not in given and also in given:
            given[key] = given[also]
    bits, group = keys.size("bits"), given.get("group_size")
    if group != -1 and (group not in PACKED_GROUPS or isinstance(group, bool)):
        raise keys.refusal("group_size", f"{', '.join(map(str, PACKED_GROUPS))}, or -1 for whole rows")
    keys.only("pack_dtype", "int32")
    keys.only("dynamic", {})
    keys.only("is_marlin_format", False)
    return bits, max(group, 0)


def _fp8_blocks(keys: Keys) -> Fp8Blocks:
    """What inputs were to be multiplied by (``"activation_scheme": "static"``) does not matter: ours stay floats."""
    keys.only("fmt", "e4m3", "float8_e4m3fn")
    keys.only("activation_scheme", "dynamic", "static")
    size = keys.get("weight_block_size")
    if size is None:
        return Fp8Blocks()
    if not (isinstance(size, list) and len(size) == 2 and all(type(each) is int and each > 0 for each in size)):
        raise keys.refusal("weight_block_size", "two whole numbers: the rows and columns that share a scale")
    return Fp8Blocks(*size)


def _modelopt(keys: Keys) -> Fp8Blocks | Nvfp4Blocks:
    if keys.one_of("quant_algo", ("FP8", "NVFP4")) == "FP8":
        return Fp8Blocks()
    keys.only("group_size", 16)
    return Nvfp4Blocks()


def _bitsandbytes(keys: Keys) -> BitsAndBytes:
    if keys.flag("load_in_8bit", False) or keys.flag("_load_in_8bit", False):
        raise keys.refusal("load_in_8bit", "only false: matrices of four bits (load_in_4bit)")
    keys.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), default="nf4")
    keys.only("bnb_4bit_quant_storage", "uint8")
    return BitsAndBytes()
