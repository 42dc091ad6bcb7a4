"""Who trains on how much of the data, where every node trains alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from motley.training.errors import TrainingError


@dataclass(frozen=True)
class Trainer:
    """A node that could train.

    Attributes:
        free_bytes: memory that it has for it.
        speed: how fast it computes, in any unit that is the same for all.
    """

    name: str
    free_bytes: int
    speed: float


def deal_examples(count: int, trainers: Sequence[Trainer], need_bytes: int) -> dict[str, range]:
    """Deal out `count` examples in proportion to speed among the nodes that have the memory, so that all end together.

    Returns:
        By name, each one's examples by number; nodes that get none are left out.

    Raises:
        TrainingError: no node has the memory.
    """
    able = [each for each in trainers if each.free_bytes >= need_bytes and each.speed > 0]
    if not able:
        most = max((each.free_bytes for each in trainers), default=0)
        raise TrainingError(f"training takes {need_bytes} bytes on a node, and none has more than {most} free")
    total = sum(each.speed for each in able)
    dealt: dict[str, range] = {}
    done, so_far = 0, 0.0
    for each in able:
        so_far += each.speed
        end = round(count * so_far / total)
        if end > done:
            dealt[each.name] = range(done, end)
        done = end
    return dealt
