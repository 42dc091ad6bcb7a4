"""Who calls the API, by the secret that a request shows: a key, a node of the mesh, or this process's own operator."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from motley.orchestrator.store.keys import Keys, Scope
from motley.orchestrator.store.members import Members


@dataclass(frozen=True)
class Caller:
    """
    Attributes:
        name: for the audit, and for what is counted of its requests.
    """

    name: str
    scope: Scope


LOCAL = Caller("this machine", Scope.ADMIN)
"""A program on the orchestrator's machine, where the API is open to them."""


class Callers:
    """Everybody who has a secret."""

    def __init__(self, keys: Keys, members: Members, given: Iterable[str]) -> None:
        """
        Args:
            given: secrets that are kept nowhere, and may do everything.
        """
        self._keys = keys
        self._members = members
        self._given = [secret.encode() for secret in given]

    def find(self, secret: str) -> Caller | None:
        """Whoever has this secret."""
        shown = secret.encode(errors="replace")
        if any(hmac.compare_digest(shown, own) for own in self._given):
            return Caller("operator", Scope.ADMIN)
        if key := self._keys.find(secret):
            return Caller(f"key {key.id}", key.scope)
        if member := self._members.find(secret):
            return Caller(f"node {member.name}", Scope.USE)
        return None
