"""Which adapter is in which slot of a session's ranks, and which one gives way to another. Pure: no I/O, no clock.

All ranks have the same slots, as they load what rank 0 tells them. An adapter may be loaded once its files are on every
rank's disk; it stays in its slot until another one needs that: then the one goes that nobody uses and that was used
longest ago. Pinned ones stay. One slot at least is for those that are not pinned, so that nobody waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

NONE = 0
"""The slot of who has no adapter; those of adapters are counted from 1 on."""


@dataclass
class _Loaded:
    """An adapter that has a slot.

    Attributes:
        users: requests under way that are computed with it.
        ready: whether its weights are in the slot; else they are about to be loaded.
    """

    slot: int
    users: int = 0
    ready: bool = False


class AdapterTable:
    """The slots of a session, and the adapters in them, by their fingerprints.

    Attributes:
        count: slots there are.
        loads: how often an adapter was loaded into one.
        short: whether somebody waits for a slot: who comes later must not keep any busy before.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.loads = 0
        self.short = False
        self._there: set[str] = set()
        """Adapters whose files all ranks have."""
        self._pinned: set[str] = set()
        self._loaded: dict[str, _Loaded] = {}
        """Those that have a slot, the one that was used longest ago first."""

    @property
    def loaded(self) -> dict[str, int]:
        """The adapters whose weights are in a slot, each with that, the one that was used longest ago first."""
        return {adapter: own.slot for adapter, own in self._loaded.items() if own.ready}

    @property
    def pinned(self) -> frozenset[str]:
        """Adapters that stay in their slots."""
        return frozenset(self._pinned)

    def knows(self, adapter: str) -> bool:
        """Whether all ranks have an adapter's files."""
        return adapter in self._there

    def found(self, adapter: str) -> None:
        """All ranks have an adapter's files, so it may be loaded."""
        self._there.add(adapter)

    def pin(self, adapter: str) -> bool:
        """Keep an adapter in the slot that it has or gets; False: as many are pinned already as may be."""
        if adapter not in self._pinned and len(self._pinned) >= self.count - 1:
            return False
        self._pinned.add(adapter)
        return True

    def unpin(self, adapter: str) -> None:
        """Let an adapter give way again."""
        self._pinned.discard(adapter)

    def begin(self) -> None:
        """Those that wait are looked at anew, the one that has waited longest first."""
        self.short = False

    def may_take(self, adapter: str) -> bool:
        """Whether a request may use an adapter now: it is loaded, and nobody waits for a slot."""
        return not self.short and adapter in self._loaded and self._loaded[adapter].ready

    def take(self, adapter: str) -> int:
        """Have a request use an adapter that it `may_take`, until it leaves that; the slot."""
        assert self.may_take(adapter), adapter
        own = self._loaded[adapter]
        own.users += 1
        self._used(adapter)
        return own.slot

    def leave(self, adapter: str) -> None:
        """A request does not use an adapter any longer."""
        own = self._loaded[adapter]
        assert own.users, adapter
        own.users -= 1
        self._used(adapter)

    def place(self, adapter: str) -> int | None:
        """Give an adapter a slot, into which it is to be loaded now: then say `ready`, or `failed`.

        None: its files are not there yet, or it has a slot, or all are in use, for which it waits then.
        """
        if adapter not in self._there or adapter in self._loaded or self.short:
            return None
        slot = self._free_slot()
        if slot is None:
            self.short = True
            return None
        self._loaded[adapter] = _Loaded(slot)
        return slot

    def ready(self, adapter: str) -> None:
        """An adapter has been loaded into the slot that it was given."""
        self._loaded[adapter].ready = True
        self.loads += 1

    def failed(self, adapter: str) -> None:
        """It could not be loaded; its slot is free, and its files have to be found again."""
        assert not self._loaded[adapter].ready, adapter
        del self._loaded[adapter]
        self._there.discard(adapter)

    def _used(self, adapter: str) -> None:
        self._loaded[adapter] = self._loaded.pop(adapter)

    def _free_slot(self) -> int | None:
        """A slot that is empty, or whose adapter gives way; None: there is none."""
        if empty := set(range(1, self.count + 1)) - {own.slot for own in self._loaded.values()}:
            return min(empty)
        idle = (name for name, own in self._loaded.items() if own.ready and not own.users)
        oldest = next((name for name in idle if name not in self._pinned), None)
        return self._loaded.pop(oldest).slot if oldest is not None else None
