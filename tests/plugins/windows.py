"""A sequence in layers with a window that have fewer blocks than others: what it writes, step by step."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import numpy as np

from motley.plugins.engine import F32, CacheBlocks, Span
from tests.models.cases import LocalSession

TOKENS = 3
CUTS = [0, 2, 5, 6, 7, 9, 10, 12, *range(13, 25)]


def texts(ranks: LocalSession, blocks: CacheBlocks, tokens: list[int]) -> F32:
    """The logits of all tokens of a sequence that has far blocks for its first positions, if there are any, and takes
    windowed ones round and round: those that its rows no longer see have no number."""
    near = [*range(blocks.count)]
    table = own = np.empty(0, np.int32)
    logits = []
    for start, end in pairwise(CUTS):
        while len(table) < ceil(end / blocks.tokens):
            if not near:
                place = int(np.flatnonzero(table < blocks.count)[0])
                far = blocks.count + place
                ranks.move([(int(table[place]), far)])
                near.append(int(table[place]))
                table[place] = far
            own = np.append(own, np.int32(len(table) % max(1, blocks.windowed)))
            table = np.append(table, np.int32(near.pop()))
        if blocks.windowed:
            own[: max(0, start - blocks.window + 1) // blocks.tokens] = -1
        span = Span(table.copy(), start, end - start, end - start, windowed=own.copy() if blocks.windowed else None)
        logits.append(ranks.run([span], tokens[start:end]))
    return np.concatenate(logits)
