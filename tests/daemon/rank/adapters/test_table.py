"""Slots of adapters: nobody who is answered loses theirs, pinned ones stay, and nobody waits for ever."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from motley.daemon.rank.adapters.table import NONE, AdapterTable

NAMES = st.sampled_from("abcdef")


class Slots(RuleBasedStateMachine):
    """Whatever is asked of three slots, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = AdapterTable(3)
        self.users = Counter[str]()
        self.in_slots: dict[int, str] = {}
        """As a rank has them: what was loaded last."""

    @rule(name=NAMES)
    def find(self, name: str) -> None:
        self.slots.found(name)

    @rule(name=NAMES)
    def take(self, name: str) -> None:
        may = self.slots.may_take(name)
        assert may == (name in self.slots.loaded and not self.slots.short)
        if may:
            assert self.in_slots[self.slots.take(name)] == name
            self.users[name] += 1

    @rule(name=NAMES)
    @precondition(lambda self: self.users.total())
    def leave(self, name: str) -> None:
        if self.users[name]:
            self.slots.leave(name)
            self.users[name] -= 1

    @rule(name=NAMES, works=st.booleans())
    def load(self, name: str, works: bool) -> None:
        before = self.slots.loaded
        slot = self.slots.place(name)
        if slot is None:
            return
        assert self.slots.knows(name)
        assert name not in before
        gone = {each for each, own in before.items() if own == slot}
        idle = [each for each in before if not self.users[each] and each not in self.slots.pinned]
        assert gone <= set(idle[:1]), "the one that was used longest ago gives way, and no other"
        assert not gone or len(before) == 3
        self.in_slots[slot] = name
        if works:
            self.slots.ready(name)
        else:
            self.slots.failed(name)
            del self.in_slots[slot]
            assert not self.slots.knows(name)

    @rule(name=NAMES)
    def pin(self, name: str) -> None:
        may = name in self.slots.pinned or len(self.slots.pinned) < 2
        assert self.slots.pin(name) == may

    @rule(name=NAMES)
    def unpin(self, name: str) -> None:
        self.slots.unpin(name)

    @rule()
    def begin(self) -> None:
        self.slots.begin()

    @invariant()
    def who_is_answered_has_what_it_is_answered_with(self) -> None:
        loaded = self.slots.loaded
        assert {name for name, users in self.users.items() if users} <= set(loaded)
        assert len(set(loaded.values())) == len(loaded) <= 3
        assert set(loaded.values()) <= {1, 2, 3}
        assert NONE not in loaded.values()
        assert all(self.in_slots[slot] == name for name, slot in loaded.items())


TestSlots = Slots.TestCase


def test_who_waits_for_a_slot_gets_the_next_one_however_many_come_for_what_is_loaded() -> None:
    slots = AdapterTable(1)
    for name in "ab":
        slots.found(name)
    assert slots.place("a") == 1
    slots.ready("a")
    assert slots.take("a") == 1
    assert slots.place("b") is None
    assert slots.short
    assert not slots.may_take("a"), "it would keep the slot busy"
    slots.leave("a")
    slots.begin()
    assert slots.place("b") == 1
    slots.ready("b")
    assert slots.loaded == {"b": 1}


def test_one_slot_stays_for_those_that_are_not_pinned() -> None:
    assert not AdapterTable(1).pin("a")
    slots = AdapterTable(2)
    assert slots.pin("a")
    assert not slots.pin("b")
    slots.unpin("a")
    assert slots.pin("b")
