"""Rank 0's part in keeping prefixes on the disks of all ranks, for the next start of a session that is planned alike.

Each rank has a file with a place for each of its blocks (`motley.daemon.rank.blocks.kept_file`), and every place has a
label that says which tokens are there, and what comes before them. At the start, rank 0 reads the labels of its own
file, asks all ranks for these blocks, and begins with those that every rank has undamaged. Later, when there is
nothing else to do, all ranks write what has come since.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from motley.daemon.rank.all_ranks import from_rank, trouble_of
from motley.daemon.rank.blocks.cache_blocks import BlockStore, Placed
from motley.daemon.rank.blocks.kept_block import FIRST, KeptBlock, found_in, what_of
from motley.daemon.rank.blocks.kept_file import KeptFile
from motley.daemon.rank.steps import Keep, Message, Restore, Restored, StepError, decode

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""Bytes that a rank reads or writes between two looks for requests, or those of one block."""
RETRY_S = 60.0
"""Seconds after which writing is tried again, once a rank could not."""


class KeptPrefixes:
    """What all ranks keep of the prefixes of a session.

    Attributes:
        trouble: why nothing is kept for now; empty: all is well.
    """

    def __init__(self, file: KeptFile, plan: int, store: BlockStore, told: Callable[[Message], list[bytes]]) -> None:
        """
        Args:
            file: rank 0's own.
            plan: a number for all that decides about the bits in the blocks of all ranks, beside the tokens.
            store: of the blocks, of which none has been taken.
            told: has every rank execute a message, and gives what each of them tells, by rank.
        """
        self.trouble = ""
        self._plan = plan
        self._store = store
        self._told = told
        self._at_once = max(1, PIECE_BYTES // max(1, file.block_bytes))
        """Blocks in a piece."""
        self._unread = found_in(file.blocks(), plan)[::-1]
        """What is to be read, the next one last."""
        self._read: list[KeptBlock] = []
        """What all ranks have read so far; the number of what layers with a window have is right."""
        self._written: dict[int, tuple[int, int]] = {}
        """What is in the files of all ranks, and the number of what layers with a window have, by block."""
        self._unwritten: list[KeptBlock] | None = None
        """What is to be written, the next one last; None: that is to be found out."""
        self._due = 0.0
        if not self._unread:
            self._adopt()

    @property
    def count(self) -> int:
        """How many blocks the files of all ranks have."""
        return len(self._written)

    @property
    def restoring(self) -> bool:
        """Whether there is more to be read; meanwhile nobody may take a block."""
        return bool(self._unread)

    def restore(self) -> None:
        """Read a piece of what is kept. With the last one the store has it all.

        Raises:
            StepError: a rank tells something else.
        """
        blocks = self._piece_of(self._unread)
        every = [_there(rank, data, len(blocks)) for rank, data in enumerate(self._told(Restore(blocks)))]
        for block, there in zip(blocks, map(min, zip(*every, strict=True)), strict=True):
            if there:
                self._read.append(block if there > 1 else block._replace(windowed=-1))
        if not self._unread:
            self._adopt()

    def changed(self) -> None:
        """Something was computed, so that there may be more to write."""
        self._unwritten = None

    def keep(self) -> bool:
        """Write a piece of what is in the caches and not yet in the files; whether there is more.

        Raises:
            StepError: a rank tells something else.
        """
        if self._unwritten is None and time.monotonic() >= self._due:
            self._unwritten = self._new()[::-1]
        if not self._unwritten:
            return False
        blocks = self._piece_of(self._unwritten)
        for block in blocks:
            self._written.pop(block.number, None)
        self.trouble = trouble_of(self._told(Keep(blocks)))
        if self.trouble:
            logger.warning("prefixes are not kept for now: %s", self.trouble)
            self._due, self._unwritten = time.monotonic() + RETRY_S, None
            return False
        self._written.update((block.number, (block.what, block.windowed)) for block in blocks)
        return bool(self._unwritten)

    def _piece_of(self, blocks: list[KeptBlock]) -> list[KeptBlock]:
        """Take a piece from the end of a list, its last block first."""
        piece = blocks[-self._at_once :][::-1]
        del blocks[-self._at_once :]
        return piece

    def _adopt(self) -> None:
        """Have the store begin with all that has been read, and that hangs on nothing that is missing."""
        numbers = {FIRST: -1}
        placed = []
        for block in self._read:
            if block.above in numbers:
                numbers[block.what] = block.number
                placed.append(Placed(block.number, numbers[block.above], block.root, block.tokens))
                self._written[block.number] = block.what, block.windowed
        windowed = {block.number: block.windowed for block in self._read if block.windowed >= 0}
        self._store.adopt(placed, {each.number: windowed[each.number] for each in placed if each.number in windowed})
        self._read.clear()

    def _new(self) -> list[KeptBlock]:
        """The blocks in the trees that are not in the files, each after the one that it hangs on."""
        placed = self._store.placed()
        windowed = self._store.windowed(each.number for each in placed) or [-1] * len(placed)
        whats = {-1: FIRST}
        new = []
        for each, own in zip(placed, windowed, strict=True):
            above = whats[each.above]
            what = whats[each.number] = what_of(self._plan, above, each.root, each.tokens)
            written, has = self._written.get(each.number, (FIRST, -1))
            if written != what or own not in (has, -1):
                new.append(KeptBlock(each.number, own, what, above, each.root, each.tokens))
        return new


def _there(rank: int, data: bytes, count: int) -> Sequence[int]:
    """Which of so many blocks a rank has read.

    Raises:
        StepError: it tells something else.
    """
    with from_rank(rank):
        message = decode(data)
        if not isinstance(message, Restored) or len(message.there) != count:
            raise StepError(f"it has not said which of {count} blocks it has kept, but {message}")
    return message.there
