"""The blocks of a model whose layers keep recurrent states: no sequence can begin with what another has left there.

Keys and values would be there, but not the states after them.
"""

from __future__ import annotations

from collections.abc import Sequence

from motley.daemon.rank.blocks.cache_blocks import BlockStore


class ForgetfulBlockStore(BlockStore):
    """A `BlockStore` in which nothing is ever found: blocks that a sequence gives back are free."""

    def publish(self, sequence_tokens: Sequence[int], blocks: Sequence[int], root: int = 0) -> None:
        """Do nothing."""

    def give_back(self, sequence_tokens: Sequence[int], blocks: Sequence[int], root: int = 0, passed: int = 0) -> None:
        """Take back the blocks of a sequence, and forget what they hold; arguments and errors as `BlockStore`."""
        super().give_back((), blocks, root, passed)
