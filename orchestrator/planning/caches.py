"""The KV caches of a session: how much they hold, and the blocks that every rank keeps them in. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from motley.protocol import CACHE_BLOCK, CACHE_STRETCH


@dataclass(frozen=True)
class Blocks:
    """The blocks in which each rank keeps keys and values, of all its layers and KV heads alike.

    Attributes:
        count: how many there are in memory.
        tokens: positions in each.
        on_disk: how many more each rank has on its disk.
        on_nodes: how many more each rank has on another node.
    """

    count: int
    tokens: int
    on_disk: int = 0
    on_nodes: int = 0

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
        disk_tokens: what they may have besides on disks.
        node_tokens: what they may have besides on other nodes. All together they are at least `context`.
    """

    context: int
    tokens: int
    disk_tokens: int = 0
    node_tokens: int = 0

    @property
    def far_tokens(self) -> int:
        """What all sequences together may have outside of memory that ranks compute in."""
        return self.disk_tokens + self.node_tokens

    def blocks(self, whole: bool) -> Blocks:
        """The blocks that hold as much, the same on every rank.

        Args:
            whole: some rank's engine can only have a sequence's whole cache in one block; none are elsewhere then.
        """
        each = self.context if whole else CACHE_STRETCH if self.node_tokens else CACHE_BLOCK
        count, on_disk, on_nodes = (-(-own // each) for own in (self.tokens, self.disk_tokens, self.node_tokens))
        return Blocks(count, each, on_disk, on_nodes)
