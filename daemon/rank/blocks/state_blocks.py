"""The blocks of a model whose layers keep recurrent states, and the states that are remembered at some block borders.

Keys and values of a prefix are of no use without the states after it. A state stands where its sequence stands, so it
is copied when a sequence is at the end of a block, to a *place*, of which there are a fixed number; a new sequence
begins with a copy of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from motley.daemon.rank.blocks.block_trees import Node
from motley.daemon.rank.blocks.cache_blocks import BlockStore
from motley.daemon.rank.blocks.far_room import FarTier
from motley.daemon.rank.blocks.window_blocks import WindowBlocks


class StateBlockStore(BlockStore):
    """A `BlockStore` that finds a prefix as far as the states after it are remembered.

    When places run out, the state goes that was not begun with for longest; a state goes with its block, too.
    """

    def __init__(
        self,
        near: int,
        tokens: int,
        far: Sequence[FarTier] = (),
        windows: WindowBlocks | None = None,
        places: range = range(0),
    ) -> None:
        """`places`: the numbers of those that states can be remembered in; the others as `BlockStore`."""
        super().__init__(near, tokens, far, windows)
        self._free_places = [*places]
        self._remembered: OrderedDict[Node, int] = OrderedDict()
        """The places of the states after blocks that can be found, least recently used first."""

    def borders(self, sequence_tokens: Sequence[int], root: int) -> set[int]:
        """Positions where it is worth while to remember the state of a sequence with these tokens: where another one
        has gone on otherwise, and at its last whole block: somebody may go on from there."""
        if not (self._free_places or self._remembered):
            return set()
        path, _, _ = super()._path(sequence_tokens, root)
        last = (len(sequence_tokens) - 1) // self.tokens
        return {blocks * self.tokens for blocks in (len(path), last) if blocks}

    def remember(self, sequence_tokens: Sequence[int], root: int) -> int | None:
        """Remember the state of a sequence that stands at the end of a published block.

        Args:
            sequence_tokens: those before that position, whole blocks.

        Returns:
            The place to copy it to; None: it is remembered already, or it cannot be.
        """
        node = self._trees.roots.get(root)
        for index in range(len(sequence_tokens) // self.tokens):
            node = node.child(self._tokens_of(sequence_tokens, index)) if node is not None else None
        if node is None or node.above is None or node in self._remembered:
            return None
        if not self._free_places:
            if not self._remembered:
                return None
            self._free_places.append(self._remembered.popitem(last=False)[1])
        self._remembered[node] = self._free_places.pop()
        return self._remembered[node]

    def remembered(self, block: int) -> int:
        """The place of the state after the last block that `find` has found."""
        node = self._trees.nodes[block]
        self._remembered.move_to_end(node)
        return self._remembered[node]

    def _path(self, sequence_tokens: Sequence[int], root: int) -> tuple[list[Node], Node | None, int]:
        path, _, _ = super()._path(sequence_tokens, root)
        while path and not (path[-1] in self._remembered and self._is_seen(path)):
            path.pop()
        return path, None, len(path) * self.tokens

    def _is_seen(self, path: Sequence[Node]) -> bool:
        """Whether layers with a window have what the rows after these blocks see."""
        return self._windows is None or self._windows.usable([node.block for node in path]) == len(path)

    def _remove(self, block: int) -> None:
        place = self._remembered.pop(self._trees.nodes[block], None)
        if place is not None:
            self._free_places.append(place)
        super()._remove(block)
