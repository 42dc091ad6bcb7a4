"""Adapters of a session, as rank 0 leads them: who is answered with which, and that it shows in nobody else's text.

The scheduler, the executors and what ranks say of adapters are real; what a rank has of them is a stand-in.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.rank.adapters.messages import (
    FindAdapter,
    FoundAdapter,
    LoadAdapter,
    Piece,
    ReadAdapter,
    WriteAdapter,
)
from motley.daemon.rank.scheduling import scheduler
from motley.daemon.rank.steps import Moved
from motley.plugins.engine import F32, CacheBlocks
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp
from tests.daemon.rank.test_scheduler import Draft, Eager, Session, alone, drawn_requests, request

SIZE, PIECE = 250, 100
"""Bytes of an adapter's files, and of a piece of them."""


def name_of(adapter: int) -> str:
    return f"{adapter:064x}"


@dataclass
class Disk:
    """What one rank has of adapters.

    Attributes:
        there: fingerprints of those whose files it has.
        slots: what the engine has, by number of the adapter.
        source: the fingerprint of what it finds where it is told to look; empty: nothing.
        broken: fingerprints of those that it cannot load.
        hanging: of those that it looks for for ever.
        slow: whether it reads a piece only when it is asked again.
        fetched: what it was told to fetch from the hub, where adapter 9 is.
        damaging: whether what it is sent is wrong afterwards.
    """

    rank: int
    there: set[str]
    slots: dict[int, int] = field(default_factory=dict)
    source: str = ""
    broken: Collection[str] = ()
    hanging: Collection[str] = ()
    damaging: bool = False
    fetched: str = ""
    slow: bool = False
    coming: bytes = b""
    asked: int = 0

    def embed(self, slot: int, rows: F32, tokens: Sequence[int]) -> None:
        """All begin with the model's rows."""

    def do(self, message: FindAdapter | ReadAdapter | WriteAdapter | LoadAdapter) -> FoundAdapter | Piece | Moved:
        match message:
            case FindAdapter(name, source, again, fetch):
                if fetch and self.rank == 0:
                    self.fetched, self.source = source, name_of(9)
                self.asked = self.asked + 1 if again else 0
                if self.asked < self.rank % 2 or name in self.hanging:  # it still reads
                    return FoundAdapter("", pending=True)
                found = name if name in self.there else self.source if source and not name else ""
                if not found:
                    return FoundAdapter("", trouble=f"no folder {source}")
                self.there.add(found)
                return FoundAdapter(found, 8, 200, SIZE)
            case ReadAdapter(holder, _, start):
                self.slow = not self.slow
                if self.slow and holder == self.rank:
                    return Piece(pending=True)
                return Piece(bytes(SIZE)[start : start + PIECE] if holder == self.rank else b"")
            case WriteAdapter(name, start, size, data):
                self.coming = (b"" if start == 0 else self.coming) + data
                assert len(self.coming) == start + len(data)
                if len(self.coming) == size and not self.damaging:
                    self.there.add(name)
                return Moved()
            case LoadAdapter(name, slot):
                if name not in self.there or name in self.broken:
                    return Moved(f"{int(name, 16)} cannot be read")
                self.slots[slot] = int(name, 16)
                return Moved()


def disks(*there: Collection[int]) -> list[Disk]:
    """What each rank has the files of."""
    return [Disk(rank, set(map(name_of, own))) for rank, own in enumerate(there)]


def adapted(asked: wp.Decode, adapter: int) -> wp.Decode:
    if adapter:
        asked.adapter.CopyFrom(pb.Adapter(fingerprint=name_of(adapter), source="/somewhere"))
    return asked


def order(name: str, adapter: int = 0, **wanted: bool) -> pb.AdapterOrder:
    fingerprint = name_of(adapter) if adapter else ""
    return pb.AdapterOrder(id=name, adapter=pb.Adapter(fingerprint=fingerprint, source="/somewhere"), **wanted)


