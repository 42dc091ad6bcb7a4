"""Rows of large tables by hashes of the last tokens, of which a token needs a few: they are read from the files.

A row's n-grams are its own token and the one, two, ... tokens before it. For each length of them there are some heads:
tables of their own, all of them parts of one, in which a hash of the n-gram says the row. What heads find is laid side
by side. Source: Qwen4-Exp (Per-Layer Embeddings); as in Cheng et al. 2026, https://arxiv.org/abs/2601.07372.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from motley.daemon.models.description.axes import W

NONE = -1
"""In the place of a token that there is not: the sequence begins after it."""

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HashedRows:
    """A table of n-grams.

    Attributes:
        layer: that is given rows of it.
        parts: of it, one below the other: f32[rows, W] each.
        multipliers: what a token, the one before it, ... is multiplied by, odd numbers; as many as the longest n-gram
            has tokens. No product is 2^63 or more.
        sizes: how many rows each head has, those of pairs first; as many heads for each length. Heads' rows follow each
            other.
        end: the token that ends a text: what comes before it counts as such a token too, and so does what is not there.
    """

    layer: int
    parts: tuple[W, ...]
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    end: int

    @property
    def width(self) -> int:
        """Elements of what all heads find."""
        return len(self.sizes) * self.parts[0].shape[1]

    def numbers(self, tokens: I64) -> I64:
        """i64[T, heads]: the rows of the table that some tokens need.

        Args:
            tokens: i64[T, N]: each token, the one before it, and so on, or `NONE`.
        """
        ended = np.zeros(len(tokens), bool)
        mixed = tokens[:, 0] * self.multipliers[0]
        each = len(self.sizes) // (len(self.multipliers) - 1)
        starts = [0, *accumulate(self.sizes)]
        found = np.empty((len(tokens), len(self.sizes)), np.int64)
        for back, multiplier in enumerate(self.multipliers[1:], 1):
            ended |= (tokens[:, back] == self.end) | (tokens[:, back] == NONE)
            mixed = mixed ^ np.where(ended, self.end, tokens[:, back]) * multiplier
            for head in range((back - 1) * each, back * each):
                found[:, head] = mixed % self.sizes[head] + starts[head]
        return found


def with_those_before(told: npt.NDArray[np.int32], begin: int, end: int, recent: int) -> I64:
    """i64[end - begin, recent + 1]: some tokens of a sequence, each with so many before it, see `HashedRows.numbers`.

    Args:
        told: the tokens of the sequence, up to `end` at least.
    """
    known = np.concatenate([np.full(recent, NONE, np.int64), told[max(0, begin - recent) : end]])
    rows, last = end - begin, len(known)
    return np.stack([known[last - rows - back : last - back] for back in range(recent + 1)], axis=1)
