"""How residuals go from stage to stage: the way of one rank, from one rank of the stage before to some of the next.

All ranks of a stage hold the same residual, so each of the next stage hears it from one of them; they take turns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from motley.daemon.models.cutting.stages import Stage
from motley.daemon.rank.steps import StepError
from motley.plugins.engine import F32
from motley.transport import Communicator


class Passage:
    """What a rank takes from the stage before its own, and gives to the next one.

    Attributes:
        waited_s: seconds that it has waited for residuals to come, and for those that it has sent to leave.
    """

    def __init__(self, communicator: Communicator, stages: Sequence[Stage]) -> None:
        """
        Args:
            communicator: to all ranks of all stages.
            stages: in order.
        """
        rank = communicator.rank
        self._communicator = communicator
        number = next(number for number, stage in enumerate(stages) if rank in stage.ranks)
        own = stages[number].ranks
        place = rank - own.start
        before = stages[number - 1].ranks if number else range(0)
        after = stages[number + 1].ranks if number + 1 < len(stages) else range(0)
        self._source = before[place % len(before)] if before else None
        self._targets = after[place :: len(own)]
        self.waited_s = 0.0

    def take(self, rows: int, width: int) -> F32:
        """The residual f32[rows, width] of a step, of the stage before.

        Raises:
            StepError: it has other rows.
            TransportError: a rank is lost, or none came within the communicator's deadline.
        """
        assert self._source is not None, "the first stage takes embeddings"
        began = time.perf_counter()
        data = self._communicator.recv(self._source, self._communicator.deadline_s)
        self.waited_s += time.perf_counter() - began
        if len(data) != 4 * rows * width:
            raise StepError(
                f"rank {self._source} has sent a residual of {len(data)} bytes for {rows} rows of {4 * width}"
            )
        return np.frombuffer(bytearray(data), np.float32).reshape(rows, width)

    def give(self, residual: F32) -> None:
        """Send the residual f32[T, D] of a step, C-contiguous, to the next stage; it may be overwritten then.

        Raises:
            TransportError: a rank is lost, or took nothing within the communicator's deadline.
        """
        began = time.perf_counter()
        for rank in self._targets:
            self._communicator.send(residual.data, rank)
        self._communicator.flush()  # what has not left would wait for this rank's next call, which computes before
        self.waited_s += time.perf_counter() - began
