"""Who has which blocks of a session's KV caches, and which prefixes are in them that the next sequences may begin with.

Every engine of a session keeps keys and values in blocks of the same numbers (`motley.plugins.engine.CacheBlocks`).
Rank 0 has the one `BlockStore` and tells every rank which blocks a sequence has.

Blocks that can be found form trees (`motley.daemon.rank.blocks.block_trees`). A sequence that uses a block uses all
blocks above it too. So if nobody uses a block, nobody uses those below it either.

Blocks are *near*, in the memory that engines compute in, or *far*: only read. When near ones are used up, what has been
written is copied to far ones, tier after tier (`motley.daemon.rank.blocks.far_room`); it stays there until it is
dropped.

Layers with a window may have their own blocks, which come and go with these: `motley.daemon.rank.blocks.window_blocks`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from motley.daemon.rank.blocks.block_trees import BlockTrees, Node
from motley.daemon.rank.blocks.far_room import FarRoom, FarTier, Pairs
from motley.daemon.rank.blocks.window_blocks import WindowBlocks


class Placed(NamedTuple):
    """A block in a tree.

    Attributes:
        number: its own.
        above: that of the block that it hangs on; -1: it hangs on the root.
        root: number of the root, see `BlockStore.find`.
        tokens: what it holds.
    """

    number: int
    above: int
    root: int
    tokens: tuple[int, ...]


class BlockStore:
    """The blocks of a session's KV caches: each is free, used by running sequences, or keeps a prefix that nobody uses.

    Pure: does no I/O and touches no clock, but for what its far tiers do. A call costs as much as the blocks that it is
    about; `publish` as much as those that are new. Whoever calls keeps the list of blocks of each running sequence:
    those that `find` gave, then those of `take`, in the order of their positions, some renumbered by `move`. And it
    keeps how many of the first of these it has let pass (`let_pass`), of which layers with a window see none any more.

    Attributes:
        near: how many near blocks there are.
        tokens: positions in each block.
        far: the far ones.
    """

    def __init__(
        self, near: int, tokens: int, far: Sequence[FarTier] = (), windows: WindowBlocks | None = None
    ) -> None:
        """
        Args:
            near: how many near blocks there are.
            tokens: positions in each.
            far: the tiers of far ones, whose numbers follow those of near ones; those that are to be filled first in
                front.
            windows: the blocks of layers with a window; None: these have the same as other layers.

        Raises:
            ValueError: one of them is not positive.
        """
        if near < 1 or tokens < 1:
            raise ValueError(f"there cannot be {near} blocks of {tokens} tokens; at least one of one token is needed")
        self.near = near
        self.tokens = tokens
        self._windows = windows
        self._free = [*range(near)][::-1]
        self.far = FarRoom(far)
        self._alone: set[int] = set()
        """Blocks that one running sequence has and the trees have not."""
        self._trees = BlockTrees()
        """The blocks that can be found."""
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Near ones of them that no sequence has, least recently used first, and each before what it hangs on."""

    @property
    def available(self) -> int:
        """How many blocks running sequences do not have: free ones and those that keep prefixes nobody uses."""
        return self.takeable_near + self.far.free + self.far.unused

    @property
    def takeable(self) -> int:
        """How many of those `take` could give now: near ones, for which layers with a window have some too."""
        return self.takeable_near if self._windows is None else min(self.takeable_near, self._windows.available)

    @property
    def takeable_near(self) -> int:
        """How many near blocks running sequences do not have."""
        return len(self._free) + len(self._unused)

    @property
    def used(self) -> int:
        """How many blocks running sequences have."""
        return self.near + self.far.count - self.available

    @property
    def cached(self) -> int:
        """How many blocks keep prefixes that nobody uses."""
        return len(self._unused) + self.far.unused

    @property
    def windowed_blocks(self) -> tuple[int, int]:
        """How many blocks of their own layers with a window have, and how many of them running sequences need."""
        windows = self._windows
        return (0, 0) if windows is None else (windows.count, windows.count - windows.available)

    def find(self, sequence_tokens: Sequence[int], root: int = 0) -> tuple[list[int], int]:
        """Find the blocks that already hold a prefix of a new sequence. It uses them from now on, until `give_back`.

        The last of its tokens is never among those found, since its logits have to be computed. Whole blocks are shared
        by any number of sequences. Of the last block found, only the first tokens may be those of the sequence: that
        one is then near, the sequence's alone and no longer to be found, so it can be written on after them.

        Args:
            sequence_tokens: all tokens of the sequence.
            root: a number for what it is computed with, see `motley.daemon.rank.blocks.roots.root_of`. Sequences of
                different roots have no prefix in common.

        Returns:
            The blocks, and how many tokens they hold of the sequence, counted from its first.
        """
        path, leaf, found = self._path(sequence_tokens, root)
        for node in path:
            self._use(node)
        if leaf is not None:
            self._remove(leaf.block)
            self._alone.add(leaf.block)
        blocks = [node.block for node in (*path, *([leaf] if leaf else []))]
        if self._windows is not None:
            self._windows.hold(blocks[self._windows.first_seen(found) :])
        return blocks, found

    def first_seen(self, position: int) -> int:
        """How many of a sequence's first blocks are seen by no layer with a window, from a position on; 0 if such
        layers have the same blocks as others."""
        return 0 if self._windows is None else self._windows.first_seen(position)

    def let_pass(self, blocks: Sequence[int], passed: int, position: int) -> int:
        """Let others have the blocks of layers with a window that the next rows of a running sequence no longer see.

        Args:
            blocks: all its blocks.
            passed: how many of them have been let pass; at first `first_seen` of what was found.
            position: its tokens before this one have been computed.

        Returns:
            How many have been let pass now.
        """
        seen = self.first_seen(position)
        if self._windows is not None and seen > passed:
            self._windows.release(blocks[passed:seen])
            return seen
        return passed

    def windowed(self, blocks: Iterable[int]) -> list[int]:
        """The numbers that layers with a window have for some blocks; -1: none. Empty, if they have no own ones."""
        return [] if self._windows is None else self._windows.numbers(blocks)

    def most_blocks(self, position: int, passed: int) -> int:
        """How many blocks a sequence at a position may have at a time, which has let so many pass."""
        most = position // self.tokens + self.near
        return most if self._windows is None else min(most, passed + self._windows.count)

    def fits(self, sequence_tokens: Sequence[int], root: int, spare: int) -> bool:
        """Whether there are blocks for all tokens of a new sequence, and so many to spare. Nothing changes.

        Args:
            sequence_tokens, root: as for `find`.
            spare: so many blocks must still be available afterwards.
        """
        path, leaf, found = self._path(sequence_tokens, root)
        lacking = self._needed(sequence_tokens) - len(path) - (leaf is not None)
        if self._windows is not None:
            seen = [node.block for node in (*path, *([leaf] if leaf else []))][self._windows.first_seen(found) :]
            if not self._windows.fits(seen, lacking):
                return False
        return lacking + spare <= self.available - sum(not node.users for node in path) - (leaf is not None)

    def take(self, count: int) -> list[int] | None:
        """Take near blocks for one running sequence alone.

        Prefixes that nobody uses make room, the least recently used one first, its end before its beginning. They move
        far; if there is no room, the least recently used far ones are dropped, or they are, where there is none.

        Returns:
            As many blocks as asked for, whatever they held; None, and nothing has changed: fewer are `takeable`.

        Raises:
            ValueError: `count` is negative.
        """
        if count < 0:
            raise ValueError(f"{count} blocks cannot be taken")
        if count > self.takeable:
            return None
        if len(self._free) < count:
            self._move_unused(count)
        taken = [self._free.pop() for _ in range(count)]
        self._alone.update(taken)
        if self._windows is not None:
            self._windows.add(taken)
        return taken

    def move(self, blocks: Iterable[int]) -> dict[int, int]:
        """Move near blocks of running sequences far, as far as there is room: their near ones are free.

        Args:
            blocks: all their places have been written, those that are to go first in front.

        Returns:
            The new numbers by the old ones; none if there is no room, or they cannot be copied now.
        """
        left, moved = [*blocks], dict[int, int]()
        goal, able = len(self._free) + len(left), self.far.writable()
        while able and len(self._free) < goal:
            for block, far in self._copied(left[len(moved) :], goal, able):
                moved[block] = far
                if block in self._alone:
                    self._alone.remove(block)
                    self._alone.add(far)
                    if self._windows is not None:
                        self._windows.renumber(block, far)
                else:
                    self._renumber(block, far)
        return moved

    def lose_far(self, tier: FarTier) -> None:
        """Go on without a tier of far blocks. What they hold is lost, and what hangs on it; no running sequence has any
        of them."""
        for block in self.far.unused_in(tier):
            while block in self._trees.nodes:
                self._drop_leaf(block)
        self.far.lose(tier)

    def publish(self, sequence_tokens: Sequence[int], blocks: Sequence[int], root: int = 0) -> None:
        """Let other sequences find the whole blocks of a running one. To be called when some have become whole.

        Where a tree has another block for the same tokens already, the sequence keeps its own, and what follows is
        published only if that other one has gone when this is called again. But one that nobody uses gives way if
        layers with a window have lost what they had for it.

        Args:
            sequence_tokens: those of its tokens whose keys and values are in its blocks, from its first.
            blocks: all its blocks.
            root: see `find`; always the same for one sequence.

        Raises:
            ValueError: the tokens need more blocks, or one of the blocks is not the sequence's.
        """
        self._check_room(sequence_tokens, blocks)
        published = self._published(blocks)
        node = self._trees.nodes[blocks[published - 1]] if published else self._trees.root(root)
        if published and not node.users:
            raise ValueError(f"blocks cannot be published after block {node.block}, which no sequence uses")
        for index in range(published, len(sequence_tokens) // self.tokens):
            tokens = self._tokens_of(sequence_tokens, index)
            same = node.child(tokens)
            if same is not None and not self._is_worse(same, blocks[index]):
                return
            if blocks[index] not in self._alone:
                raise ValueError(f"block {blocks[index]} cannot be published: no sequence has it for itself")
            node = self._insert(node, tokens, blocks[index]) if same is None else self._replace(same, blocks[index])

    def give_back(self, sequence_tokens: Sequence[int], blocks: Sequence[int], root: int = 0, passed: int = 0) -> None:
        """Take back the blocks of a sequence, which is over or waits once more.

        What they hold of it can be found until the room is needed. Blocks of its own become free where the tree has
        others for the same tokens, and where they hold none.

        Args:
            sequence_tokens: those of its tokens whose keys and values are in its blocks, from its first.
            blocks: all its blocks; they are no longer its own.
            root: see `find`; always the same for one sequence.
            passed: how many of them have been let pass.

        Raises:
            ValueError: nothing has changed: the tokens need more blocks, or these are not those of a running sequence.
        """
        self._check_room(sequence_tokens, blocks)
        published = self._published(blocks)
        node = self._trees.root(root)
        for block in blocks[:published]:
            shared = self._trees.nodes.get(block)
            if shared is None or shared.above is not node or not shared.users:
                raise ValueError(f"block {block} cannot be given back: no sequence uses it there")
            node = shared
        own = dict.fromkeys(blocks[published:])
        if len(own) != len(blocks) - published or not self._alone.issuperset(own):
            raise ValueError(f"blocks {[*blocks[published:]]} cannot be given back: no sequence has them for itself")

        if self._windows is not None:
            self._windows.release(blocks[passed:])
        for index in range(published, self._needed(sequence_tokens)):
            tokens = self._tokens_of(sequence_tokens, index)
            same = node.child(tokens)
            if same is None:
                del own[blocks[index]]
                node = self._insert(node, tokens, blocks[index])
            else:
                if self._windows is not None:
                    self._windows.renumber(blocks[index], same.block)
                self._use(same)
                node = same
        self._alone.difference_update(own)
        for block in own:
            self._put_back(block)
        while node.above is not None:
            node.users -= 1
            if not node.users:
                self._add_unused(node.block)
            node = node.above

    def give_back_broken(self, blocks: Sequence[int], root: int = 0, passed: int = 0) -> None:
        """Take back the blocks of a sequence whose keys and values may be wrong: nobody is to find them again.

        But those that other sequences use, or that prefixes of others hang on, stay as they are.

        Args:
            blocks: all its blocks; they are no longer its own.
            root: see `find`; always the same for one sequence.
            passed: how many of them have been let pass.

        Raises:
            ValueError: nothing has changed: these are not the blocks of a running sequence.
        """
        published = blocks[: self._published(blocks)]
        self.give_back((), blocks, root, passed)
        for block in reversed(published):
            if self._trees.nodes[block].users or self._trees.nodes[block].below:
                return
            self._remove(block)
            self._put_back(block)

    def placed(self) -> list[Placed]:
        """The near blocks that can be found without any far one, each after the one that it hangs on."""
        above = [(root, -1, node) for root, top in self._trees.roots.items() for node in top.below]
        placed = []
        for root, before, node in above:  # which grows
            if node.block < self.near:
                placed.append(Placed(node.block, before, root, node.tokens))
                above += [(root, node.block, below) for below in node.below]
        return placed

    def adopt(self, placed: Sequence[Placed], windowed: Mapping[int, int]) -> None:
        """Begin with blocks that hold prefixes already, before any sequence has had one.

        Args:
            placed: as `placed` gives them, no two with the same tokens below the same block.
            windowed: what layers with a window have for some of them, by number; nothing for the others.
        """
        assert self.cached == 0, "blocks are adopted when nothing is there"
        for each in placed:
            above = self._trees.root(each.root) if each.above < 0 else self._trees.nodes[each.above]
            self._trees.insert(above, each.tokens, each.number, users=0)
        self._unused.update((each.number, None) for each in reversed(placed))
        self._free = [block for block in self._free if block not in self._trees.nodes]
        if self._windows is not None:
            self._windows.adopt(windowed)

    def _path(self, sequence_tokens: Sequence[int], root: int) -> tuple[list[Node], Node | None, int]:
        """Look up what `find` finds: whole blocks, perhaps one to go on in after its first tokens, and how many tokens
        all of these have in common with the sequence.

        They are fewer than there are, where layers with a window have no longer what the rows after them see.
        """
        path, leaf, found = self._trees.longest_path(sequence_tokens, root, self.tokens, self.near)
        if self._windows is None:
            return path, leaf, found
        blocks = [node.block for node in path]
        usable = self._windows.usable(blocks)
        if usable < len(path):
            return path[:usable], None, usable * self.tokens
        if leaf is not None and -1 in self._windows.numbers([leaf.block]):
            return path, None, len(path) * self.tokens
        return path, leaf, found

    def _needed(self, sequence_tokens: Sequence[int]) -> int:
        """How many blocks hold so many tokens."""
        return -(-len(sequence_tokens) // self.tokens)

    def _check_room(self, sequence_tokens: Sequence[int], blocks: Sequence[int]) -> None:
        if self._needed(sequence_tokens) > len(blocks):
            raise ValueError(f"{len(blocks)} blocks of {self.tokens} tokens cannot hold {len(sequence_tokens)} tokens")

    def _tokens_of(self, sequence_tokens: Sequence[int], index: int) -> tuple[int, ...]:
        """The tokens in a sequence's block number `index`."""
        return tuple(sequence_tokens[index * self.tokens : (index + 1) * self.tokens])

    def _published(self, blocks: Sequence[int]) -> int:
        """How many of a sequence's blocks are in a tree: the first ones always."""
        return bisect_left(blocks, True, key=lambda block: block not in self._trees.nodes)

    def _use(self, node: Node) -> None:
        if not node.users:
            self._remove_unused(node.block)
        node.users += 1

    def _add_unused(self, block: int) -> None:
        if block < self.near:
            self._unused[block] = None
        else:
            self.far.add_unused(block)

    def _remove_unused(self, block: int) -> None:
        if block < self.near:
            del self._unused[block]
        else:
            self.far.remove_unused(block)

    def _put_back(self, block: int) -> None:
        """A block holds nothing any more."""
        if self._windows is not None:
            self._windows.drop(block)
        if block < self.near:
            self._free.append(block)
        else:
            self.far.put_back(block)

    def _move_unused(self, count: int) -> None:
        """Have so many near blocks free, of which enough are `takeable`."""
        able = self.far.writable()
        while len(self._free) < count:
            for block, far in self._copied(self._unused, count, able):
                del self._unused[block]
                self._renumber(block, far)
                self.far.add_unused(far)
            if not able and len(self._free) < count:
                self._drop_leaf(next(iter(self._unused)))

    def _copied(self, blocks: Iterable[int], goal: int, able: list[FarTier]) -> Pairs:
        """Copy the first of some near blocks to the first tier with room, until so many near ones are free.

        Unused far blocks make room for it. Whether it is a near one or a far one that becomes free, that helps.

        Args:
            able: tiers that can be copied to; one that cannot is taken out, and all are if there is no room.
        """
        while len(self._free) + self.far.free_in(able) < goal and (oldest := self.far.oldest_unused(able)) is not None:
            self._drop_leaf(oldest)
        tier = next((tier for tier in able if self.far.free_in([tier])), None)
        if tier is None:
            able.clear()
            return []
        copied = [*islice(blocks, goal - len(self._free))]
        pairs = [*zip(copied, self.far.take(tier, len(copied)), strict=False)]
        if pairs and not tier.copy(pairs):
            able.remove(tier)
            for _, far in reversed(pairs):
                self.far.put_back(far)
            return []
        self._free += (block for block, _ in pairs)
        return pairs

    def _drop_leaf(self, block: int) -> None:
        """Drop an unused block, or if anything hangs on it, one of the last blocks of that."""
        node = self._trees.last_below(block)
        self._remove(node.block)
        self._put_back(node.block)

    def _renumber(self, block: int, far: int) -> None:
        """A block of a tree has been copied."""
        self._trees.renumber(block, far)
        if self._windows is not None:
            self._windows.renumber(block, far)

    def _insert(self, above: Node, tokens: tuple[int, ...], block: int) -> Node:
        """Put a block that a sequence has for itself into a tree; the sequence goes on to use it."""
        self._alone.remove(block)
        return self._trees.insert(above, tokens, block, users=1)

    def _is_worse(self, node: Node, block: int) -> bool:
        """Whether a block of a tree, which nobody uses, lacks what layers with a window have for another block with the
        same tokens."""
        if self._windows is None or node.users:
            return False
        return [number >= 0 for number in self._windows.numbers([node.block, block])] == [False, True]

    def _replace(self, node: Node, block: int) -> Node:
        """Have a block that a sequence has for itself in a tree, in place of one that nobody uses."""
        self._remove_unused(node.block)
        self._put_back(node.block)
        self._alone.remove(block)
        node.users = 1
        return self._trees.renumber(node.block, block)

    def _remove(self, block: int) -> None:
        """Take a leaf that nobody uses out of its tree."""
        self._remove_unused(block)
        self._trees.remove(block)
