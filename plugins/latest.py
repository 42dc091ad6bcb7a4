"""What was used latest of things that take memory: as many as are worth it, made again when they are wanted again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Latest(Generic[K, V]):
    """Keeps the values that were asked for latest.

    Args:
        most: how many, at least one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, made if it is not there; what was not asked for longest goes if there is too much."""
        if key not in self._kept:
            self._kept[key] = make()
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def values(self) -> Iterable[V]:
        """All that are kept."""
        return self._kept.values()

    def clear(self) -> None:
        """Drop all of them."""
        self._kept.clear()
