"""Stages: which ranks have which layers. Every layer is in one stage, whose ranks share it.

What a stage's last layer gives goes to the next stage, that of the last stage to the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from motley.daemon.models.cutting.share import Share, ShareError
from motley.daemon.models.cutting.units import Units, validate_shares


@dataclass(frozen=True)
class Stage:
    """Some ranks, next to each other, and the layers that they have.

    Attributes:
        ranks, layers: numbers of them.
        first, last: whether it is the one that reads embeddings, and the one that has the head.
    """

    ranks: range
    layers: range
    first: bool
    last: bool


def stages_of(shares: Sequence[Share], layers: int) -> list[Stage]:
    """The stages of ranks with such shares of a model of so many layers, in order.

    Raises:
        ShareError: there are no shares, or their layers do not tile the model in rank order; the message names the rank
            that does not fit.
    """
    if not shares:
        raise ShareError("a session has at least one rank")
    own = [share.layers or range(layers) for share in shares]
    found: list[tuple[range, range]] = []
    for part, alike in groupby(range(len(own)), key=own.__getitem__):
        count = len([*alike])
        begin = found[-1][0].stop if found else 0
        found.append((range(begin, begin + count), part))
    for ranks, part in found:
        if not part or part.step != 1:
            raise ShareError(f"layers of rank {ranks.start} are no range of layers: {part}")
    if own[0].start != 0:
        raise ShareError(f"layers of rank 0 start at {own[0].start}, not at 0")
    for (_, one), (ranks, other) in pairwise(found):
        if one.stop != other.start:
            raise ShareError(f"layers of rank {ranks.start} start at {other.start}, those before it stop at {one.stop}")
    if own[-1].stop != layers:
        raise ShareError(f"layers of the last rank stop at {own[-1].stop}; the model has {layers}")
    return [
        Stage(ranks, part, first=number == 0, last=number == len(found) - 1)
        for number, (ranks, part) in enumerate(found)
    ]


def stage_of(shares: Sequence[Share], rank: int, layers: int) -> Stage:
    """The stage of one rank; errors as `stages_of`."""
    return next(stage for stage in stages_of(shares, layers) if rank in stage.ranks)


def validate_stage(units: Units, stage: Stage, shares: Sequence[Share]) -> None:
    """Check that the ranges of a stage's ranks tile its layers, and the head if it has that.

    Args:
        shares: of its ranks.

    Raises:
        ShareError: naming the rank and the range that does not fit.
    """
    try:
        validate_shares(units, shares, head=stage.last)
    except ShareError as error:
        where = f" (ranks of layers {stage.layers.start} to {stage.layers.stop - 1} are counted from 0)"
        raise ShareError(f"{error}{'' if stage.first and stage.last else where}") from error
