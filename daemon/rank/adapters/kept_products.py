"""A rank's shares of adapters in memory: those in slots, and of others as many as the rest of the planned room holds.

So an adapter that takes turns with others is loaded without its file being read.
"""

from __future__ import annotations

from typing import NamedTuple

from motley.daemon.experts.factors import ExpertsAdapter
from motley.daemon.rank.adapters.beginnings import Beginnings
from motley.plugins.adapted_engine import PreparedAdapter


class AdapterShare(NamedTuple):
    """What a rank has of an adapter in memory.

    Attributes:
        prepared: what its engine has.
        embedding: what becomes of the rows that tokens begin with here; None: they are those of the model.
        experts: what it adds to experts that are on hosts; None: nothing.
    """

    prepared: PreparedAdapter
    embedding: Beginnings | None = None
    experts: ExpertsAdapter | None = None

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        beside = [each.nbytes for each in (self.embedding, self.experts) if each is not None]
        return self.prepared.nbytes + sum(beside)


class KeptProducts:
    """Shares by the fingerprints of their adapters. Pure."""

    def __init__(self, limit: int) -> None:
        """
        Args:
            limit: bytes that all of them together may have, unless those in slots alone have more.
        """
        self._limit = limit
        self._kept: dict[str, AdapterShare] = {}
        """The one that was used longest ago first."""
        self._in_slots: dict[int, str] = {}

    @property
    def bytes(self) -> int:
        """What all of them have together."""
        return sum(own.nbytes for own in self._kept.values())

    def get(self, adapter: str) -> AdapterShare | None:
        """The share of an adapter, which is used now; None: it is not here."""
        own = self._kept.pop(adapter, None)
        if own is not None:
            self.put(adapter, own)
        return own

    def put(self, adapter: str, share: AdapterShare) -> None:
        """Keep a share, in place of others that are in no slot and were used longest ago."""
        self._kept.pop(adapter, None)
        self._kept[adapter] = share
        self._make_room()

    def loaded(self, slot: int, adapter: str) -> None:
        """A share that is kept is in a slot from now on, instead of what was there before."""
        assert adapter in self._kept
        self._in_slots[slot] = adapter
        self._make_room()

    def _make_room(self) -> None:
        for adapter in list(self._kept)[:-1]:
            if self.bytes <= self._limit:
                return
            if adapter not in self._in_slots.values():
                del self._kept[adapter]
