"""What rank 0 knows of the session's far cache blocks: in which tiers they are, which of these is filled first, and
whether they are lost.

Far blocks are on every rank's disk, or other machines keep them, or both: then the tier is filled first whose blocks
cost a step less. A tier is lost when a disk cannot be read any more, or such a machine is gone; the other stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite

import numpy as np

from motley.daemon.rank.all_ranks import from_rank, trouble_of
from motley.daemon.rank.blocks.far_room import FarTier, Pairs
from motley.daemon.rank.steps import Message, Move, StepError, split_losses
from motley.plugins.engine import CacheBlocks
from motley.protocol import mesh_pb2 as pb

DISK, NODES = "disk", "nodes"
"""Where a tier is."""


class FarCaches:
    """The far blocks of a session, as rank 0 sees them.

    Attributes:
        losing: why tiers are lost, between the moment when that is known and that when the schedule goes on without.
        lost: why tiers are not there any more; those that are not in it are there.
    """

    def __init__(self, blocks: CacheBlocks, told: Callable[[Message], list[bytes]]) -> None:
        """
        Args:
            blocks: of every rank.
            told: has every rank execute a message, and gives what each of them tells, by rank.
        """
        self.losing: dict[FarTier, str] = {}
        self.lost: dict[FarTier, str] = {}
        self._told = told
        end = blocks.count + blocks.far
        places = {DISK: range(blocks.count, blocks.first_held), NODES: range(blocks.first_held, end)}
        self._tiers = [FarTier(own, place, partial(self._copy, place)) for place, own in places.items() if own]
        """In the order of their numbers, in which ranks tell of them."""

    def in_order(self, block_s: Sequence[Sequence[float]]) -> list[FarTier]:
        """The tiers, those that are to be filled first in front.

        Args:
            block_s: what each rank has measured that a step takes for a block of each tier, in seconds, if there are
                several. A step waits for the slowest.

        Raises:
            StepError: a rank has measured more, or fewer.
        """
        if len(self._tiers) > 1:
            for rank, measured in enumerate(block_s):
                if len(measured) != len(self._tiers):
                    raise StepError(f"rank {rank} has measured {len(measured)} of {len(self._tiers)} places of blocks")
            for tier, seconds in zip(self._tiers, zip(*block_s, strict=True), strict=True):
                tier.block_s = max(seconds)
        return sorted(self._tiers, key=lambda tier: tier.block_s)

    @property
    def trouble(self) -> str:
        """Why blocks could not be moved the last time, or are lost; empty: all is well."""
        lost = (f"far cache blocks are lost ({why}); their tokens are computed again" for why in self.lost.values())
        return "; ".join([*lost, *(tier.trouble for tier in self._there if tier.trouble)])

    @property
    def why_lost(self) -> str:
        """Why tiers are not there any more; empty: all are."""
        return "; ".join(self.lost.values())

    @property
    def room(self) -> int:
        """How many far blocks there are still."""
        return sum(len(tier.numbers) for tier in self._there)

    def summaries(self, told: Sequence[bytes]) -> Sequence[bytes]:
        """What ranks have told of a step without the losses, of which each tells too.

        Raises:
            StepError: a rank tells something else.
        """
        losses, summaries = [], []
        for rank, data in enumerate(told):
            with from_rank(rank):
                own, rest = split_losses(data, len(self._tiers))
            losses.append(own)
            summaries.append(rest)
        for tier, of_ranks in zip(self._tiers, zip(*losses, strict=True), strict=True):
            if tier not in self.lost and any(of_ranks):
                self.losing[tier] = "; ".join(f"rank {rank}: {lost}" for rank, lost in enumerate(of_ranks) if lost)
        return summaries

    def lose(self) -> list[FarTier]:
        """Go on without the tiers that are lost; which these are."""
        tiers = [*self.losing]
        self.lost |= self.losing
        self.losing.clear()
        return tiers

    def activity(self, used: dict[FarTier, int]) -> list[pb.FarTier]:
        """What there is to tell of tiers, of which so many blocks are used, in the order in which they are filled."""
        return [
            pb.FarTier(
                place=tier.place,
                blocks=len(tier.numbers),
                blocks_used=count,
                block_ms=1e3 * tier.block_s if isfinite(tier.block_s) else 0.0,
            )
            for tier, count in used.items()
        ]

    @property
    def _there(self) -> list[FarTier]:
        return [tier for tier in self._tiers if tier not in self.lost]

    def _copy(self, place: str, pairs: Pairs) -> str:
        """Have every rank copy blocks to those of the tier in a place; why not all could.

        Raises:
            StepError: a rank tells something else.
        """
        trouble = trouble_of(self._told(Move(np.array(pairs, np.int32))))
        if trouble and place == NODES:
            self.losing[next(tier for tier in self._tiers if tier.place == place)] = trouble
        return trouble
