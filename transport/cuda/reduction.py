"""Which kernels sum the terms of an all-reduce, and what they are called with. Pure: nothing here calls CUDA."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..formats import Brain, Codec, Codecs, Exact, Half, Int8Blocks, WireFormat
from .compiler import DEVICE

SOURCES = (DEVICE, Path(__file__).with_name("reduction.cu"))
THREADS = 64
"""Threads per block: few, so that the sum of one token's terms has blocks for many multiprocessors."""
RUN = 8
"""Elements per thread, as in the source."""
ALIGNMENT = 16
"""Bytes: kernels read and write 128 bits at a time."""

_NAMES: dict[type[Codec], str] = {Exact: "fp32", Half: "fp16", Brain: "bf16", Int8Blocks: "int8"}


class Reduction:
    """The sum of one term per rank, in rank order and in FP32, with the bits of `motley.transport.reduce`.

    Attributes:
        term_bytes: of a rank's term as it travels.
        stride: bytes from one term to the next on the device, and in the staging.
        sum_kernel: name of the kernel that sums...
        encode_kernel: ...and of the one that makes the rank's own term; None if that is the buffer as it lies.
        blocks: how many blocks of `THREADS` threads either is launched with.
    """

    def __init__(self, wire_format: WireFormat, dtype: str, elements: int, rank: int, ranks: int) -> None:
        """`dtype`: of the buffer: float32, float16 or bfloat16.

        Raises:
            UsageError: elements of another type.
        """
        codecs = Codecs(wire_format)
        if dtype not in codecs or dtype == "float64":
            raise UsageError(f"a GPU sums float32, float16 and bfloat16, not {dtype}")
        native, wire, _ = codecs.of(dtype)
        name = _NAMES[type(wire)]
        self.term_bytes = wire.size(elements)
        self.stride = -(-self.term_bytes // ALIGNMENT) * ALIGNMENT
        self.sum_kernel = f"sum_{name}_{dtype}"
        self.encode_kernel = None if wire is native else f"encode_{name}_{dtype}"
        self.blocks = -(-elements // (RUN * THREADS))
        self._elements = elements
        self._rank = rank
        self._ranks = ranks

    def sum_arguments(self, own_term: int, others: int, out: int) -> tuple[Any, ...]:
        """Arguments of `sum_kernel`, for addresses on the device.

        Args:
            own_term: the rank's own term as it travels: the buffer itself, or what `encode_kernel` made.
            others: the terms of the other ranks, in rank order, `stride` bytes apart.
            out: takes the sum; may be `own_term`.
        """
        _check_aligned(own_term, others, out)
        numbers = ctypes.c_longlong(self.stride), ctypes.c_int(self._ranks), ctypes.c_int(self._rank)
        return (*_pointers(own_term, others), *numbers, *_pointers(out), ctypes.c_longlong(self._elements))

    def encode_arguments(self, values: int, payload: int) -> tuple[Any, ...]:
        """Arguments of `encode_kernel`, for addresses on the device: from `values` into ``payload[term_bytes]``."""
        _check_aligned(values, payload)
        return (*_pointers(values, payload), ctypes.c_longlong(self._elements))


def _pointers(*addresses: int) -> tuple[ctypes.c_void_p, ...]:
    return tuple(map(ctypes.c_void_p, addresses))


def _check_aligned(*addresses: int) -> None:
    if any(address % ALIGNMENT for address in addresses):
        raise UsageError(f"buffers of a GPU's sum must begin at multiples of {ALIGNMENT} bytes")
