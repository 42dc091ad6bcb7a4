"""The blocks of layers whose rows see a window of positions: only the latest ones of a sequence are needed there.

A block of a session's KV caches holds some tokens of a sequence, in all layers. Layers with a window have a block of
their own for the same tokens, as long as a running sequence may still see them, and until its room is needed. So every
windowed block belongs to one of the other blocks, by whose number it is known here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence


class WindowBlocks:
    """Which windowed blocks belong to which other blocks. Pure.

    A windowed block is *held* while running sequences need it; one that nobody holds stays until its room is needed,
    those that have been held least recently first.
    """

    def __init__(self, count: int, window: int, tokens: int) -> None:
        """
        Args:
            count: how many windowed blocks there are.
            window: how many positions a row sees at most, its own among them.
            tokens: positions in a block.

        Raises:
            ValueError: they are too few for a row.
        """
        if count < self.needed(window, tokens):
            raise ValueError(f"{count} blocks of {tokens} tokens are too few for a window of {window} positions")
        self.count = count
        self._a_row = self.needed(window, tokens)
        self._window = window
        self._tokens = tokens
        self._free = [*range(count)][::-1]
        self._numbers: dict[int, int] = {}
        """Windowed blocks, by the block that they belong to."""
        self._owners: dict[int, int] = {}
        """The blocks that they belong to, by windowed block."""
        self._holders = [0] * count
        """How many running sequences hold each."""
        self._unheld: OrderedDict[int, None] = OrderedDict()
        """Those that belong to a block and that nobody holds, least recently held first."""

    def adopt(self, numbers: Mapping[int, int]) -> None:
        """Begin with windowed blocks, by the blocks that they belong to, that hold something already; no other has been
        given away yet."""
        self._numbers.update(numbers)
        self._owners.update((number, block) for block, number in numbers.items())
        self._unheld.update(dict.fromkeys(numbers.values()))
        self._free = [number for number in self._free if number not in self._owners]

    @staticmethod
    def needed(window: int, tokens: int) -> int:
        """How many blocks a row sees at most."""
        return -(-(window - 1) // tokens) + 1

    @property
    def available(self) -> int:
        """How many windowed blocks no running sequence holds."""
        return len(self._free) + len(self._unheld)

    def first_seen(self, position: int) -> int:
        """The place, in a sequence, of the first block that rows from a position on see."""
        return max(0, position - self._window + 1) // self._tokens

    def numbers(self, blocks: Iterable[int]) -> list[int]:
        """The windowed blocks that belong to some blocks; -1: none does."""
        return [self._numbers.get(block, -1) for block in blocks]

    def usable(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks of a sequence another one can begin with: those after them see only such as have
        their windowed ones."""
        best = complete = 0
        for count, block in enumerate(blocks, 1):
            complete = complete + 1 if block in self._numbers else 0
            if complete >= count - self.first_seen(count * self._tokens):
                best = count
        return best

    def fits(self, found: Iterable[int], more: int) -> bool:
        """Whether a sequence that begins with some blocks, which have windowed ones, and needs so many more can go on
        for a while. If no other runs, it can."""
        left = self.available - sum(number in self._unheld for number in self.numbers(found))
        return self.available == self.count or min(more, self._a_row) <= left

    def add(self, blocks: Iterable[int]) -> None:
        """Give blocks windowed ones, of which as many are `available`; one running sequence holds them."""
        for block in blocks:
            assert block not in self._numbers
            if not self._free:
                self.drop(self._owners[next(iter(self._unheld))])
            number = self._free.pop()
            self._numbers[block], self._owners[number], self._holders[number] = number, block, 1

    def hold(self, blocks: Iterable[int]) -> None:
        """One more running sequence needs the windowed ones of some blocks, which all have them."""
        for block in blocks:
            number = self._numbers[block]
            self._unheld.pop(number, None)
            self._holders[number] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """A running sequence that holds the windowed ones of some blocks needs them no longer."""
        for block in blocks:
            number = self._numbers[block]
            self._holders[number] -= 1
            if not self._holders[number]:
                self._unheld[number] = None

    def drop(self, block: int) -> None:
        """A block holds nothing any more, nor does its windowed one, which nobody holds."""
        if block in self._numbers:
            number = self._numbers.pop(block)
            del self._unheld[number], self._owners[number]
            self._free.append(number)

    def renumber(self, block: int, new: int) -> None:
        """Note that another block holds the same tokens now: the windowed one stays where it is and belongs to that
        block, unless that has one."""
        if block in self._numbers and new not in self._numbers:
            number = self._numbers[new] = self._numbers.pop(block)
            self._owners[number] = new
