"""Which texts may have cache blocks in common: those with the same adapter and the same rotary tables. Pure."""

from __future__ import annotations

import struct
from hashlib import blake2b

_ADAPTED = 1 << 63
"""No prompt is as long."""


def root_of(tables: int, adapter: str = "") -> int:
    """The number of the root on which the blocks of a text hang, below 2**64, the same in every session.

    Args:
        tables: the shortest prompt, in tokens, that has the same rotary tables.
        adapter: the fingerprint of what it is computed with beside the model; empty: nothing.
    """
    if not adapter:
        return tables
    told = blake2b(struct.pack("<q", tables) + adapter.encode(), digest_size=8).digest()
    return int.from_bytes(told, "little") | _ADAPTED
