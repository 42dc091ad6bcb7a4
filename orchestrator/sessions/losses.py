"""What a session remembers of the ranks that it has lost, and what that says of how to go on. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from motley.orchestrator.workers import Worker
from motley.protocol.mesh_pb2 import Failure

KEPT = 100
"""So many losses are remembered one by one, the last ones; others are counted."""
LOSSES = 10
"""When ranks were lost so often in a row, another loss ends the session: what it is lost by comes again and again."""
PROVEN_S = 10.0
"""The row is over when a session has generated tokens, or has been ready for so long."""
AGAIN_S = 60.0
"""A node whose process has died is tried again, but not if that happened twice within this time."""


@dataclass(frozen=True)
class Loss:
    """A rank of a session was lost, and the session goes on.

    Attributes:
        at: when.
        why: and what was lost.
        node: the name of the node where that was; empty: nobody knows.
        epoch: in which that was.
    """

    at: float
    why: Failure
    node: str
    epoch: int


@dataclass
class Losses:
    """The losses of a session, after each of which it has got, or is to get, a new plan.

    Attributes:
        last: the latest ones, in order.
        count: how many there have been.
        in_a_row: how many since the session proved itself, see `PROVEN_S`.
    """

    last: deque[Loss] = field(default_factory=lambda: deque(maxlen=KEPT))
    count: int = 0
    in_a_row: int = 0
    _lingering: dict[tuple[int, int], str] = field(default_factory=dict)
    """Ids of nodes by epoch and index of a worker that had not ended when there was a new plan."""

    @property
    def too_many(self) -> bool:
        """Whether the session was lost so often in a row that another plan is of no use."""
        return self.in_a_row > LOSSES

    def add(self, failure: Failure, blamed: Worker | None, epoch: int, now: float) -> None:
        """Note that a rank was lost.

        Args:
            blamed: the worker that is taken for what was lost; None: nobody knows.
        """
        self.last.append(Loss(now, failure, blamed.node_name if blamed else "", epoch))
        self.count += 1
        self.in_a_row += 1

    def explain(self, failure: Failure) -> None:
        """Learn a better reason for the latest loss."""
        self.last[-1] = replace(self.last[-1], why=failure)

    def prove(self) -> None:
        """Note that the session works: what is lost from now on is lost by something else."""
        self.in_a_row = 0

    def blames(self, worker: Worker) -> bool:
        """Whether a worker is taken for what was lost last."""
        return self.last[-1].why.lost_rank == worker.index + 1

    def suspects(self, workers: Iterable[Worker]) -> set[str]:
        """Ids of nodes that the next plan should do without: where the latest loss was, unless it was that of a process
        that died for the first time in a while.

        Args:
            workers: all those of the plan that was lost.
        """
        *before, loss = self.last
        again = any(each.node == loss.node and loss.at - each.at < AGAIN_S for each in before)
        return {worker.node_id for worker in workers if self.blames(worker) and (again or not worker.died)}

    def linger(self, epoch: int, workers: Iterable[Worker]) -> None:
        """Note which workers of an epoch have not ended though there is a new plan."""
        self._lingering |= {(epoch, worker.index): worker.node_id for worker in workers if not worker.gone}

    def ended(self, epoch: int, index: int) -> None:
        """Note that a worker of an epoch has ended, if it was waited for."""
        self._lingering.pop((epoch, index), None)

    def node_lost(self, node_id: str) -> None:
        """Wait no longer for workers on a node that is gone."""
        self._lingering = {key: where for key, where in self._lingering.items() if where != node_id}

    @property
    def occupied(self) -> set[str]:
        """Ids of nodes where a worker of an epoch before has not ended yet."""
        return {*self._lingering.values()}
