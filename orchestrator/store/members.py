"""Members: machines that have joined with a token. Each has a secret of its own, by which it comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import delete, insert

from motley.orchestrator.store.secret import digest, new_secret
from motley.orchestrator.store.store import Store, StoreError
from motley.orchestrator.store.tables import MEMBERS
from motley.orchestrator.store.tokens import Token, Tokens

MOST = 10_000
"""A mesh has no more members, with those that were there once."""


@dataclass(frozen=True)
class Member:
    """
    Attributes:
        name: of the node.
        token: the id of the token with which it joined.
        joined: Unix time.
    """

    name: str
    digest: str
    token: str
    joined: float


class Members:
    """All members, whether their machines are on or not."""

    def __init__(self, store: Store, tokens: Tokens) -> None:
        """
        Raises:
            StoreError: they cannot be read.
        """
        self._store = store
        self._tokens = tokens
        self._members = {row["digest"]: Member(**row) for row in store.rows(MEMBERS)}

    def __iter__(self) -> Iterator[Member]:
        return iter(sorted(self._members.values(), key=lambda member: member.name))

    def find(self, secret: str) -> Member | None:
        """The member that has a secret."""
        return self._members.get(digest(secret))

    async def admit(self, name: str, token: Token) -> str:
        """Make a machine a member, in the place of one of that name; the secret by which it comes back.

        Raises:
            StoreError: that cannot be written, there are `MOST`, or the token was used up in this moment.
        """
        if not self._tokens.is_valid(token):
            raise StoreError("the join token is no longer valid")
        if len(self._members) >= MOST:
            raise StoreError(f"this mesh has {MOST} members; revoke some (`motley nodes revoke`)")
        secret = new_secret()
        member = Member(name, digest(secret), token.id, time.time())
        used = self._tokens.take(token)
        try:
            await self._store.write(
                *([] if used is None else [used]),
                delete(MEMBERS).where(MEMBERS.c.name == name),
                insert(MEMBERS).values(**vars(member)),
            )
        except StoreError:
            self._tokens.give_back(token)
            raise
        self._drop(name)
        self._members[member.digest] = member
        return secret

    async def revoke(self, name: str) -> Member | None:
        """Make a machine no member any more, nor anybody else who has the token with which it joined; None if there is
        no such member.

        Raises:
            StoreError: that cannot be written; it holds until the next start.
        """
        member = self._drop(name)
        if member is not None:
            try:
                await self._tokens.remove(member.token)
            finally:
                await self._store.write(delete(MEMBERS).where(MEMBERS.c.name == name))
        return member

    def _drop(self, name: str) -> Member | None:
        found = next((member for member in self._members.values() if member.name == name), None)
        return None if found is None else self._members.pop(found.digest)
