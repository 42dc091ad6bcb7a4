"""The memory of a cache holder: blocks of all layers of one rank, and what rows find in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from motley.daemon.caches.wire import CacheWireError, Question, stretches_in_a_tell, table_of
from motley.plugins.block_holder import F32, Array, HeldLayer
from motley.plugins.engine import CACHE_FORMATS
from motley.plugins.native.attention import FORMATS, SIGHT
from motley.plugins.native.matmul import Pool
from motley.plugins.native.summaries import Layer, Summaries


class HeldBlocks:
    """Blocks that are kept for a rank, each of one stretch of `SIGHT` positions. All memory is taken at once."""

    def __init__(self, layers: Sequence[HeldLayer], count: int, cache_format: str, pool: Pool) -> None:
        """
        Args:
            count: how many blocks.

        Raises:
            MemoryError: there is no room.
        """
        self._count = count
        self._layers = layers
        self._parts: list[Array] = []
        self._summaries: list[Summaries] = []
        dtype = FORMATS[CACHE_FORMATS.index(cache_format)]
        for layer in layers:
            shape = count, layer.kv_heads, SIGHT
            keys, values = (np.empty((*shape, layer.size), dtype) for _ in range(2))
            key_scales = np.empty(shape, np.float32) if dtype is np.int8 else None
            value_scales = np.empty(shape, np.float32) if dtype is np.int8 else None
            own = [part for part in (keys, key_scales, values, value_scales) if part is not None]
            for part in own:
                part.fill(0)
            self._parts += own
            self._summaries.append(Summaries(Layer(*layer), keys, values, key_scales, value_scales, pool))

    def keep(self, block: int, first: int, count: int, body: memoryview) -> None:
        """Take some parts of a block, as a KEEP has them.

        Raises:
            CacheWireError: there is no such block or part, or it has another size.
        """
        if block >= self._count or first + count > len(self._parts):
            raise CacheWireError(
                f"{count} parts from {first} on, of {len(self._parts)}, of block {block} of {self._count}"
            )
        parts = [part[block].data.cast("B") for part in self._parts[first : first + count]]
        if sum(map(len, parts)) != len(body):
            raise CacheWireError(f"parts of a block in {len(body)} bytes, which have {sum(map(len, parts))}")
        at = 0
        for part in parts:
            part[:] = body[at : at + len(part)]
            at += len(part)

    def layer(self, number: int) -> HeldLayer:
        """One of the layers.

        Raises:
            CacheWireError: there is no such layer.
        """
        if number >= len(self._layers):
            raise CacheWireError(f"layer {number} of {len(self._layers)}")
        return self._layers[number]

    def answer(self, number: int, question: Question) -> Iterator[tuple[int, F32]]:
        """What a question's rows find in a layer: summaries f32[n, rows, heads, d + 2] from a stretch of it on, that
        stretch's place first, until all are told.

        Raises:
            CacheWireError: the question makes no sense.
            MemoryError: there is no memory to answer.
        """
        layer = self.layer(number)
        table, most = table_of(question), stretches_in_a_tell(question, layer)
        for first in range(0, len(question.stretches), most):
            stretches = question.stretches[first : first + most]
            out = np.empty((len(stretches), len(question.queries), layer.heads, layer.size + 2), np.float32)
            try:
                self._summaries[number].answer(question.queries, question.position, table, stretches, out)
            except (IndexError, ValueError) as error:
                raise CacheWireError(str(error)) from error
            yield first, out
