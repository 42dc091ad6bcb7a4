"""Which texts may have cache blocks in common: those with the same adapter and the same rotary tables. Pure."""

from __future__ import annotations

import struct
from hashlib import blake2b

_ADAPTED = 1 << 63
"""No prompt is as long."""


def root_of(prompt: int, alike: int, adapter: str = "") -> int:
    """The number of the root on which the blocks of a text hang, below 2**64, the same in every session.

    Args:
        prompt: how many tokens its prompt has.
        alike: prompts up to this length have the same rotary tables; longer ones have some of their own.
        adapter: the fingerprint of what it is computed with beside the model; empty: nothing.
    """
    own = prompt if prompt > alike else 0
    if not adapter:
        return own
    told = blake2b(struct.pack("<q", own) + adapter.encode(), digest_size=8).digest()
    return int.from_bytes(told, "little") | _ADAPTED
