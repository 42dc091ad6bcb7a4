"""Join tokens: with one of them, a machine may become a member of the mesh."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sqlalchemy import Executable, delete, insert, update

from motley.orchestrator.store.secret import digest, new_id, new_secret
from motley.orchestrator.store.store import Store, StoreError
from motley.orchestrator.store.tables import TOKENS

MOST = 1000
"""So many tokens may be valid at a time."""


@dataclass
class Token:
    """
    Attributes:
        note: for people, who or what it was made for.
        created: Unix time.
        expires: Unix time; None: never.
        uses_left: how many machines may still join with it; None: any number.
    """

    id: str
    digest: str
    note: str
    created: float
    expires: float | None = None
    uses_left: int | None = None


class Tokens:
    """The tokens that are valid."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        """
        Raises:
            StoreError: they cannot be read.
        """
        self._store = store
        self._clock = clock
        self._tokens = {row["digest"]: Token(**row) for row in store.rows(TOKENS)}

    def __iter__(self) -> Iterator[Token]:
        """Those that are valid, in the order in which they were made."""
        return iter(sorted(filter(self._valid, self._tokens.values()), key=lambda token: token.created))

    async def create(
        self, note: str = "", expires_s: float | None = None, uses: int | None = None
    ) -> tuple[Token, str]:
        """A new token, and its secret, which is kept nowhere.

        Args:
            expires_s: seconds from now; None: never.
            uses: how many machines may join with it; None: any number.

        Raises:
            StoreError: it cannot be written, or there are `MOST` already.
        """
        if sum(map(self._valid, self._tokens.values())) >= MOST:
            raise StoreError(f"there are {MOST} join tokens; remove some (`motley token rm`)")
        now, secret = self._clock(), new_secret()
        token = Token(new_id(), digest(secret), note, now, None if expires_s is None else now + expires_s, uses)
        gone = [own for own in self._tokens.values() if not self._valid(own)]
        await self._store.write(
            *(delete(TOKENS).where(TOKENS.c.id == own.id) for own in gone), insert(TOKENS).values(**vars(token))
        )
        for own in gone:
            del self._tokens[own.digest]
        self._tokens[token.digest] = token
        return token, secret

    def find(self, secret: str) -> Token | None:
        """The token of a secret, if that is valid."""
        token = self._tokens.get(digest(secret))
        return token if token is not None and self._valid(token) else None

    def is_valid(self, token: Token) -> bool:
        """Whether somebody can still join with a token that was found."""
        return token.digest in self._tokens and self._valid(token)

    def take(self, token: Token) -> Executable | None:
        """Count a use, at once; what is to be written before it is made use of, if anything."""
        if token.uses_left is None:
            return None
        token.uses_left -= 1
        return update(TOKENS).where(TOKENS.c.id == token.id).values(uses_left=token.uses_left)

    def give_back(self, token: Token) -> None:
        """A use that was taken has not been made, and nothing of it was written."""
        if token.uses_left is not None:
            token.uses_left += 1

    async def remove(self, token_id: str) -> Token | None:
        """Make a token invalid; None if there is no such.

        Raises:
            StoreError: that cannot be written; it is invalid until the next start.
        """
        token = next((own for own in self._tokens.values() if own.id == token_id), None)
        if token is not None:
            del self._tokens[token.digest]
            await self._store.write(delete(TOKENS).where(TOKENS.c.id == token_id))
        return token

    def _valid(self, token: Token) -> bool:
        return (token.expires is None or self._clock() < token.expires) and token.uses_left != 0
