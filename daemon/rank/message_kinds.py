"""What a message between ranks is: its first byte."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """Named as the classes in `motley.daemon.rank.steps` and, from `FIND_ADAPTER` on, `...adapters.messages`."""

    OPEN = 1
    STEP = 2
    MORE = 3
    CLOSE = 4
    STOP = 5
    COPY_STATES = 6
    ABLE = 7
    MOVE = 8
    MOVED = 9
    RENUMBER = 10
    KEEP = 11
    RESTORE = 12
    RESTORED = 13
    FIND_ADAPTER = 14
    FOUND_ADAPTER = 15
    READ_ADAPTER = 16
    PIECE = 17
    WRITE_ADAPTER = 18
    LOAD_ADAPTER = 19
