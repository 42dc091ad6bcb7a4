"""Blocks of caches: nobody's are given to another, and what is found holds the tokens that were asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from math import log2
from types import FrameType
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from motley.daemon.rank.blocks import cache_blocks, far_room
from motley.daemon.rank.blocks.cache_blocks import BlockStore
from motley.daemon.rank.blocks.far_room import FarTier

Prefix = tuple[int, tuple[int, ...]]
"""A root, and tokens from the first of a sequence."""

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=5)


@dataclass(eq=False)
class Running:
    """A sequence that is running, as its scheduler knows it."""

    tokens: list[int]
    root: int
    blocks: list[int]
    computed: int
    shared: int
    """How many of its first blocks others may find."""


@dataclass
class Written:
    """What an engine has written to a block: after which tokens, and what."""

    before: Prefix
    tokens: list[int] = field(default_factory=list)


class Blocks(RuleBasedStateMachine):
    """Sequences begin, go on and end in any order. A slow model foretells what the store does, and remembers what was
    written to which block."""

    running = Bundle("running")

    @initialize(count=st.integers(1, 16), size=st.integers(1, 4))
    def open(self, count: int, size: int) -> None:
        self.begin_anew(BlockStore(count, size))

    def begin_anew(self, store: BlockStore) -> None:
        self.store, self.size = store, store.tokens
        self.count = store.near + store.far.count
        self.sequences: list[Running] = []
        self.kept: dict[Prefix, int] = {}
        """The block in which each prefix ends that can be found."""
        self.stamps: dict[Prefix, tuple[int, int]] = {}
        """When each was last given back, and how far from its end."""
        self.written: dict[int, Written] = {}
        self.gone: set[int] = set()
        """Blocks that there are no more."""
        self.clock = 0

    def prefix(self, sequence: Running, index: int) -> Prefix:
        """What a sequence has computed up to the end of its block `index`."""
        return sequence.root, tuple(sequence.tokens[: min((index + 1) * self.size, sequence.computed)])

    def in_use(self) -> set[Prefix]:
        return {self.prefix(one, index) for one in self.sequences for index in range(one.shared)}

    def leaves(self) -> list[Prefix]:
        """Prefixes that nobody uses and that no other continues, least recently used first."""
        used = self.in_use()
        inner = {(root, tokens[:end]) for root, tokens in self.kept for end in range(0, len(tokens), self.size)}
        return sorted(self.kept.keys() - used - inner, key=lambda prefix: self.stamps[prefix])

    def free(self) -> set[int]:
        used = {block for one in self.sequences for block in one.blocks}
        return {*range(self.count)} - self.gone - {*self.kept.values()} - used

    def common(self, prefix: Prefix, tokens: list[int], root: int, whole: int) -> int:
        """How many tokens to be found are in the last block of a prefix, if that comes after `whole` ones of them."""
        last, wanted = prefix[1][whole:], tokens[whole:-1][: self.size]
        if prefix[0] != root or list(prefix[1][:whole]) != tokens[:whole] or not 1 <= len(last) <= self.size:
            return 0
        common = next((at for at, pair in enumerate(zip(last, wanted, strict=False)) if len({*pair}) > 1), None)
        if common is None:
            common = min(len(last), len(wanted))
        return common if 2 * common >= min(len(last), len(wanted)) else 0

    def find(self, tokens: list[int], root: int) -> Running:
        whole = 0
        while whole + self.size < len(tokens) and (root, tuple(tokens[: whole + self.size])) in self.kept:
            whole += self.size
        near = (leaf for leaf in self.leaves() if self.kept[leaf] < self.store.near)
        leaves = {self.kept[leaf]: (leaf, self.common(leaf, tokens, root, whole)) for leaf in near}
        most = max((common for _, common in leaves.values()), default=0)

        blocks, found = self.store.find(tokens, root)

        assert found == whole + most < len(tokens)
        assert len(blocks) == -(-found // self.size)
        assert blocks[: whole // self.size] == [
            self.kept[root, tuple(tokens[:end])] for end in range(self.size, whole + 1, self.size)
        ]
        if most:
            leaf, common = leaves[blocks[-1]]
            assert common == most
            del self.kept[leaf]
        self.sequences.append(sequence := Running(tokens, root, blocks, found, whole // self.size))
        return sequence

    @rule(target=running, tokens=TOKENS, root=st.integers(0, 1))
    def begin(self, tokens: list[int], root: int) -> Running:
        return self.find(tokens, root)

    @rule(target=running, other=running, tokens=TOKENS)
    def begin_alike(self, other: Running, tokens: list[int]) -> Running:
        """A sequence that has its beginning in common with one that is running."""
        return self.find([*other.tokens, *tokens], other.root)

    @rule(tokens=TOKENS, root=st.integers(0, 1), more=st.integers(1, 9))
    def begin_without_room(self, tokens: list[int], root: int, more: int) -> None:
        """To ask whether there is room changes nothing, as the invariants and all that is found later tell."""
        assert not self.store.fits(tokens, root, self.store.available + more)

    @rule(sequence=running, tokens=TOKENS)
    def go_on(self, sequence: Running, tokens: list[int]) -> None:
        """Compute what is there, then as many tokens as there are blocks for."""
        sequence.tokens += tokens
        missing = -(-len(sequence.tokens) // self.size) - len(sequence.blocks)
        if (taken := self.take(missing)) is not None:
            sequence.blocks += taken
        while sequence.computed < min(len(sequence.tokens), len(sequence.blocks) * self.size):
            index, place = divmod(sequence.computed, self.size)
            block = self.written.setdefault(sequence.blocks[index], Written((-1, ())))
            if place == 0:
                block.before, block.tokens = (sequence.root, tuple(sequence.tokens[: sequence.computed])), []
            block.tokens[place:] = [sequence.tokens[sequence.computed]]
            sequence.computed += 1

    def take(self, count: int) -> list[int] | None:
        free, leaving = self.free(), set[int]()
        kept = dict(self.kept)
        while count > len(free) + len(leaving) and (leaves := self.leaves()):
            leaving.add(self.kept.pop(leaves[0]))
        if count > len(free) + len(leaving):
            self.kept = kept
            assert self.store.take(count) is None
            return None
        taken = self.store.take(count)
        assert taken is not None
        assert len({*taken}) == len(taken) == count
        assert {*taken} == free | leaving if leaving else {*taken} <= free
        return taken

    @rule(sequence=running)
    def publish(self, sequence: Running) -> None:
        self.store.publish(sequence.tokens[: sequence.computed], sequence.blocks, sequence.root)
        while (sequence.shared + 1) * self.size <= sequence.computed:
            prefix = self.prefix(sequence, sequence.shared)
            if prefix in self.kept:
                break
            self.kept[prefix] = sequence.blocks[sequence.shared]
            sequence.shared += 1

    @rule(sequence=consumes(running), lost=st.integers(0, 3))
    def give_back(self, sequence: Running, lost: int) -> None:
        """It ends, or steps back and says of its last tokens that they were never computed."""
        sequence.computed = max(sequence.computed - lost, sequence.shared * self.size)
        self.store.give_back(sequence.tokens[: sequence.computed], sequence.blocks, sequence.root)
        self.clock += 1
        for index in range(-(-sequence.computed // self.size)):
            prefix = self.prefix(sequence, index)
            self.kept.setdefault(prefix, sequence.blocks[index])
            self.stamps[prefix] = (self.clock, -len(prefix[1]))
        self.sequences.remove(sequence)

    @rule(sequence=consumes(running))
    def give_back_broken(self, sequence: Running) -> None:
        """It ends, and nobody is to find what it has computed, as far as nobody else needs it."""
        self.step_back_broken(sequence)
        self.sequences.remove(sequence)

    def step_back_broken(self, sequence: Running) -> None:
        self.store.give_back_broken(sequence.blocks, sequence.root)
        self.clock += 1
        shared = [self.prefix(sequence, index) for index in range(sequence.shared)]
        sequence.blocks, sequence.computed, sequence.shared = [], 0, 0
        for prefix in reversed(shared):
            self.stamps[prefix] = (self.clock, -len(prefix[1]))
            if prefix in self.leaves():
                del self.kept[prefix]

    @rule(count=st.integers(0, 12))
    def take_and_return(self, count: int) -> None:
        if (taken := self.take(count)) is not None:
            self.store.give_back([], taken)

    def holds(self, block: int, prefix: Prefix) -> bool:
        """Whether a block has the end of a prefix, which it may go on after."""
        written = self.written[block]
        root, before = written.before
        length = len(prefix[1]) - len(before)
        return 1 <= length <= len(written.tokens) and prefix == (root, (*before, *written.tokens[:length]))

    @invariant()
    def counts_add_up(self) -> None:
        used = {block for one in self.sequences for block in one.blocks}
        assert self.store.used == len(used)
        assert self.store.cached == len(self.kept.keys() - self.in_use())
        assert self.store.available == self.count - len(self.gone) - len(used)
        assert len(self.free()) == self.store.available - self.store.cached

    @invariant()
    def everyone_has_their_own(self) -> None:
        """What each sequence has computed is still there, and so is what can be found."""
        alone = [block for one in self.sequences for block in one.blocks[one.shared :]]
        shared = {block for one in self.sequences for block in one.blocks[: one.shared]}
        assert len({*alone}) == len(alone)
        assert not shared & {*alone}
        for one in self.sequences:
            for index in range(-(-one.computed // self.size)):
                assert self.holds(one.blocks[index], self.prefix(one, index))
        assert all(self.holds(block, prefix) for prefix, block in self.kept.items())

    def teardown(self) -> None:
        for one in [*getattr(self, "sequences", [])]:
            self.give_back(one, 0)
        if hasattr(self, "store"):
            assert self.store.available == self.count - len(self.gone)
            assert {*(self.store.take(self.store.near) or [])} == {*range(self.store.near)}


class FarBlocks(Blocks):
    """The same with tiers of far blocks. What is dropped is not foretold, but that it was right to drop it."""

    @initialize(
        near=st.integers(1, 4),
        size=st.integers(1, 2),
        far=st.lists(st.integers(1, 6), min_size=1, max_size=3),
        backwards=st.booleans(),
        patience=st.sampled_from((0.0, 1e9)),
    )
    def open(  # type: ignore[override]
        self, near: int, size: int, far: list[int], backwards: bool, patience: float
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(far_room, "RETRY_S", patience)
        ends = [near, *accumulate(far, initial=near)][1:]
        self.tiers = [FarTier(range(*own), "", partial(self.copy, range(*own))) for own in pairwise(ends)]
        if backwards:
            self.tiers.reverse()
        self.begin_anew(BlockStore(near, size, self.tiers))
        self.failing: set[FarTier] = set()

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """Some cannot be written to for a while; they, and others, are asked again."""
        self.failing = data.draw(st.sets(st.sampled_from(self.tiers))) if self.tiers else set()
        for tier in self.tiers:
            tier._due = 0.0

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A tier is lost: those that have blocks there step back, and nothing else is forgotten that could be kept."""
        if not self.tiers or data.draw(st.integers(0, 5)):
            return
        tier = data.draw(st.sampled_from(self.tiers))
        for one in [*self.sequences]:
            if any(block in tier.numbers for block in one.blocks):
                self.step_back_broken(one)
        self.settle()
        kept = {prefix for prefix, block in self.kept.items() if block not in tier.numbers}
        self.store.lose_far(tier)
        self.tiers.remove(tier)
        self.failing.discard(tier)
        self.gone |= {*tier.numbers}
        assert not self.settle() & {prefix for prefix in kept if self.prefixes_of(prefix) <= kept}
        assert not {*self.kept.values()} & {*tier.numbers}

    def prefixes_of(self, prefix: Prefix) -> set[Prefix]:
        """What a prefix hangs on."""
        root, tokens = prefix
        return {(root, tokens[:end]) for end in range(self.size, len(tokens), self.size)}

    def copy(self, numbers: range, pairs: Sequence[tuple[int, int]]) -> str:
        tier = next(tier for tier in self.tiers if tier.numbers == numbers)
        for block, far in pairs:
            assert block < self.store.near
            assert far in numbers
            held = self.written[block]
            self.written[far] = Written(held.before, [*held.tokens])
            if tier in self.failing:
                self.written[far] = Written((-1, ()))
                return "no disk"
        earlier = self.tiers[: self.tiers.index(tier)]
        filled = [other for other in earlier if self.store.far.free_in([other]) and other.is_writable]
        assert not [other for other in filled if other not in self.failing], "another one is to be filled first"
        return ""

    def settle(self) -> set[Prefix]:
        """Find out where what can be found is now; which prefixes have been dropped."""
        found: dict[Prefix, int] = {}

        def walk(node: Any, before: Prefix) -> None:
            for below in node.below:
                prefix = before[0], before[1] + below.tokens
                found[prefix] = below.block
                walk(below, prefix)

        for root, node in self.store._trees.roots.items():
            walk(node, (root, ()))
        dropped, self.kept = self.kept.keys() - found.keys(), found
        return {*dropped}

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "patch"):
            self.patch.undo()

    def take(self, count: int) -> list[int] | None:
        takeable = sum(block < self.store.near for block in self.free()) + len(
            [prefix for prefix in self.kept.keys() - self.in_use() if self.kept[prefix] < self.store.near]
        )
        kept, used = dict(self.kept), self.in_use()
        enough = count <= sum(block < self.store.near for block in self.free())
        places = sum(block >= self.store.near for block in self.free())
        taken = self.store.take(count)
        assert (taken is None) == (count > takeable)
        dropped = self.settle()
        assert self.kept.keys() <= kept.keys()
        assert not dropped & used
        if taken is None or enough:
            assert self.kept == kept
        if taken is not None:
            assert len({*taken}) == len(taken) == count
            assert all(block < self.store.near for block in taken)
            assert self.failing or not dropped or not self.store.far.free or places == 0
        return taken

    @rule(sequence=Blocks.running, count=st.integers(1, 4))
    def move(self, sequence: Running, count: int) -> None:
        """Blocks of a running sequence that are written in full go far."""
        whole = [block for block in sequence.blocks[: sequence.computed // self.size] if block < self.store.near]
        used = self.in_use()
        able = [tier for tier in self.tiers if tier.is_writable and tier not in self.failing]
        free, unused = (
            sum(any(block in tier.numbers for tier in able) for block in blocks)
            for blocks in (self.free(), [self.kept[prefix] for prefix in self.kept.keys() - used])
        )
        moved = self.store.move(whole[:count])
        assert len(moved) <= count
        if whole:
            assert min(len(whole), count, free) <= len(moved) <= min(len(whole), count, free + unused)
        for one in self.sequences:
            one.blocks[:] = [moved.get(block, block) for block in one.blocks]
        assert not self.settle() & used
        assert [*moved] == whole[: len(moved)], "the first ones first"


test_nothing_gets_mixed_up = Blocks.TestCase
test_nothing_gets_mixed_up_far_away = FarBlocks.TestCase


def run(store: BlockStore, tokens: Iterable[int], root: int = 0) -> None:
    """A sequence comes, has these tokens computed, and ends."""
    tokens = [*tokens]
    blocks, _ = store.find(tokens, root)
    taken = store.take(-(-len(tokens) // store.tokens) - len(blocks))
    assert taken is not None
    store.give_back(tokens, blocks + taken, root)


def test_a_conversation_goes_on_where_it_ended() -> None:
    store = BlockStore(8, 4)
    run(store, range(10))
    blocks, found = store.find([*range(12)])
    assert (len(blocks), found) == (3, 10)
    assert store.find([*range(12)])[1] == 8  # the last block is that of the one before


def test_a_prompt_that_is_known_entirely_has_its_last_token_computed() -> None:
    for length in range(1, 9):
        store = BlockStore(2, 4)
        run(store, range(length))
        assert store.find([*range(length)])[1] == length - 1


def test_another_conversation_with_the_same_beginning_does_not_cost_the_first_one_its_end() -> None:
    store = BlockStore(8, 4)
    run(store, [*range(6), *range(10, 20)])
    run(store, [*range(6), *range(30, 40)])
    assert store.find([*range(6), *range(10, 20), 99])[1] == 16


@pytest.mark.parametrize(("common", "different", "found"), [(4, 7, 0), (5, 7, 5), (4, 4, 4), (3, 4, 0), (1, 0, 1)])
def test_a_block_is_written_on_only_if_half_of_it_or_of_what_is_wanted_is_common(
    common: int, different: int, found: int
) -> None:
    store = BlockStore(2, 16)
    run(store, range(10))
    prompt = [*range(common), *range(50, 50 + different), 99]
    assert store.find(prompt)[1] == found


def test_prefixes_of_other_rotary_tables_are_not_found() -> None:
    store = BlockStore(4, 2)
    run(store, range(4), root=1)
    assert store.find([*range(5)]) == ([], 0)
    assert store.find([*range(5)], root=1)[1] == 4


def test_what_was_used_last_stays_and_ends_go_before_beginnings() -> None:
    store = BlockStore(4, 2)
    run(store, [1, 1, 2, 2])
    run(store, [3, 3, 4, 4])
    run(store, [1, 1, 2, 2])
    assert store.take(1) is not None
    assert store.find([3, 3, 4, 4, 5])[1] == 2
    assert store.find([1, 1, 2, 2, 5])[1] == 4


def test_a_running_prompt_is_found_by_others_as_far_as_it_was_published() -> None:
    store = BlockStore(8, 2)
    blocks = store.take(3)
    assert blocks is not None
    store.publish([1, 2, 3], blocks)
    assert store.find([1, 2, 3, 4, 5, 6, 7]) == (blocks[:1], 2)
    store.publish([1, 2, 3, 4, 5], blocks)
    assert store.find([1, 2, 3, 4, 5, 6, 7]) == (blocks[:2], 4)


def test_twins_keep_their_blocks_and_publish_once_the_other_has_gone() -> None:
    store = BlockStore(4, 2)
    first, second = store.take(2), store.take(2)
    assert first is not None
    assert second is not None
    store.publish([1, 1, 2, 2], first)
    store.publish([1, 1, 2, 2], second)
    assert store.used == 4
    store.give_back([1, 1, 2, 2], first)
    assert store.take(2) is not None
    assert store.find([1, 1, 2, 2, 3])[1] == 0
    store.publish([1, 1, 2, 2], second)
    assert store.find([1, 1, 2, 2, 3]) == (second, 4)


def test_of_twins_that_end_only_one_is_kept() -> None:
    store = BlockStore(6, 2)
    first, second = store.take(3), store.take(3)
    store.give_back([1, 1, 2, 2, 3], first or [])
    store.give_back([1, 1, 2, 2, 3], second or [])
    assert (store.used, store.cached) == (0, 3)
    assert store.find([1, 1, 2, 2, 3, 3]) == (first, 5)
    assert store.take(3) is not None


def test_a_sequence_that_there_is_no_room_for_costs_no_other_its_end() -> None:
    store = BlockStore(3, 4)
    run(store, range(10))
    assert store.fits([*range(9), 99, 98, 97], 0, spare=0)
    assert not store.fits([*range(9), 99, 98, 97], 0, spare=1)
    assert store.find([*range(10), 10])[1] == 10


def test_what_a_sequence_would_find_counts_as_its_own() -> None:
    store = BlockStore(4, 4)
    run(store, range(10))
    assert store.fits([*range(14)], 0, spare=0)
    assert not store.fits([*range(14)], 0, spare=1)
    assert not store.fits([*range(17)], 0, spare=0)


def test_a_root_without_prefixes_takes_no_memory() -> None:
    store = BlockStore(2, 1)
    for root in range(100):
        run(store, [1, 2], root)
    assert len(store._trees.roots) == 1


@pytest.mark.parametrize(("count", "tokens"), [(0, 1), (1, 0), (-1, 4)])
def test_a_store_has_blocks_and_these_have_room(count: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="at least one of one token"):
        BlockStore(count, tokens)


def test_misuse_is_named_and_changes_nothing() -> None:
    store = BlockStore(6, 2)
    blocks = store.take(3)
    assert blocks is not None
    store.publish([1, 1, 2, 2], blocks)
    misuses: list[Callable[[], Any]] = [
        lambda: store.take(-1),
        lambda: store.publish([1, 1, 2, 2, 3, 3], [*blocks[:2], 5]),  # free
        lambda: store.publish([1] * 7, blocks),  # too few
        lambda: store.give_back([1] * 7, blocks),
        lambda: store.give_back([], [5]),
        lambda: store.give_back([], [blocks[2], blocks[2]]),
        lambda: store.give_back([1, 1], [*blocks, 5]),
        lambda: store.give_back([1, 1], blocks, root=1),
        lambda: store.give_back([1, 1], blocks[1:]),  # without its beginning
        lambda: store.give_back([1, 1], [blocks[1], blocks[0]]),
        lambda: store.give_back([1, 1], [blocks[2], *blocks[:2]]),
    ]
    for misuse in misuses:
        with pytest.raises(ValueError, match=r"cannot"):
            misuse()
        assert store.used == 3
    store.give_back([1, 1, 2, 2], blocks)
    for again in (blocks, blocks[:2], blocks[2:]):
        with pytest.raises(ValueError, match="cannot be given back"):
            store.give_back([], again)
    more = store.take(1)
    assert more is not None
    with pytest.raises(ValueError, match="which no sequence uses"):
        store.publish([1, 1, 2, 2, 3, 3], [*blocks[:2], *more])
    assert (store.used, store.cached) == (1, 2)


class Counted(list[int]):
    """A list that counts how many of its items were read."""

    read = 0

    def __getitem__(self, at: Any) -> Any:
        items = super().__getitem__(at)
        self.read += len(items) if isinstance(items, list) else 1
        return items


def test_publishing_reads_each_token_once_and_does_not_walk_the_blocks() -> None:
    store = BlockStore(2000, 4)
    taken = store.take(1000)
    assert taken is not None
    tokens, blocks = Counted(), Counted(taken)
    for token in range(4000):
        tokens.append(token)
        store.publish(tokens, blocks)
    assert tokens.read == 4000
    assert blocks.read <= 4000 * (log2(1000) + 5)
    twin = Counted(store.take(1000) or [])
    tokens.read = 0
    store.publish(tokens, twin)
    assert tokens.read == 4


def lines(call: Callable[[], object]) -> int:
    """How many lines of the store's code a call executes."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != cache_blocks.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_work_grows_with_the_blocks_of_a_call_and_not_with_what_is_kept() -> None:
    def long_one(size: int) -> list[float]:
        """A sequence of so many blocks: the lines per block that each call takes."""
        store = BlockStore(size, 2)
        tokens = [*range(2 * size)]
        blocks = store.take(size)
        work = [lines(lambda: store.give_back(tokens, blocks or []))]
        work.append(lines(lambda: store.find([*tokens, 0])))
        store.give_back(tokens, blocks or [])
        work.append(lines(lambda: store.take(size)))
        return [each / size for each in work]

    def many(size: int) -> list[int]:
        """One sequence among so many that begin alike: the lines that each call takes."""
        store = BlockStore(size + 2, 2)
        for other in range(size):
            run(store, [1, 1, other, 2])
        blocks = store.take(1)
        return [
            lines(lambda: store.find([1, 1, size // 2, 3, 4])),
            lines(lambda: store.take(1)),
            lines(lambda: store.give_back([7], blocks or [])),
        ]

    assert long_one(2000) == pytest.approx(long_one(100), rel=0.25)
    assert many(2000) == pytest.approx(many(100), rel=0.25)


def a_disk(numbers: range) -> FarTier:
    """Far blocks that can always be written."""
    return FarTier(numbers, "disk", lambda pairs: "")


def test_a_far_block_is_shared_but_not_written_on() -> None:
    """The last block of a conversation that has gone far is computed again, since it would be gone on with."""
    store = BlockStore(2, 4, [a_disk(range(2, 4))])
    run(store, range(6))
    run(store, range(100, 108))
    blocks, found = store.find([*range(6), 50])
    assert (len(blocks), blocks[0] >= 2, found) == (1, True, 4)


def test_the_end_of_a_text_is_dropped_before_its_beginning_that_is_far() -> None:
    store = BlockStore(4, 2, [a_disk(range(4, 5))])
    blocks = store.take(4)
    assert blocks is not None
    store.publish(range(8), blocks)
    moved = store.move(blocks)
    assert [*moved] == blocks[:1], "there is room for one"
    store.give_back(range(8), [moved[blocks[0]], *blocks[1:]])
    assert store.take(2) is not None, "one was free"
    found, tokens = store.find([*range(8), 9])
    assert (found, tokens) == ([4, *blocks[1:3]], 6)


def test_tiers_are_filled_one_after_the_other_and_one_that_fails_is_passed_over() -> None:
    """Until it is asked again; prefixes that have moved there before are still found."""
    trouble = [""]
    first, second = FarTier(range(6, 10), "nodes", lambda pairs: trouble[0]), a_disk(range(4, 6))
    store = BlockStore(4, 2, [first, second])
    for number in range(3):
        run(store, range(10 * number, 10 * number + 4))
    assert store.far.used == {first: 2, second: 0}
    trouble[0] = "no link"
    run(store, range(30, 34))
    assert store.far.used == {first: 2, second: 2}
    assert store.cached == 8, "nothing is dropped"
    run(store, range(40, 44))
    assert store.far.used == {first: 2, second: 2}, "unused ones there make room"
    assert store.find([*range(4), 9]) == ([7, 6], 4)
    assert store.find([*range(10, 14), 9]) == ([], 0)


def test_what_hangs_on_a_tier_that_is_lost_is_dropped_and_nothing_else() -> None:
    first, second = a_disk(range(4, 5)), a_disk(range(5, 9))
    store = BlockStore(4, 2, [first, second])
    blocks = store.take(4)
    assert blocks is not None
    store.publish(range(8), blocks)
    moved = store.move(blocks[1:3])
    assert [*moved.values()] == [4, 5], "the second of them, then the third"
    store.give_back(range(8), [moved.get(block, block) for block in blocks])
    store.lose_far(first)
    assert (store.far.count, store.cached) == (4, 1)
    assert store.find([*range(8), 9]) == (blocks[:1], 2)
