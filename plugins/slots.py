"""What engines share in keeping sequences: which slots are open, what a step may ask of one, how a cache grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from motley.plugins.engine import F32, EngineError

State = TypeVar("State")


class Slots(dict[int, State]):
    """What an engine keeps of each open sequence, by its slot. To ask for one that is not open is an `EngineError`."""

    def check_free(self, slot: int) -> None:
        """Make sure that a slot can be opened.

        Raises:
            EngineError: it is open already.
        """
        if slot in self:
            raise EngineError(f"slot {slot} is open already")

    def take(self, slot: int) -> State:
        """Close a slot; what was kept of it.

        Raises:
            EngineError: it is not open.
        """
        state = self[slot]
        del self[slot]
        return state

    def __missing__(self, slot: int) -> State:
        raise EngineError(f"slot {slot} is not open; open: {sorted(self)}")


def check_skip(slot: int, held: int, position: int, context: int) -> None:
    """Make sure that a sequence of `held` tokens can go on at `position`, see `Engine.skip`.

    Raises:
        EngineError: it cannot.
    """
    if not held <= position <= context:
        raise EngineError(f"slot {slot} holds {held} tokens of at most {context}: it cannot go on at {position}")


def check_reserve(slot: int, tokens: int, context: int) -> None:
    """Make sure that a sequence may have so many tokens, see `Engine.reserve`.

    Raises:
        EngineError: it may not.
    """
    if tokens > context:
        raise EngineError(f"slot {slot} can have at most {context} tokens, not {tokens}")


def check_step(slot: int, held: int, position: int, tokens: int, context: int) -> None:
    """Make sure that a step of so many tokens fits a sequence of `held` ones, see `Engine.step`.

    Raises:
        EngineError: it does not.
    """
    end = position + tokens
    if not 0 <= position <= held or end > context:
        raise EngineError(
            f"positions {position} to {end} do not fit slot {slot}: it holds {held} tokens of at most {context}"
        )


def check_rows(hidden: F32, rows: Sequence[int], most: int, width: int) -> None:
    """Make sure that a step's operands are what `Engine.step` takes.

    Args:
        hidden: is to be f32[T, D].
        rows: are to be among the T, and no more than `most`.
        most: the largest T.
        width: D.

    Raises:
        EngineError: they are not.
    """
    tokens = len(hidden)
    if not 1 <= tokens <= most or hidden.shape[1:] != (width,):
        raise EngineError(f"a step takes f32[1..{most}, {width}], not f32{[*hidden.shape]}")
    if not all(0 <= row < tokens for row in rows) or len(rows) > most:
        raise EngineError(f"logits of rows {[*rows]} were asked for; the step has {tokens} rows")


def grown_capacity(capacity: int, tokens: int, first: int, context: int) -> int:
    """The capacity of a cache that was too small for so many tokens.

    It is at least doubled, so that a sequence that grows token by token is seldom moved.

    Args:
        capacity: what it was, in tokens; 0: there was no cache.
        tokens: that it must hold, at most `context`.
        first: the least that it may become.
        context: the most.
    """
    return min(context, max(first, tokens, 2 * capacity))
