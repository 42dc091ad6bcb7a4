"""Machines that want to join by a code: it is shown where the orchestrator runs, and typed on the machine. Pure.

A guess at a code costs a try. A code has few, lives for minutes, and so many codes are made in an hour and no more:
whoever asks for one after another has a chance of one in a million an hour, and is seen on the screen.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from motley.protocol.pairing import new_code

LIFE_S = 300.0
"""A code is valid for so long."""
TRIES = 3
"""So often may be tried what a code is."""
MOST = 4
"""So many machines may be asked for a code at a time."""
PER_HOUR = 30
"""So many codes are made in an hour."""
HOUR_S = 3600.0


class PairingError(Exception):
    """A machine cannot be paired now; the message says why and what to do."""


@dataclass
class Pairing:
    """
    Attributes:
        name: what the machine calls itself.
        address: from which it has asked.
        token: that is handed over, once there is one: by every try the same.
    """

    id: str
    name: str
    address: str
    code: str
    until: float
    tries_left: int = TRIES
    token: str = ""


class Pairings:
    """Pairings that are under way."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """
        Args:
            clock: monotonic, in seconds.
        """
        self._clock = clock
        self._open: dict[str, Pairing] = {}
        self._made: list[float] = []

    def __iter__(self) -> Iterator[Pairing]:
        self._forget_old()
        return iter(list(self._open.values()))

    def ask(self, name: str, address: str) -> Pairing:
        """A machine wants to join: what it is to be asked for. If it asks again, the code before is void.

        Raises:
            PairingError: its name cannot be shown, or too many codes were wanted lately.
        """
        self._forget_old()
        if not name or not name.isprintable() or len(name) > 64:
            raise PairingError("a machine's name has 1 to 64 printable characters; use --name")
        self._open = {key: own for key, own in self._open.items() if own.address != address}
        if len(self._open) >= MOST or len(self._made) >= PER_HOUR:
            raise PairingError(
                "too many machines have asked for a code lately; wait, or give it a join token (`motley token create`)"
            )
        now = self._clock()
        self._made.append(now)
        made = Pairing(secrets.token_hex(8), name, address, new_code(), now + LIFE_S)
        self._open[made.id] = made
        return made

    def attempt(self, pairing_id: str) -> Pairing:
        """A pairing of which somebody is to find out whether a code is right; that counts as a try.

        Raises:
            PairingError: there is no such, or it was tried too often.
        """
        self._forget_old()
        found = self._open.get(pairing_id)
        if found is None or not found.tries_left:
            raise PairingError(
                f"this code has expired (after {LIFE_S / 60:.0f} minutes), or was wrong too often; run the command"
                " again for another"
            )
        found.tries_left -= 1
        return found

    def is_open(self, pairing_id: str) -> bool:
        """Whether there is such a pairing, with a code that is good."""
        self._forget_old()
        return pairing_id in self._open

    def give_up(self, pairing_id: str) -> Pairing | None:
        """A machine does without its code, which is void. None: it was already."""
        self._forget_old()
        return self._open.pop(pairing_id, None)

    def _forget_old(self) -> None:
        now = self._clock()
        self._open = {key: own for key, own in self._open.items() if now < own.until}
        self._made = [made for made in self._made if now - made < HOUR_S]
