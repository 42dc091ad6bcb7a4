"""What is looked for beside the steps, each thing in a thread of its own: a disk may be slow, or hang for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

AT_ONCE = 4
"""Threads at most, those that hang among them."""
SILENT_S = 20.0
"""What has shown no sign of life for so long is given up."""
K = TypeVar("K")
R = TypeVar("R")
Alive = Callable[[], None]
"""To be called now and then by what gets on."""


class Lookups(Generic[K, R]):
    """Things that are looked for, by what names them. One thread uses it."""

    def __init__(
        self, look: Callable[[K, Alive], R], clock: Callable[[], float] = time.monotonic, at_once: int = AT_ONCE
    ) -> None:
        """`look`: finds something, in another thread."""
        self._look = look
        self._clock = clock
        self._at_once = at_once
        self._under_way: dict[K, _Lookup[K, R]] = {}
        self._given_up: list[_Lookup[K, R]] = []
        """Threads that hang."""

    def ask(self, key: K, patience_s: float) -> R | str | None:
        """What `look` has found, or why it has not; None: it still looks, so ask again.

        Args:
            patience_s: to wait for it.
        """
        lookup = self._under_way.get(key)
        if lookup is None:
            self._given_up = [each for each in self._given_up if each.is_alive()]
            if len(self._given_up) >= self._at_once:
                return f"{self._at_once} folders were looked into whose disks do not answer: nothing else is looked for"
            if len(self._given_up) + len(self._under_way) >= self._at_once:
                return None
            lookup = self._under_way[key] = _Lookup(self._look, key, self._clock)
            lookup.start()
        lookup.join(patience_s)
        if lookup.is_alive() and self._clock() - lookup.last_sign < SILENT_S:
            return None
        del self._under_way[key]
        if lookup.is_alive():
            self._given_up.append(lookup)
            return f"a disk has not answered for {SILENT_S:.0f} s"
        return lookup.found if lookup.found is not None else lookup.trouble


class _Lookup(threading.Thread, Generic[K, R]):
    """One that is under way, or done. It ends with the process at the latest."""

    def __init__(self, look: Callable[[K, Alive], R], key: K, clock: Callable[[], float]) -> None:
        super().__init__(name="adapters", daemon=True)
        self._look = look
        self._key = key
        self._clock = clock
        self.last_sign = clock()
        self.found: R | None = None
        self.trouble = ""

    def run(self) -> None:
        """Look."""
        try:
            self.found = self._look(self._key, self._alive)
        except Exception as error:  # told to whoever asked; nobody else hears of this thread
            self.trouble = str(error) or type(error).__name__

    def _alive(self) -> None:
        self.last_sign = self._clock()
