"""Residuals from stage to stage over real sockets: whoever has a share of the next layers gets them, once."""

from __future__ import annotations

import numpy as np
import pytest

from motley.daemon.models.cutting.stages import Stage
from motley.daemon.rank.passage import Passage
from motley.daemon.rank.steps import StepError
from motley.transport import Communicator
from tests.transport.conftest import run_ranks as run_ranks
from tests.transport.ranks import Run

WIDTH = 8


def stages(*counts: int) -> list[Stage]:
    bounds = [sum(counts[:at]) for at in range(len(counts) + 1)]
    last = len(counts) - 1
    return [
        Stage(range(*bounds[at : at + 2]), range(at, at + 1), first=at == 0, last=at == last)
        for at in range(len(counts))
    ]


@pytest.mark.parametrize("counts", [(1, 3), (3, 1, 2), (2, 2)])
def test_every_rank_of_the_next_stage_gets_what_this_one_has_made(run_ranks: Run, counts: tuple[int, ...]) -> None:
    found = stages(*counts)

    def work(communicator: Communicator) -> float:
        own = next(stage for stage in found if communicator.rank in stage.ranks)
        passage = Passage(communicator, found)
        for step in range(4):  # several may be on their way at a time
            residual = np.full((step + 1, WIDTH), 10 * step, np.float32)
            if not own.first:
                residual = passage.take(step + 1, WIDTH)
                assert (residual == 10 * step + own.layers.start).all()
                residual[...] += 0  # it is this rank's own
            if not own.last:
                passage.give(residual + 1)
        communicator.barrier()
        return passage.waited_s

    waited = run_ranks(sum(counts), work)
    assert all(isinstance(seconds, float) and seconds > 0 for seconds in waited), waited


def test_a_residual_of_other_rows_is_refused(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> None:
        passage = Passage(communicator, stages(1, 1))
        if communicator.rank == 0:
            passage.give(np.zeros((2, WIDTH), np.float32))
        else:
            with pytest.raises(StepError, match="rank 0 has sent a residual of 64 bytes for 3 rows of 32"):
                passage.take(3, WIDTH)
        communicator.barrier()

    assert run_ranks(2, work) == [None, None]