@given(
    st.data(),
    st.sampled_from(((16,), (16, 3), (2, 128, 16))),
    st.sampled_from((CacheBlocks(16, 4), CacheBlocks(9, 7), CacheBlocks(1000, 5), CacheBlocks(8, 4, far=8))),
    st.integers(1, 10),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_text_depends_on_its_own_adapter_and_on_no_other(
    data: st.DataObject, most: tuple[int, ...], blocks: CacheBlocks, number: int, slots: int, drafts: bool
) -> None:
    """Whoever else is answered, however few slots there are, and whichever ranks had the files first."""
    requests = [adapted(each, data.draw(st.integers(0, 4))) for each in drawn_requests(data, number)]
    owners = [data.draw(st.sampled_from(range(len(most)))) for _ in range(5)]
    there = [{each for each in range(1, 5) if owners[each] == rank} for rank in range(len(most))]
    session = Session(most, blocks, adapted=disks(*there), slots=slots, draft=Draft() if drafts else None)
    arrivals = {each.request_id: data.draw(st.integers(0, 30)) for each in requests}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "Drafting", Eager)
        session.run(requests, arrivals)
    for asked in requests:
        only = alone(asked, most=most, blocks=blocks, adapted=disks(*[range(1, 5)] * len(most)), slots=1)
        assert (session.texts[asked.request_id], session.ends[asked.request_id]) == only
    assert not session.failures


def test_prefixes_are_found_again_with_the_same_adapter_alone() -> None:
    prompt = range(40)
    session = Session(adapted=disks({1, 2}), slots=2)
    requests = [adapted(request(str(number), prompt, 1), adapter) for number, adapter in enumerate((0, 1, 2, 0, 1, 2))]
    session.run(requests, {str(number): 20 * number for number in range(6)})
    assert session.cached == {"3": 39, "4": 39, "5": 39}


def test_an_adapter_that_no_rank_has_ends_those_who_want_it_and_nobody_else() -> None:
    session = Session((16, 16), adapted=disks({1}, set()), slots=1)
    wanted = (1, 7, 0, 7)
    session.run([adapted(request(str(number), [1, 2], 5), adapter) for number, adapter in enumerate(wanted)])
    assert {name: len(text) for name, text in session.texts.items()} == {"0": 5, "1": 0, "2": 5, "3": 0}
    assert session.failure_codes == dict.fromkeys("13", "adapter_unavailable")
    assert session.failures["1"].message == "no folder /somewhere"


def test_an_adapter_that_cannot_be_loaded_leaves_its_slot_to_others() -> None:
    both = disks({1, 2}, {1, 2})
    both[1].broken = {name_of(1)}
    session = Session((16, 16), adapted=both, slots=1)
    session.run([adapted(request(str(adapter), [1, 2], 5), adapter) for adapter in (1, 2)])
    assert session.failure_codes == {"1": "adapter_unavailable"}
    assert session.failures["1"].message == "rank 1: 1 cannot be read"
    assert len(session.texts["2"]) == 5


def test_an_adapter_is_ordered_by_where_it_is_and_told_by_what_it_is() -> None:
    both = disks(set(), set())
    both[1].source = name_of(5)
    session = Session((16, 16), adapted=both, slots=1)
    session.run([], orders=[(0, order("a"))])
    event = session.adapter_events["a"]
    assert (event.fingerprint, event.rank, event.bytes) == (name_of(5), 8, 200)
    assert name_of(5) in both[0].there
    both[0].source = name_of(6)
    session.run([], orders=[(0, order("a")), (0, order("b"))])
    assert "ranks 0 and 1 have unlike files in /somewhere" in session.adapter_events["b"].failure.message


def loaded(session: Session) -> Sequence[str]:
    return session._scheduler._activity().adapters


