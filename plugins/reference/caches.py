"""The keys or the values of a layer in blocks, as the reference engine keeps them, and how they are rounded there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

from motley.plugins.engine import SCALES, CacheBlocks, CacheSpec, FarBlocks, Span
from motley.plugins.reference.device import Array, ArrayModule, Device

LEAST = 2.0**-100
"""A head whose numbers are all smaller is kept as zeros in int8."""
CODES = 127
"""The largest code of int8; the smallest is its negative."""


class BlockedCache:
    """Keys or values of one layer in blocks. What is written is rounded to the format that the blocks have.

    Where that is fp32, numbers are kept as they are computed, be it in float64.
    """

    def __init__(
        self,
        device: Device,
        dtype: np.dtype[Any],
        blocks: CacheBlocks,
        spec: CacheSpec,
        name: str,
        far: FarBlocks | None,
    ) -> None:
        """All memory is allocated, and written to.

        Args:
            dtype: what floats are computed in.
            name: of the array of `CacheBlocks.arrays` that this is.
            far: where it has more blocks; fp32 keeps them in float32 there, be they computed in float64.
        """
        self._window = spec.window if blocks.is_windowed(spec) else 0
        """How many positions a row sees, where the layer has the blocks of those with a window; 0: it has not."""
        shape = (blocks.count_of(spec), spec.heads, blocks.tokens, spec.head_dim)
        kept = {"fp32": dtype, "fp16": np.float16, "int8": np.int8}[blocks.format]
        self._device, self._dtype, self._tokens = device, dtype, blocks.tokens
        self._numbers = device.xp.full(shape, 0, kept)
        self._scales: Array = None
        """f32[count, H, tokens, 1], where the format is int8."""
        if blocks.format == "int8":
            self._scales = device.xp.full((*shape[:3], 1), 0, np.float32)
        self._count, self._name = blocks.count, name
        self._far = None if self._window else far

    def gathered(self, span: Span) -> Array:
        """What a sequence has in its blocks, with room for the span's rows: floats [1, H, C, d]."""
        used = self._table(span)[: ceil((span.position + span.rows) / self._tokens)]
        unseen = max(0, span.position - self._window + 1) // self._tokens if self._window else 0
        used = np.where(np.arange(len(used)) < unseen, 0, used)
        scales = None if self._scales is None else self._blocks(self._scales, SCALES, used)
        numbers = self._widened(self._blocks(self._numbers, "", used), scales)
        numbers[:unseen] = 0
        count, heads, tokens, width = numbers.shape
        return numbers.transpose(1, 0, 2, 3).reshape(1, heads, count * tokens, width)

    def _table(self, span: Span) -> npt.NDArray[np.int32]:
        """The blocks of this layer that a sequence has."""
        if not self._window:
            return span.blocks
        assert span.windowed is not None
        return span.windowed

    def _blocks(self, near: Array, suffix: str, used: npt.NDArray[np.int32]) -> Array:
        """The blocks of these numbers, of which those that are not in `near` are far."""
        if self._far is None:
            return near[self._device.xp.asarray(used)]
        there = used >= self._count
        blocks = near[self._device.xp.asarray(np.where(there, 0, used))]
        if there.any():
            far = self._far.read(self._name + suffix)[used[there] - self._count]
            blocks[self._device.xp.asarray(there)] = self._device.xp.asarray(far).reshape(-1, *blocks.shape[1:])
        return blocks

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to far ones; see `motley.plugins.engine.Engine.move`."""
        if self._window:
            return
        assert self._far is not None
        for block, far in pairs:
            numbers = np.ascontiguousarray(self._device.to_host(self._numbers[block]))
            if numbers.dtype == np.float64:
                numbers = numbers.astype(np.float32)
            self._far.write(self._name, far - self._count, numbers)
            if self._scales is not None:
                scales = np.ascontiguousarray(self._device.to_host(self._scales[block, ..., 0]))
                self._far.write(self._name + SCALES, far - self._count, scales)

    def write(self, cache: Array, span: Span) -> None:
        """Keep the span's rows of a sequence, and round them.

        Args:
            cache: floats [1, H, C, d], all that the sequence has, with these rows in their places; rounded there too.
        """
        places = slice(span.position, span.position + span.rows)
        numbers, scales = self._rounded(cache[0, :, places])
        for block, within, rows in self._pieces(span):
            self._numbers[block, :, within] = numbers[:, rows]
            if scales is not None:
                self._scales[block, :, within] = scales[:, rows]
        cache[0, :, places] = self._widened(numbers, scales)

    def _rounded(self, heads: Array) -> tuple[Array, Array | None]:
        """What is kept of floats [..., d]: numbers of the format, and scales f32[..., 1] if it has any."""
        if self._scales is not None:
            return int8_codes(self._device.xp, heads)
        with np.errstate(over="ignore"):  # what is too large for float16 becomes infinite
            return heads.astype(self._numbers.dtype, copy=False), None

    def _widened(self, numbers: Array, scales: Array | None) -> Array:
        """The floats that kept numbers and scales stand for."""
        floats = numbers.astype(self._dtype, copy=False)
        return floats if scales is None else floats * scales.astype(self._dtype, copy=False)

    def _pieces(self, span: Span) -> Iterator[tuple[int, slice, slice]]:
        """The blocks that the span's rows go to: the number of each, which of its places, and which of the rows."""
        end, table = span.position + span.rows, self._table(span)
        for number in range(span.position // self._tokens, ceil(end / self._tokens)):
            begin = number * self._tokens
            first, last = max(begin, span.position), min(begin + self._tokens, end)
            rows = slice(first - span.position, last - span.position)
            yield int(table[number]), slice(first - begin, last - begin), rows


def int8_codes(xp: ArrayModule, heads: Array) -> tuple[Array, Array]:
    """Round numbers [..., d] to int8: codes i8[..., d] and scales f32[..., 1], as attention.c states it.

    With M the largest magnitude of the d numbers, their scale is M / 127 and a code is x * (127 / M), to nearest, half
    to even. They are zeros if M is below `LEAST`; if one is not finite, the scale is not a number.
    """
    most = xp.abs(heads).max(axis=-1, keepdims=True)
    finite = most < np.inf
    usable = finite & (most >= LEAST)
    divisor = xp.where(usable, most, 1.0)
    codes = xp.rint(xp.where(usable, heads, 0.0) * (CODES / divisor)).astype(np.int8)
    scales = xp.where(usable, most / CODES, xp.where(finite, 0.0, np.nan))
    return codes, scales.astype(np.float32)
