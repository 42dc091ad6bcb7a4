"""API keys: who shows one may use the mesh, or say who belongs to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import delete, insert

from motley.orchestrator.store.secret import digest, new_id, new_secret
from motley.orchestrator.store.store import Store, StoreError
from motley.orchestrator.store.tables import KEYS

PREFIX = "motley-"
"""With which keys begin, so that they are known where they should not be."""
MOST = 1000
"""So many keys there may be."""


class Scope(StrEnum):
    """What a caller may do."""

    USE = "use"
    """Ask models, load and close them, see what there is."""
    ADMIN = "admin"
    """Besides: make and remove keys and join tokens, and revoke nodes."""


@dataclass(frozen=True)
class Key:
    """
    Attributes:
        note: for people, who or what it was made for.
        created: Unix time.
    """

    id: str
    digest: str
    note: str
    scope: Scope
    created: float


class Keys:
    """All API keys that are kept."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        """
        Raises:
            StoreError: they cannot be read.
        """
        self._store = store
        self._clock = clock
        rows = store.rows(KEYS)
        self._keys = {row["digest"]: Key(**{**row, "scope": Scope(row["scope"])}) for row in rows}

    def __iter__(self) -> Iterator[Key]:
        """In the order in which they were made."""
        return iter(sorted(self._keys.values(), key=lambda key: key.created))

    def find(self, secret: str) -> Key | None:
        """The key that was made with a secret."""
        return self._keys.get(digest(secret))

    async def create(self, note: str, scope: Scope) -> tuple[Key, str]:
        """A new key, and its secret, which is kept nowhere.

        Raises:
            StoreError: it cannot be written, or there are `MOST` already.
        """
        if len(self._keys) >= MOST:
            raise StoreError(f"there are {MOST} API keys; remove some (`motley keys rm`)")
        secret = PREFIX + new_secret()
        key = Key(new_id(), digest(secret), note, scope, self._clock())
        await self._store.write(insert(KEYS).values(**{**vars(key), "scope": str(scope)}))
        self._keys[key.digest] = key
        return key, secret

    async def remove(self, key_id: str) -> Key | None:
        """Make a key invalid; None if there is no such.

        Raises:
            StoreError: that cannot be written; it is invalid until the next start.
        """
        key = next((own for own in self._keys.values() if own.id == key_id), None)
        if key is not None:
            del self._keys[key.digest]
            await self._store.write(delete(KEYS).where(KEYS.c.id == key_id))
        return key