def test_a_pinned_adapter_stays_while_others_take_turns() -> None:
    session = Session(adapted=disks({1, 2, 3}), slots=2)
    session.run([], orders=[(0, order("a", 1, pin=True)), (0, order("b", 2, pin=True))])
    assert not session.adapter_events["a"].HasField("failure")
    assert "1 of 2 slots have pinned adapters" in session.adapter_events["b"].failure.message
    assert loaded(session) == [name_of(1)]
    session.run([adapted(request(str(adapter), [1], 3), adapter) for adapter in (2, 3)])
    assert loaded(session) == [name_of(1), name_of(3)]
    again = adapted(request("again", [1], 3), 2)
    session.ends.clear()
    session.run([again], {"again": 1}, orders=[(0, order("c", 1, unpin=True))])
    assert loaded(session) == [name_of(3), name_of(2)]


@pytest.mark.parametrize("slots", [1, 2])
def test_nobody_waits_for_ever_for_a_slot(slots: int) -> None:
    """However many come for the adapters that are loaded."""
    session = Session(adapted=disks({1, 2, 3}), slots=slots)
    requests = [adapted(request(str(number), [1, 2], 30), 1 + number % slots) for number in range(12)]
    late = adapted(request("late", [3], 2), 3)
    session.run([*requests, late], {str(number): 5 * number for number in range(12)} | {"late": 1})
    ends = list(session.ends)
    assert ends.index("late") <= slots
    assert not session.failures


def test_a_session_without_slots_refuses() -> None:
    session = Session()
    session.run([adapted(request("a", [1], 3), 1)])
    assert session.failure_codes == {"a": "invalid_request"}


def test_one_that_is_looked_for_for_ever_keeps_no_other_waiting() -> None:
    both = disks({1, 2}, {2})
    both[0].hanging = {name_of(1)}
    session = Session((16, 16), adapted=both, slots=2)
    asked = [adapted(request(str(adapter), [1, 2], 5), adapter) for adapter in (1, 2)]
    with pytest.raises(AssertionError):  # the first one's text has no end
        session.run(asked)
    assert len(session.texts["2"]) == 5
    assert "1" not in session.ends


def test_what_was_sent_is_looked_at_before_anybody_is_told_that_it_is_there() -> None:
    both = disks({5}, set())
    both[0].source, both[1].damaging = name_of(5), True
    session = Session((16, 16), adapted=both, slots=1)
    session.run([], orders=[(0, order("a"))])
    assert session.adapter_events["a"].failure.message == "rank 1: no folder /somewhere"


def test_a_pin_is_undone_that_is_not_carried_out_yet() -> None:
    session = Session(adapted=disks({1, 2}), slots=2)
    undone = [(0, order("a", 1, pin=True)), (0, order("b", 1, unpin=True))]
    session.run([], orders=[*undone, (0, order("c", 2, pin=True))])
    assert not any(event.HasField("failure") for event in session.adapter_events.values())
    assert loaded(session) == [name_of(2)]


def test_a_pin_that_fails_is_none() -> None:
    both = disks({1, 2}, {1, 2})
    both[1].broken = {name_of(1)}
    session = Session((16, 16), adapted=both, slots=2)
    session.run([], orders=[(0, order("a", 1, pin=True)), (0, order("b", 2, pin=True))])
    assert session.adapter_events["a"].failure.message == "rank 1: 1 cannot be read"
    assert not session.adapter_events["b"].HasField("failure"), "its place among the pinned is free"
    assert loaded(session) == [name_of(2)]
    both[1].broken = ()
    session.run([adapted(request("c", [1], 3), 1)])
    assert len(session.texts["c"]) == 3


def test_what_no_rank_has_comes_from_the_hub() -> None:
    both = disks(set(), set())
    session = Session((16, 16), adapted=both, slots=1)
    hub = pb.AdapterOrder(id="a", adapter=pb.Adapter(source="owner/name"))
    session.run([], orders=[(0, hub), (0, order("b"))])
    assert session.adapter_events["a"].fingerprint == name_of(9)
    assert "no folder /somewhere" in session.adapter_events["b"].failure.message, "a path is none of the hub's"
    assert [disk.fetched for disk in both] == ["owner/name", ""]
    assert all(name_of(9) in disk.there for disk in both)
