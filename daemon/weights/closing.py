"""The base class of what is opened by `with`, and closed where that ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Has something open until it is closed; a context that closes itself."""

    @abstractmethod
    def close(self) -> None:
        """Let go what is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
