"""Dealing what is to be read of several texts out to steps of an engine that guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class OfText(Protocol):
    """What is to be read of one text next."""

    @property
    def tokens(self) -> Sequence[int]: ...


Read = TypeVar("Read", bound=OfText)


def in_steps(asked: Sequence[Read], most_rows: int, most_spans: int) -> list[list[Read]]:
    """What is to be read of some texts, by the steps that it is computed in: in their order, in as few as that can be.

    Args:
        most_rows: tokens that a step may have; no text has more.
        most_spans: texts that a step may have.
    """
    steps: list[list[Read]] = []
    rows = most_rows
    for each in asked:
        rows += len(each.tokens)
        if rows > most_rows or len(steps[-1]) == most_spans:
            steps.append([])
            rows = len(each.tokens)
        steps[-1].append(each)
    return steps
