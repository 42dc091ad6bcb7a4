"""Guesses how texts go on, so that several tokens can be computed at once, and says how many are worth their time.

A guess is used if it is the token that the model chooses anyway, so no text depends on any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

GRAM = 3
"""Tokens that must have been seen in a row before, for their continuation to be a guess."""
AT_ONCE = 2048
"""Tokens of a long prompt that are looked at in a step, which everybody waits for."""
MOST = 15
"""Guesses of one request in a step at most."""
AT_FIRST = 0.6
"""How likely a guess is thought to be right before any was tried."""
LATEST_WEIGHT = 0.12
"""What the latest guess counts in that."""
HOPELESS = 0.05
"""Guesses that are less likely to be right are not tried, whatever they cost."""
PROBE = 24
"""A request that has had no guess in so many steps gets one again: its text may have become easier to guess."""


class Lookup:
    """Guesses that a text goes on as it did after the same tokens before: code that is edited, a summary with quotes.

    Source: Saxena 2023, prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding.
    """

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        """Where the text went on after some tokens, the last time."""
        self._seen = GRAM
        """Tokens before this place have been looked at."""

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Guess the next tokens, at most so many; none, if there is nothing to go by.

        Args:
            tokens: all of the text so far; it never gets shorter from call to call.
        """
        until = min(len(tokens), self._seen + AT_ONCE)
        for end in range(self._seen, until):
            self._after[tuple(tokens[end - GRAM : end])] = end
        self._seen = max(self._seen, until)
        start = self._after.get(tuple(tokens[-GRAM:]))
        if start is None:
            return []
        guessed: list[int] = []
        for at in range(start, start + most):  # which may run into the guesses themselves, if the text repeats itself
            guessed.append(tokens[at] if at < len(tokens) else guessed[at - len(tokens)])
        return guessed


class Luck:
    """How often the guesses for a request have been right.

    Attributes:
        chance: that the next guess is.
    """

    def __init__(self, chance: float = AT_FIRST) -> None:
        """`chance`: as it is thought to be before any guess was tried."""
        self.chance = chance
        self._without = 0

    def tried(self, right: int, wrong: bool) -> None:
        """Learn that the first `right` guesses of a step were right, and whether the one after them was wrong."""
        self._without = 0
        for outcome in [1.0] * right + [0.0] * wrong:
            self.chance += LATEST_WEIGHT * (outcome - self.chance)

    def worth(self) -> list[float]:
        """The chances that the first guess, the first two, the first three... are right."""
        self._without += 1
        chances = [self.chance**number for number in range(1, MOST + 1)]
        return chances if self._without % PROBE else [max(AT_FIRST, chances[0]), *chances[1:]]


def how_many(chances: Sequence[Sequence[float]], seconds: Callable[[int, int], F64]) -> tuple[list[int], float]:
    """How many guesses of each request make tokens come fastest.

    Args:
        chances: of each request that is being answered, that the first guess, the first two, ... are right; falling.
        seconds: estimates how long steps take, by `motley.daemon.rank.scheduling.pace.Pace.seconds_up_to`.

    Returns:
        A number for each request, and how many tokens per second are then expected.
    """
    requests = len(chances)
    flat = np.array([chance for own in chances for chance in own])
    whose = np.repeat(np.arange(requests), [len(own) for own in chances])
    hopeful = np.flatnonzero(flat >= HOPELESS)
    order = hopeful[np.argsort(-flat[hopeful], kind="stable")]
    expected = requests + np.concatenate(([0.0], np.cumsum(flat[order])))
    rates = expected / seconds(requests, requests + len(order))
    best = int(np.argmax(rates))
    return np.bincount(whose[order[:best]], minlength=requests).tolist(), float(rates[best])
