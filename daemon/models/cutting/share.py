"""Shares: which units of a model a rank owns. The planner cuts them; `units.validate_shares` checks that they tile.

A *unit* is the smallest piece a share can be cut in. Attention is cut in ``kv_groups * split`` units: with
``split = 1`` a unit is one KV head with all the query heads that read it; with a larger split each KV group is
divided into ``split`` equal parts of its query heads, and every rank that holds a part holds a copy of the KV head.
The MLP is cut in blocks of columns that respect the quantisation block, the head in blocks of vocabulary rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from motley.daemon.models.description.axes import Heads


class ShareError(ValueError):
    """Shares that do not fit the model or each other."""


@dataclass(frozen=True)
class Share:
    """What one rank owns, in units; ranges are ``[start, stop)`` and may be empty.

    Attributes:
        attention_split: into how many units every KV group is divided; the same for all ranks.
        attention: units of attention, each ``1 / attention_split`` of a KV group.
        mlp: units of the columns of MLPs and of experts.
        vocabulary: units of the rows of the head.
        layers: those of which this rank has these units, at least one; None: all. Ranks with the same layers are a
            *stage* (`motley.daemon.models.cutting.stages`).
    """

    attention_split: int
    attention: range
    mlp: range
    vocabulary: range
    layers: range | None = None


def kv_heads(queries: range, heads: Heads) -> list[tuple[int, range]]:
    """The KV heads that some query heads read, as ``(KV head, query heads that read it)``, equally many each.

    Grouped-query kernels want the same number of query heads for every KV head. Where the query heads are parts of
    several groups, of unequal sizes, a KV head is listed (and stored) more than once.
    """
    group = heads.group
    parts: list[range] = []
    start = queries.start
    while start < queries.stop:
        stop = min(queries.stop, (start // group + 1) * group)
        parts.append(range(start, stop))
        start = stop
    if not parts:
        return []
    step = gcd(*(len(part) for part in parts))
    return [
        (part.start // group, range(first, first + step))
        for part in parts
        for first in range(part.start, part.stop, step)
    ]
