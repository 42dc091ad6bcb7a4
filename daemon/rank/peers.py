"""Everyone that a rank computes with: the other ranks of its stage, those of the stages before and after, and the hosts
of experts that no rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from motley.daemon.caches.held_elsewhere import HeldElsewhere
from motley.daemon.experts.dispatch import Dispatcher
from motley.daemon.rank.passage import Passage
from motley.plugins.engine import EngineError, Pending
from motley.plugins.mixture import Compute
from motley.transport import Communicator, StatsSnapshot


class Peers:
    """The collectives of a rank's engine, see `motley.plugins.engine.Collectives`: sums go to the other ranks, rows for
    experts to hosts.

    Attributes:
        rank, size: of this rank among those that share its layers.
        now: the communicator that sums go through, by the name that `motley.plugins.engine.transport` looks for.
        dispatcher: the way to expert hosts, once there is one.
        holder: the way to the holder of this rank's far cache blocks, if there is one.
        passage: the way from stage to stage, if there are several.
    """

    def __init__(self, communicator: Communicator, passage: Passage | None = None) -> None:
        """`communicator`: to the ranks of this rank's stage."""
        self.rank = communicator.rank
        self.size = communicator.size
        self.now = communicator
        self.dispatcher: Dispatcher | None = None
        self.holder: HeldElsewhere | None = None
        self.passage = passage

    # See `motley.plugins.engine.Collectives`.

    def all_reduce(self, buffer: npt.NDArray[Any]) -> None:
        self.now.all_reduce(buffer)

    def all_reduce_start(self, buffer: npt.NDArray[Any]) -> Pending:
        return self.now.all_reduce_start(buffer)

    def all_gather(self, local: npt.NDArray[Any], out: Sequence[npt.NDArray[Any]]) -> None:
        self.now.all_gather(local, out)

    def experts(self, layer: int) -> Compute:
        """What has a layer's experts computed by hosts.

        Raises:
            EngineError: there are no hosts.
        """
        if self.dispatcher is None:
            raise EngineError(f"the experts of layer {layer} are not in this rank's graph, and it has no expert hosts")
        return self.dispatcher.experts(layer)

    def snapshot(self) -> StatsSnapshot:
        """Where the time of collectives has gone so far; waiting for experts, for what a cache holder
        tells, or for another stage counts as waiting."""
        taken = self.now.stats.snapshot()
        waited_s = sum(own.waited_s for own in (self.dispatcher, self.holder, self.passage) if own is not None)
        return replace(taken, wait_s=taken.wait_s + waited_s) if waited_s else taken
