"""The far blocks of a session's KV caches, tier by tier: on disks, on other nodes. Pure, but for what a tier's `copies`
does, and the clock that says when it may be asked again.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

Pairs = Sequence[tuple[int, int]]
"""Numbers of blocks: of one, and of the far one that it is copied to."""
RETRY_S = 5.0
"""Seconds after which blocks are copied to a tier again, once a rank could not."""


class FarTier:
    """Far blocks that are all in one place: on every rank's disk, or each rank's on another node.

    Attributes:
        numbers: of the blocks.
        place: ``disk`` or ``nodes``.
        block_s: seconds that a step takes for each of these blocks which it uses, as measured on the slowest rank; 0:
            nobody has measured it.
        trouble: why blocks could not be copied there the last time; empty: they could.
    """

    def __init__(self, numbers: range, place: str, copies: Callable[[Pairs], str]) -> None:
        """`copies`: has every rank copy near blocks to those of this tier, one after another; why that cannot be done
        now, near ones being unharmed, or nothing."""
        self.numbers = numbers
        self.place = place
        self.block_s = 0.0
        self.trouble = ""
        self._copies = copies
        self._due = 0.0
        """From when on blocks may be copied again."""

    @property
    def is_writable(self) -> bool:
        """Whether it is worth while to copy blocks there now."""
        return time.perf_counter() >= self._due

    def copy(self, pairs: Pairs) -> bool:
        """Have every rank copy near blocks to those of this tier; whether all could.

        Raises:
            Exception: what `copies` raises.
        """
        self.trouble = self._copies(pairs)
        if self.trouble:
            self._due = time.perf_counter() + RETRY_S
        return not self.trouble


class FarRoom:
    """Which far blocks are free, and which are *unused*: they keep prefixes that no sequence uses."""

    def __init__(self, tiers: Sequence[FarTier]) -> None:
        """`tiers`: those that are to be filled first in front."""
        self._free = {tier: [*tier.numbers][::-1] for tier in tiers}
        self._unused: dict[FarTier, OrderedDict[int, int]] = {tier: OrderedDict() for tier in tiers}
        """The unused blocks of each tier, those that have been so for longest first, each with its turn among all."""
        self._turns = itertools.count()

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return sum(len(tier.numbers) for tier in self._free)

    @property
    def free(self) -> int:
        """How many of them hold nothing."""
        return sum(map(len, self._free.values()))

    @property
    def used(self) -> dict[FarTier, int]:
        """How many blocks of each tier hold something; those that are filled first in front."""
        return {tier: len(tier.numbers) - len(free) for tier, free in self._free.items()}

    def writable(self) -> list[FarTier]:
        """The tiers that blocks can be copied to now."""
        return [tier for tier in self._free if tier.is_writable]

    def free_in(self, tiers: Collection[FarTier]) -> int:
        """How many blocks of some tiers hold nothing."""
        return sum(len(self._free[tier]) for tier in tiers)

    @property
    def unused(self) -> int:
        """How many blocks are unused."""
        return sum(map(len, self._unused.values()))

    def unused_in(self, tier: FarTier) -> list[int]:
        """The unused blocks of a tier."""
        return [*self._unused[tier]]

    def oldest_unused(self, tiers: Collection[FarTier]) -> int | None:
        """The block that has been unused for longest in some tiers."""
        first = [next(iter(self._unused[tier].items())) for tier in tiers if self._unused[tier]]
        return min(first, key=lambda each: each[1])[0] if first else None

    def add_unused(self, block: int) -> None:
        """A block is unused from now on."""
        self._unused[self._tier_of(block)][block] = next(self._turns)

    def remove_unused(self, block: int) -> None:
        """An unused block is used, or holds nothing any more."""
        del self._unused[self._tier_of(block)][block]

    def take(self, tier: FarTier, count: int) -> list[int]:
        """Take at most so many free blocks of a tier."""
        free = self._free[tier]
        return [free.pop() for _ in range(min(count, len(free)))]

    def put_back(self, block: int) -> None:
        """A block holds nothing any more."""
        self._free[self._tier_of(block)].append(block)

    def lose(self, tier: FarTier) -> None:
        """Go on without a tier, none of whose blocks holds anything."""
        free = self._free.pop(tier)
        del self._unused[tier]
        assert len(free) == len(tier.numbers), "a running sequence has far blocks that are lost"

    def _tier_of(self, block: int) -> FarTier:
        return next(tier for tier in self._free if block in tier.numbers)
