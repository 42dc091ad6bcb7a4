"""The time that patterns may take, which are a stranger's and run where a node talks with its orchestrator."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

PATIENCE_S, _PATIENCE_S_PER_CHARACTER = 0.2, 100e-6
"""What patterns may take of a processor's time at once, and anew with every character that a model writes; usual ones
take a tenth of that."""
Result = TypeVar("Result")


class Patience:
    """The time that is left for the patterns of a response template, in all answers that it takes apart.

    What is counted is the time of the thread that searches. The library ends a search by another clock: by the time of
    all threads of the process, on Windows by the time on the wall; so it may end one earlier, where others work too.

    Attributes:
        lost: whether a search took longer than was left; then there is no more time for any.
    """

    def __init__(self) -> None:
        self.lost = False
        self._left = PATIENCE_S

    def grant(self, characters: int) -> None:
        """Give more, as so many characters have come."""
        self._left = min(PATIENCE_S, self._left + _PATIENCE_S_PER_CHARACTER * characters)

    def __call__(self, look: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
        """What a method of a pattern finds.

        Raises:
            TimeoutError: it takes longer than is left, or something did before.
        """
        if self.lost:
            raise TimeoutError
        begun = time.thread_time()
        try:
            return look(*arguments, **options, timeout=max(0.0, self._left))
        except TimeoutError:
            self.lost = True
            logger.warning(
                "the model's response_template: its patterns take too long, so it is no longer used: the rest of"
                " answers under way is not taken apart, later ones are by what stands in the chat template"
            )
            raise
        finally:
            self._left -= time.thread_time() - begun
