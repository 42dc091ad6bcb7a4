"""What an engine needs of another machine that keeps blocks of its rank's KV caches, and attends to them for it.

The query travels, not the cache: for each layer of a step the engine asks with the queries of its rows, and is told
for each stretch of positions what they find there (`motley.plugins.native.summaries`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
Array = npt.NDArray[Any]


class HeldLayer(NamedTuple):
    """What the attention of one layer is, of this rank's heads, as far as a holder must know it."""

    heads: int
    kv_heads: int
    size: int
    """d, of a head."""
    window: int
    """How many positions a token sees, its own among them; 0: all."""
    soft_cap: float
    """0: there is none."""
    chunked: bool = False
    """Positions are cut in chunks of `window`, and a token sees those of its own chunk alone."""

    def first_seen(self, position: int) -> int:
        """The first position that a token at `position` sees."""
        if self.chunked:
            return position // self.window * self.window
        return max(0, position - self.window + 1) if self.window else 0


class Asked(NamedTuple):
    """Rows of one sequence, and what is wanted for them in one layer.

    Attributes:
        position: where the first of the rows stands.
        stretches: i32[F], ascending: those whose summaries are wanted, all of them kept by the holder.
        blocks: i32[F], of each stretch the block in which the holder keeps it, by the number that it has there.
        queries: f32[rows, heads, d], turned and scaled.
        told: f32[F, rows, heads, d + 2], where the summaries are to be.
    """

    position: int
    stretches: I32
    blocks: I32
    queries: F32
    told: F32


class BlockHolder(Protocol):
    """A machine that keeps some blocks of one rank's caches, of all layers. A block is one stretch of positions
    (`motley.plugins.native.attention.SIGHT`), so a stretch is either there or here.

    Its loss is no error: once it is `lost`, nothing is asked of it, and what it should have told is zeros. Whoever
    calls the engine looks at `lost` after a step, and computes again what was attended to then.
    """

    @property
    def count(self) -> int:
        """How many blocks it has room for."""

    @property
    def lost(self) -> str:
        """Why it is gone; empty while it is there."""

    def begin(self, layers: Sequence[HeldLayer], cache_format: str) -> None:
        """Tell it what it is to keep, and wait until it has made room. To be called once, first.

        Args:
            cache_format: of `motley.plugins.engine.CACHE_FORMATS`.

        Raises:
            motley.transport.TransportError: it cannot be reached, or has no room.
        """

    def keep(self, block: int, parts: Sequence[Array]) -> None:
        """Have it keep a block, and wait until it does.

        Args:
            block: its number there.
            parts: as `motley.plugins.engine.CacheBlocks.arrays` has them: for each layer, in order, keys
                [kv_heads, tokens, d], of int8 their scales, and the same of values.
        """

    def ask(self, layer: int, asked: Sequence[Asked]) -> None:
        """Ask for summaries; does not wait for them. `layer` is a place in those that `begin` was given."""

    def take(self) -> None:
        """Wait until what was asked for last is told."""
