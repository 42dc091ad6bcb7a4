"""How the terms of a sum look on the wire, and what is rounded when.

A session has one *wire format*. It is about sums only: what is merely moved (gathers, broadcasts, messages) arrives bit
by bit as it was. Sums are taken in FP32 whatever travels.

======  ================  =========================================================================================
format  bytes/element     what a float32 (float16, bfloat16) term or total becomes on its way
======  ================  =========================================================================================
fp32    4 (2)             itself; the sum of narrow elements is rounded once, at the end
bf16    2 (2)             its upper half, rounded to nearest, ties to even; float16 and bfloat16 stay as they are
int8    1.0625            blocks of 64 elements: an FP32 scale, the largest magnitude / 127, and x / scale as int8
======  ================  =========================================================================================

float64, the type of the reference engine, always travels as it is. In a one-shot sum a rank rounds its own term as the
others see it; a total that travels is taken by its owner as it travels. So all ranks hold the same bits in any format,
but in bf16 and int8 these bits depend on the algorithm.

A value that is not finite makes its whole int8 block NaN: never a number that looks right. A block whose largest
magnitude is below 1.5e-36 becomes zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

BLOCK = 64
"""Elements that share a scale."""
_CHUNK = 128 * BLOCK
"""Elements that are converted at a time: the working space stays in the innermost caches."""


class WireFormat(StrEnum):
    """How float32 values travel in sums; see the table above."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"


class Codec(ABC):
    """Converts between the numbers that are summed and their bytes. Has working space: one thread owns it."""

    accumulator: np.dtype[Any] = np.dtype("<f4")
    """What sums are taken in."""

    @abstractmethod
    def size(self, elements: int) -> int:
        """Bytes of so many elements."""

    @abstractmethod
    def encode(self, values: Array, payload: Bytes) -> None:
        """Round `values` (accumulator[n]) into ``payload`` (u8[size(n)])."""

    @abstractmethod
    def decode(self, payload: Bytes, out: Array) -> None:
        """The values of ``payload`` (u8[size(n)]) into `out` (accumulator[n])."""


class Exact(Codec):
    """float32 or float64, as it is."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.accumulator = dtype

    def size(self, elements: int) -> int:
        return elements * self.accumulator.itemsize

    def encode(self, values: Array, payload: Bytes) -> None:
        payload.view(self.accumulator)[:] = values

    def decode(self, payload: Bytes, out: Array) -> None:
        out[:] = payload.view(self.accumulator)


class Half(Codec):
    """IEEE float16; beyond its range a value becomes infinite."""

    def size(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: Array, payload: Bytes) -> None:
        with np.errstate(over="ignore"):
            payload.view(np.float16)[:] = values

    def decode(self, payload: Bytes, out: Array) -> None:
        out[:] = payload.view(np.float16)


class Brain(Codec):
    """bfloat16: the upper half of a float32."""

    def __init__(self) -> None:
        self._work = np.empty(_CHUNK, np.uint32)

    def size(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: Array, payload: Bytes) -> None:
        halves = payload.view(np.uint16)
        for start in range(0, len(values), _CHUNK):
            chunk = values[start : start + _CHUNK]
            bits, work = chunk.view(np.uint32), self._work[: len(chunk)]
            # Add just under half a unit of the last place that stays, or half of one if that makes it even.
            np.right_shift(bits, 16, out=work)
            np.bitwise_and(work, 1, out=work)
            np.add(work, 0x7FFF, out=work)
            np.add(work, bits, out=work)
            np.right_shift(work, 16, out=work)
            halves[start : start + _CHUNK] = work
            if np.isnan(np.maximum.reduce(chunk)):  # adding may have made an infinity of a NaN
                halves[start : start + _CHUNK][np.isnan(chunk)] = 0x7FC0

    def decode(self, payload: Bytes, out: Array) -> None:
        bits = out.view(np.uint32)
        bits[:] = payload.view(np.uint16)
        np.left_shift(bits, 16, out=bits)


class Int8Blocks(Codec):
    """int8 in blocks with a float32 scale each: first all scales, then all numbers."""

    def __init__(self) -> None:
        self._work = np.empty(_CHUNK, np.float32)

    def size(self, elements: int) -> int:
        return 4 * _blocks(elements) + elements

    def encode(self, values: Array, payload: Bytes) -> None:
        scales, numbers = _split(payload, len(values))
        for start in range(0, len(values), _CHUNK):
            chunk = values[start : start + _CHUNK]
            whole = len(chunk) // BLOCK * BLOCK
            for part in (slice(0, whole), slice(whole, len(chunk))):
                if part.start < part.stop:
                    x = chunk[part]
                    at = start + part.start
                    first = at // BLOCK
                    self._encode(x, scales[first : first + _blocks(len(x))], numbers[at : at + len(x)])

    def _encode(self, x: Floats, scales: Floats, numbers: npt.NDArray[np.int8]) -> None:
        """Encode whole blocks, or one that is shorter."""
        rows = x.reshape(len(scales), -1)
        work = self._work[: len(x)].reshape(rows.shape)
        np.abs(rows, out=work)
        np.maximum.reduce(work, axis=1, out=scales)
        np.multiply(scales, 1 / 127, out=scales)
        scales[scales < np.finfo(np.float32).tiny] = 0  # too coarse: the quotients could exceed 127
        divisors = np.where(scales == 0, np.float32(1), scales)
        broken = ~np.isfinite(scales)
        if broken.any():
            scales[broken] = np.nan
            with np.errstate(invalid="ignore"):
                np.divide(rows, divisors[:, None], out=work)
            work[broken] = 0
        else:
            np.divide(rows, divisors[:, None], out=work)
        np.rint(work, out=work)
        numbers[:] = work.reshape(-1)

    def decode(self, payload: Bytes, out: Array) -> None:
        scales, numbers = _split(payload, len(out))
        whole = len(out) // BLOCK * BLOCK
        if whole:
            rows = numbers[:whole].reshape(-1, BLOCK)
            np.multiply(rows, scales[: len(rows), None], out=out[:whole].reshape(rows.shape))
        if whole < len(out):
            np.multiply(numbers[whole:], scales[-1], out=out[whole:])


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _split(payload: Bytes, elements: int) -> tuple[Floats, npt.NDArray[np.int8]]:
    end = 4 * _blocks(elements)
    return payload[:end].view(np.float32), payload[end:].view(np.int8)


class Codecs:
    """The codecs of one communicator: what terms of each element type look like in memory and on the wire."""

    def __init__(self, wire_format: WireFormat) -> None:
        self._native: dict[str, Codec] = {
            "float32": Exact(np.dtype("<f4")),
            "float64": Exact(np.dtype("<f8")),
            "float16": Half(),
            "bfloat16": Brain(),
        }
        self._wire = dict(self._native)
        if wire_format is WireFormat.BF16:
            self._wire["float32"] = self._native["bfloat16"]
        elif wire_format is WireFormat.INT8:
            self._wire |= dict.fromkeys(("float32", "float16", "bfloat16"), Int8Blocks())

    def of(self, name: str) -> tuple[Codec, Codec, Codec]:
        """How elements of the type of this name lie in memory, how they travel, and how sums of some terms travel.

        The last are not rounded to a narrow element type.

        Raises:
            KeyError: they cannot be summed.
        """
        native, wire = self._native[name], self._wire[name]
        narrow = wire is native and isinstance(native, Half | Brain)
        return native, wire, self._native["float32"] if narrow else wire

    def __contains__(self, name: str) -> bool:
        """Elements of the type of this name can be summed."""
        return name in self._native
