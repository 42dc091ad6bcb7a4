"""What a block of KV caches that is kept on disks is: its place, and whose keys and values it holds. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

_LABEL = struct.Struct("<iiIQQQ")
FIRST = 0
"""What is before the first block of a text."""


class KeptBlock(NamedTuple):
    """A block that is kept.

    Attributes:
        number: its own, and of its place in every rank's file.
        windowed: the number of what layers with a window have for it, and of the place of that; -1: nothing.
        what: a number that says what it holds, see `what_of`.
        above: what the block with the tokens before holds; `FIRST`: there is none.
        root: what else its text is computed with (`motley.daemon.rank.blocks.cache_blocks.BlockStore.find`).
        tokens: whose keys and values it holds.
    """

    number: int
    windowed: int
    what: int
    above: int
    root: int
    tokens: tuple[int, ...]

    def encode(self) -> bytes:
        """As bytes, which `decode_blocks` reads."""
        head = _LABEL.pack(self.number, self.windowed, len(self.tokens), self.root, self.what, self.above)
        return head + np.array(self.tokens, np.int32).tobytes()


def label_bytes(tokens: int) -> int:
    """How long an encoded block of so many tokens is."""
    return _LABEL.size + 4 * tokens


def decode_blocks(data: bytes) -> list[KeptBlock]:
    """Read blocks that were encoded one after another.

    Raises:
        ValueError: they end in the middle of one.
    """
    blocks = []
    at = 0
    while at < len(data):
        blocks.append(decode_block(data, at))
        at += label_bytes(len(blocks[-1].tokens))
    return blocks


def decode_block(data: bytes, at: int = 0) -> KeptBlock:
    """Read an encoded block that begins at a place, whatever follows it.

    Raises:
        ValueError: its end is missing.
    """
    try:
        number, windowed, count, root, what, above = _LABEL.unpack_from(data, at)
        tokens = np.frombuffer(data, np.int32, count, at + _LABEL.size)
    except (struct.error, ValueError) as error:
        raise ValueError(f"{len(data)} bytes about kept blocks are malformed at {at}: {error}") from error
    return KeptBlock(number, windowed, what, above, root, tuple(tokens.tolist()))


def what_of(plan: int, above: int, root: int, tokens: Sequence[int]) -> int:
    """A number for what a block holds: the same only where its keys and values have the same bits, in all likelihood.

    Args:
        plan: a number for all that decides about the bits beside the tokens, on all ranks.
        above: see `KeptBlock`.
        root, tokens: see `KeptBlock`.
    """
    told = struct.pack("<QQQ", plan, above, root) + np.array(tokens, np.int32).tobytes()
    return int.from_bytes(blake2b(told, digest_size=8).digest(), "little") or 1


def plan_of(ranks: Sequence[int]) -> int:
    """One number for what all ranks tell of what they keep, by rank (`KeptFile.plan` of each)."""
    told = blake2b(struct.pack(f"<{len(ranks)}Q", *ranks), digest_size=8).digest()
    return int.from_bytes(told, "little")


def found_in(blocks: Iterable[KeptBlock], plan: int) -> list[KeptBlock]:
    """Those of some kept blocks that a text can begin with, each after the one with the tokens before it.

    Args:
        blocks: as a file tells of them: also of what was written over since, or for another plan.
        plan: see `what_of`.
    """
    below: dict[int, dict[int, KeptBlock]] = {}
    for each in blocks:
        if each.what == what_of(plan, each.above, each.root, each.tokens):
            below.setdefault(each.above, {}).setdefault(each.what, each)
    found = [*below.get(FIRST, {}).values()]
    for each in found:  # which grows
        found += below.get(each.what, {}).values()
    return found
