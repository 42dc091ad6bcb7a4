"""Which cache blocks hold which prefixes: trees, in which each block hangs on the block with the tokens before its own.

So the blocks of a prefix are a path down from a root. All are whole, except that a leaf may have fewer tokens, where a
sequence ended in it. Who uses a block, and what becomes of it, `motley.daemon.rank.blocks.cache_blocks` says.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from weakref import WeakValueDictionary

LOOKS = 16
"""How many blocks that hang on the same one are looked at, before and after the place of the wanted tokens in their
order, for one that begins like these. The nearest begin most alike, so more looks would hardly find a better one."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Node:
    """A block in a tree, or the root of a tree, which is no block.

    Attributes:
        tokens: what the block holds.
        block: its number.
        above: what it hangs on, whose tokens come before its own; None: it is the root.
        below: what hangs on it, ordered by their tokens, of which no two have the same.
        users: running sequences that have it.
    """

    tokens: tuple[int, ...] = ()
    block: int = -1
    above: Node | None = None
    below: list[Node] = field(default_factory=list)
    users: int = 0

    def place(self, tokens: tuple[int, ...]) -> int:
        """Where in `below` a block with these tokens is, or would be."""
        return bisect_left(self.below, tokens, key=attrgetter("tokens"))

    def child(self, tokens: tuple[int, ...]) -> Node | None:
        """The block below that holds exactly these tokens."""
        near = self.below[(place := self.place(tokens)) : place + 1]
        return near[0] if near and near[0].tokens == tokens else None

    def begun_by(self, tokens: tuple[int, ...], near: int) -> tuple[Node, int] | None:
        """Choose a block below for a sequence with these tokens to write on, after those that both have in common.

        Its number must be below `near`, nobody may use it, and nothing may hang on it. What else it holds is lost, and
        may be a conversation that goes on one day; so at least half of what it holds, or of `tokens`, has to be common.
        None: there is no such.

        Returns:
            The block that has most in common, and how many tokens that are.
        """
        place = self.place(tokens)
        looked_at = self.below[max(0, place - LOOKS) : place + LOOKS]
        free = [node for node in looked_at if node.block < near and not (node.users or node.below)]
        begun = [(node, _common(node.tokens, tokens)) for node in free]
        worth = [(node, common) for node, common in begun if 2 * common >= max(1, min(len(node.tokens), len(tokens)))]
        return max(worth, key=lambda found: (found[1], -len(found[0].tokens)), default=None)


class BlockTrees:
    """The prefixes that blocks hold. Pure.

    Attributes:
        nodes: all that are in the trees, by block.
        roots: by number; a root on which nothing hangs is gone.
    """

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self.roots: WeakValueDictionary[int, Node] = WeakValueDictionary()

    def root(self, root: int) -> Node:
        """The root of a number, which is made if it is not there."""
        return self.roots.setdefault(root, Node())

    def longest_path(
        self, sequence_tokens: Sequence[int], root: int, block_tokens: int, near: int
    ) -> tuple[list[Node], Node | None, int]:
        """Follow a sequence down from a root; the last of its tokens is never among those found.

        Args:
            sequence_tokens: all its tokens.
            root: number of the root.
            block_tokens: in a whole block.
            near: only a block of a lower number can be one to go on in, see `Node.begun_by`.

        Returns:
            Whole blocks, perhaps one to go on in after its first tokens, and how many tokens all of these have in
            common with the sequence.
        """
        path: list[Node] = []
        found = 0
        node = self.roots.get(root)
        while node is not None:
            wanted = tuple(sequence_tokens[found : min(found + block_tokens, len(sequence_tokens) - 1)])
            whole = node.child(wanted) if len(wanted) == block_tokens else None
            if whole is None:
                leaf, common = node.begun_by(wanted, near) or (None, 0)
                return path, leaf, found + common
            path.append(whole)
            found += block_tokens
            node = whole
        return path, None, found

    def insert(self, above: Node, tokens: tuple[int, ...], block: int, users: int) -> Node:
        """Hang a block on another one, or on a root; `users` as `Node` has them."""
        node = self.nodes[block] = Node(tokens, block, above, users=users)
        above.below.insert(above.place(tokens), node)
        return node

    def renumber(self, block: int, new: int) -> Node:
        """Have what a block holds in another one, which has been copied."""
        node = self.nodes[new] = self.nodes.pop(block)
        node.block = new
        return node

    def last_below(self, block: int) -> Node:
        """A leaf that hangs on a block, or on one that does, and so on; the block itself if nothing does."""
        node = self.nodes[block]
        while node.below:
            node = node.below[0]
        return node

    def remove(self, block: int) -> None:
        """Take a leaf that nobody uses out of its tree."""
        node = self.nodes.pop(block)
        assert node.above is not None
        assert not node.users
        assert not node.below
        del node.above.below[node.above.place(node.tokens)]


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """How many tokens two sequences have in common before they differ."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))
