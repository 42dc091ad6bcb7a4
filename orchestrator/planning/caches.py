"""The KV caches of a session: how much they hold, and the blocks that every rank keeps them in. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from motley.protocol import CACHE_BLOCK


@dataclass(frozen=True)
class Blocks:
    """The blocks in which each rank keeps keys and values, of all its layers and KV heads alike.

    Attributes:
        count: how many there are in memory.
        tokens: positions in each.
        on_disk: how many more each rank has on its disk.
    """

    count: int
    tokens: int
    on_disk: int = 0

    @property
    def room(self) -> int:
        """Tokens that all blocks in memory together have room for."""
        return self.count * self.tokens


@dataclass(frozen=True)
class Caches:
    """How much the KV caches of a session hold.

    Attributes:
        context: the longest sequence, in tokens.
        tokens: what all sequences together may have there, in memory.
        disk_tokens: what they may have besides on disks; with `tokens` at least `context`.
    """

    context: int
    tokens: int
    disk_tokens: int = 0

    def blocks(self, whole: bool) -> Blocks:
        """The blocks that hold as much, the same on every rank.

        Args:
            whole: some rank's engine can only have a sequence's whole cache in one block; then there are none on disks.
        """
        each = self.context if whole else CACHE_BLOCK
        return Blocks(-(-self.tokens // each), each, -(-self.disk_tokens // each))
