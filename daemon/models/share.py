"""Shares: which units of a model a rank owns. The planner cuts them; `units.validate_shares` checks that they tile.

A *unit* is the smallest piece a share can be cut in. Attention is cut in ``kv_groups * split`` units: with
``split = 1`` a unit is one KV head with all the query heads that read it; with a larger split each KV group is
divided into ``split`` equal parts of its query heads, and every rank that holds a part holds a copy of the KV head.
The MLP is cut in blocks of columns that respect the quantisation block, the head in blocks of vocabulary rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd


class ShareError(ValueError):
    """Shares that do not fit the model or each other."""


@dataclass(frozen=True)
class Share:
    """What one rank owns, in units; ranges are ``[start, stop)`` and may be empty."""

    attention_split: int
    attention: range
    mlp: range
    vocabulary: range


def kv_heads(share: Share) -> list[tuple[int, range]]:
    """The KV heads of a share as ``(kv group, attention units that read it)``, each with equally many units.

    Grouped-query kernels want the same number of query heads for every KV head. Where a share covers parts of
    several groups unequally, a group's KV head is listed (and stored) more than once.
    """
    split, units = share.attention_split, share.attention
    parts: list[range] = []
    start = units.start
    while start < units.stop:
        stop = min(units.stop, (start // split + 1) * split)
        parts.append(range(start, stop))
        start = stop
    if not parts:
        return []
    step = gcd(*(len(part) for part in parts))
    return [
        (part.start // split, range(first, first + step))
        for part in parts
        for first in range(part.start, part.stop, step)
    ]
