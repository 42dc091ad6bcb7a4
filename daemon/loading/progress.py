"""Long work: telling how far it is, and telling whether it goes on or hangs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

Progress = Callable[[int, int], None]
"""Takes (bytes done, bytes in all) of a share; (bytes fetched, 0) while the model is being downloaded. One thread calls
it at a time, not always the same."""

TELL_S = 1.0
"""Seconds between two signs of life of work that does not count what it has done."""


class Watch:
    """Tells work that goes on, however slowly, from work that hangs.

    Whoever waits for the work, or gives signs of life for it, shows the watch now and then what has come of it.
    """

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: work that has brought nothing for longer hangs."""
        self._patience_s = patience_s
        self._come: object = None
        self._since = time.monotonic()

    def hangs(self, come: object = None) -> bool:
        """Whether nothing has come of the work for too long.

        Args:
            come: what has come of it so far: anything that changes while it goes on. Without it, all the time since
                the watch was made counts.
        """
        now = time.monotonic()
        if come != self._come:
            self._come, self._since = come, now
        return now - self._since > self._patience_s


@contextlib.contextmanager
def signs_of_life(tell: Callable[[], None], patience_s: float) -> Iterator[None]:
    """Call `tell` every `TELL_S` while the context lasts, from a thread of its own, as engines of every make spend
    minutes in calls of libraries. Nobody else may call it meanwhile.

    Args:
        patience_s: after so many seconds the work hangs, and `tell` is called no more.

    Raises:
        Exception: what `tell` raised, at the end of the context.
    """
    over = threading.Event()

    def work() -> None:
        watch = Watch(patience_s)
        while not over.wait(TELL_S) and not watch.hangs():
            tell()

    with ThreadPoolExecutor(1, "signs of life") as pool:
        telling = pool.submit(work)
        try:
            yield
        finally:
            over.set()
    telling.result()
