"""Guesses how texts go on, so that several tokens can be computed at once, and says how many are worth their time.

A guess is used if it is the token that the model chooses anyway, so no text depends on any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

GRAM = 3
"""Tokens that must have been seen in a row before, for their continuation to be a guess."""
MOST = 15
"""Guesses of one request in a step at most."""
AT_FIRST = 0.6
"""How likely a guess is thought to be right before any was tried."""
NEWEST = 0.12
"""What the latest guess weighs in that."""
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
        for end in range(self._seen, len(tokens)):
            self._after[tuple(tokens[end - GRAM : end])] = end
        self._seen = max(self._seen, len(tokens))
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
        accepted: how many have been.
    """

    def __init__(self) -> None:
        self.chance = AT_FIRST
        self.accepted = 0
        self._without = 0

    def tried(self, right: int, wrong: bool) -> None:
        """Learn that the first `right` guesses of a step were right, and whether the one after them was wrong."""
        self._without = 0
        self.accepted += right
        for outcome in [1.0] * right + [0.0] * wrong:
            self.chance += NEWEST * (outcome - self.chance)

    def worth(self) -> list[float]:
        """The chances that the first guess, the first two, the first three... are right."""
        self._without += 1
        chances = [self.chance**number for number in range(1, MOST + 1)]
        return chances if self._without % PROBE else [max(AT_FIRST, chances[0]), *chances[1:]]


def how_many(chances: Sequence[Sequence[float]], seconds: Callable[[int], float]) -> list[int]:
    """How many guesses of each request make tokens come fastest.

    Args:
        chances: of each request that is being answered, that the first guess, the first two, ... are right; falling.
        seconds: estimates how long a step of so many rows takes.
    """
    requests = len(chances)
    ordered = sorted(
        ((chance, number) for number, own in enumerate(chances) for chance in own if chance >= HOPELESS),
        key=lambda each: -each[0],
    )
    best, best_rate = 0, requests / seconds(requests)
    expected = float(requests)
    for count, (chance, _) in enumerate(ordered, start=1):
        expected += chance
        rate = expected / seconds(requests + count)
        if rate > best_rate:
            best, best_rate = count, rate
    numbers = [number for _, number in ordered[:best]]
    return [numbers.count(number) for number in range(requests)]
