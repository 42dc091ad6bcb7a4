"""What rank 0 knows of the session's far cache blocks: whether they can be written to, and whether they are lost.

Far blocks are on every rank's disk, or other machines keep them (`held`). They are lost when a disk cannot be read any
more, or such a machine is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from motley.daemon.rank.all_ranks import from_rank, trouble_of
from motley.daemon.rank.blocks.cache_blocks import Pairs
from motley.daemon.rank.steps import Message, Move, split_loss

RETRY_S = 5.0
"""Seconds after which blocks are moved again, once a rank could not."""


class FarCaches:
    """The far blocks of a session, as rank 0 sees them.

    Attributes:
        held: whether other machines keep them, which are lost once blocks cannot be moved there.
        trouble: why blocks could not be moved the last time, or are lost; empty: all is well.
        losing: why they are lost, between the moment when that is known and that when the schedule goes on without.
        lost: why there are none any more; empty: there are, or never were.
    """

    def __init__(self, held: bool, told: Callable[[Message], list[bytes]]) -> None:
        """`told`: has every rank execute a message, and gives what each of them tells, by rank."""
        self.held = held
        self.trouble = ""
        self.losing = ""
        self.lost = ""
        self._told = told
        self._due = 0.0
        """From when on blocks may be moved again."""

    def copy(self, pairs: Pairs) -> bool:
        """Have every rank copy blocks to far ones; whether all could.

        Raises:
            StepError: a rank tells something else.
        """
        now = time.perf_counter()
        if now < self._due:
            return False
        self.trouble = trouble_of(self._told(Move(np.array(pairs, np.int32))))
        if self.trouble:
            self._due = now + RETRY_S
        if self.trouble and self.held:
            self.losing = self.trouble
        return not self.trouble

    def summaries(self, told: Sequence[bytes]) -> Sequence[bytes]:
        """What ranks have told of a step without the losses, of which each tells too where blocks are `held`.

        Raises:
            StepError: a rank tells something else.
        """
        losses = []
        for rank, data in enumerate(told):
            with from_rank(rank):
                losses.append(split_loss(data))
        if not self.lost:
            self.losing = "; ".join(f"rank {rank}: {lost}" for rank, (lost, _) in enumerate(losses) if lost)
        return [summaries for _, summaries in losses]

    def lose(self) -> None:
        """Go on without them."""
        self.lost, self.losing = self.losing, ""
        self.trouble = f"far cache blocks are lost ({self.lost}); their tokens are computed again"
