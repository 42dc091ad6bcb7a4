"""What a rank does with what other ranks send: all of it is checked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.models.description.hashed_rows import I64, NONE
from motley.daemon.rank.executor import Executor
from motley.daemon.rank.steps import (
    Close,
    More,
    Move,
    Moved,
    Open,
    Renumber,
    SpanPlan,
    Step,
    StepError,
    decode,
    split,
    split_losses,
)
from motley.daemon.sampling.parameters import SamplingError
from motley.plugins.engine import F32, CacheBlocks, Span
from motley.protocol import mesh_pb2 as pb
from motley.transport.stats import Stats

SAMPLING = pb.Sampling(top_p=1.0, repetition_penalty=1.0).SerializeToString()
BLOCKS = CacheBlocks(count=10, tokens=4, far=4, held=1)
CONTEXT = 12


class Engine:
    """Remembers what it was asked; its logits are zero."""

    most_spans = 16

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.moved: list[tuple[int, int]] = []

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        if 13 in dict(pairs).values():
            raise OSError("no disk")
        self.moved += pairs

    def step(self, hidden: F32, spans: Sequence[Span], halved: bool) -> F32:
        assert len(hidden) == sum(span.rows for span in spans)
        self.spans = list(spans)
        return np.zeros((sum(span.wanted for span in spans), 64), np.float32)


class Far:
    """A place where far blocks are; remembers which were to be verified."""

    def __init__(self, lost: str = "") -> None:
        self.lost = lost
        self.verified: list[tuple[list[int], list[int]]] = []

    def verify(self, new: Any, used: Any) -> None:
        self.verified.append((new.tolist(), used.tolist()))

    def block_s(self, blocks: int) -> float:
        raise AssertionError("it is measured on loading")


def a_rank(engine: Engine | None = None, blocks: CacheBlocks = BLOCKS) -> Executor:
    def embed(ids: Sequence[int], recent: I64 | None = None) -> F32:
        if not 0 <= min(ids) <= max(ids) < 64:
            raise IndexError("no such row")
        return np.zeros((len(ids), 4), np.float32)

    return Executor(cast(Any, engine or Engine()), blocks, CONTEXT, embed, range(64), 8, Stats(0, 1))


def test_a_rank_of_an_earlier_stage_passes_all_rows_on_and_has_no_logits() -> None:
    """What it tells of the wanted rows is what a rank without words tells."""
    engine, passed = Engine(), list[F32]()
    rows = {"entered": np.ones((3, 64), np.float32)}

    def enter(ids: Sequence[int], recent: I64 | None = None) -> F32:
        return rows["entered"][: len(ids)]

    rank = Executor(cast(Any, engine), BLOCKS, CONTEXT, enter, range(0), 8, Stats(0, 1), pass_on=passed.append)
    rank.execute(Open(0, 3, SAMPLING, ints(1, 2, 3)))
    told = rank.execute(Step([SpanPlan(0, 0, 3, 1, 4, ints(7))], ints(1, 2, 3)))
    assert [span.wanted for span in engine.spans] == [3]
    assert [own.shape for own in passed] == [(3, 64)]
    wordless = Executor(cast(Any, Wordless()), BLOCKS, CONTEXT, enter, range(0), 8, Stats(0, 1))
    wordless.execute(Open(0, 3, SAMPLING, ints(1, 2, 3)))
    assert told == wordless.execute(Step([SpanPlan(0, 0, 3, 1, 4, ints(7))], ints(1, 2, 3)))


class Wordless(Engine):
    def step(self, hidden: F32, spans: Sequence[Span], halved: bool) -> F32:
        return super().step(hidden, spans, halved)[:, :0]


class Tables:
    """The adapter in slot 2 has embeddings of its own: of token t, rows of t."""

    def embed(self, slot: int, rows: F32, tokens: Sequence[int]) -> None:
        if slot == 2:
            rows[:, :3] = np.array(tokens)[:, None]


def test_rows_begin_with_the_embeddings_of_their_own_adapter() -> None:
    """Beside which other columns stay as they are."""
    entered: list[F32] = []

    class Entered(Engine):
        def step(self, hidden: F32, spans: Sequence[Span], halved: bool) -> F32:
            entered.append(hidden.copy())
            return super().step(hidden, spans, halved)

    def embed(ids: Sequence[int], recent: I64 | None = None) -> F32:
        return np.full((len(ids), 4), -1, np.float32)

    tables = cast(Any, Tables())
    rank = Executor(cast(Any, Entered()), BLOCKS, CONTEXT, embed, range(64), 8, Stats(0, 1), adapters=tables)
    for slot, adapter in enumerate((1, 2, 0, 2)):
        rank.execute(Open(slot, 2, SAMPLING, ints(5, 6), adapter))
    plans = [SpanPlan(slot, 0, 2, 1, 4, ints(slot)) for slot in range(4)]
    rank.execute(Step(plans, ints(5, 6, 7, 8, 9, 10, 11, 12)))
    assert entered[0][:, 0].tolist() == [-1, -1, 7, 8, -1, -1, 11, 12]
    assert entered[0][2].tolist() == [7, 7, 7, -1]


def test_rows_that_depend_on_the_tokens_before_them_are_told_these() -> None:
    """Of every sequence of a step, in chunks of its prompt, and after guesses that were wrong."""
    asked: list[Any] = []

    def embed(ids: Sequence[int], recent: I64 | None = None) -> F32:
        assert recent is not None
        asked.append(recent.tolist())
        return np.zeros((len(ids), 4), np.float32)

    rank = Executor(cast(Any, Engine()), BLOCKS, CONTEXT, embed, range(64), 8, Stats(0, 1), recent=2)
    rank.execute(Open(0, 5, SAMPLING, ints(1, 2, 3, 4, 5)))
    rank.execute(Open(1, 2, SAMPLING, ints(7, 8, 9)))  # of its tokens one has been generated before it stepped back
    rank.execute(Step([SpanPlan(0, 0, 3, 0, 0, ints(7))], ints(1, 2, 3)))
    assert asked.pop() == [[1, NONE, NONE], [2, 1, NONE], [3, 2, 1]]
    rank.execute(Step([SpanPlan(1, 2, 1, 1, 4, ints(1)), SpanPlan(0, 3, 2, 1, 4, ints(8))], ints(9, 4, 5)))
    assert asked.pop() == [[9, 8, 7], [4, 3, 2], [5, 4, 3]]
    rank.execute(Step([SpanPlan(0, 5, 3, 3, 4, ints())], ints(10, 11, 12)))
    assert asked.pop() == [[10, 5, 4], [11, 10, 5], [12, 11, 10]]
    rank.execute(Step([SpanPlan(0, 6, 2, 2, 4, ints())], ints(13, 14)))
    assert asked.pop() == [[13, 10, 5], [14, 13, 10]]
    with pytest.raises(StepError, match="tokens 8 to 14 of 12 at most"):
        rank.execute(Step([SpanPlan(0, 8, 6, 1, 4, ints())], ints(1, 2, 3, 4, 5, 6)))


def ints(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def test_blocks_are_added_to_those_that_a_sequence_has() -> None:
    engine = Engine()
    rank = a_rank(engine)
    for slot in (0, 1):
        rank.execute(Open(slot, 3, SAMPLING, ints(1, 2, 3)))
    rank.execute(Step([SpanPlan(0, 0, 3, 0, 0, ints(7))], ints(1, 2, 3)))
    rank.execute(Step([SpanPlan(1, 0, 2, 0, 0, ints(9, 2)), SpanPlan(0, 3, 2, 1, 1, ints(4))], ints(1, 2, 5, 6)))
    assert [span.blocks.tolist() for span in engine.spans] == [[9, 2], [7, 4]]
    rank.execute(Close(0))
    rank.execute(Open(0, 3, SAMPLING, ints(1, 2, 3)))
    rank.execute(Step([SpanPlan(0, 0, 1, 0, 0, ints(5))], ints(1)))
    assert engine.spans[0].blocks.tolist() == [5]


def test_far_blocks_are_verified_when_a_sequence_begins_with_them_and_while_it_uses_them() -> None:
    """And of each place it is told whether they are lost."""

    def embed(ids: Sequence[int], recent: I64 | None = None) -> F32:
        return np.zeros((len(ids), 4), np.float32)

    places = Far(), Far("a power cut")
    rank = Executor(cast(Any, Engine()), BLOCKS, CONTEXT, embed, range(64), 8, Stats(0, 1), places, block_s=(1.0, 0.5))
    assert rank.able.block_s == (1.0, 0.5)
    rank.execute(Open(0, 9, SAMPLING, ints(*range(9))))
    rank.execute(Step([SpanPlan(0, 8, 1, 0, 0, ints(11, 12, 3))], ints(8)))
    told = rank.execute(Step([SpanPlan(0, 9, 1, 1, 1, ints())], ints(7)))
    assert told is not None
    losses, summaries = split_losses(told, 2)
    assert (losses, len(split(summaries, 1))) == (["", "a power cut"], 1)
    for place in places:
        assert place.verified == [([11, 12, 3], [11, 12, 3]), ([], [11, 12, 3])]


@pytest.mark.parametrize("blocks", [ints(14), ints(-1), ints(0, 1, 2, 3)], ids=["beyond", "below", "too many"])
def test_blocks_that_there_are_not_are_refused(blocks: Any) -> None:
    rank = a_rank()
    rank.execute(Open(0, 3, SAMPLING, ints(1, 2, 3)))
    with pytest.raises(StepError, match="a sequence of"):
        rank.execute(Step([SpanPlan(0, 0, 1, 0, 0, blocks)], ints(1)))


def test_blocks_of_layers_with_a_window_come_with_the_others() -> None:
    engine = Engine()
    rank = a_rank(engine, CacheBlocks(count=10, tokens=4, windowed=3, window=4))
    rank.execute(Open(0, 3, SAMPLING, ints(1, 2, 3, 4, 5, 6, 7, 8, 9)))
    rank.execute(Step([SpanPlan(0, 8, 1, 0, 0, ints(7, 4, 5), ints(-1, 2, 0))], ints(9)))
    rank.execute(Step([SpanPlan(0, 9, 1, 0, 0, ints(), ints())], ints(9)))
    (span,) = engine.spans
    assert span.windowed is not None
    assert (span.blocks.tolist(), span.windowed.tolist()) == ([7, 4, 5], [-1, 2, 0])


@pytest.mark.parametrize(
    ("windowed", "there_are"), [(ints(), 3), (ints(3), 3), (ints(1, 2), 3), (ints(0), 0)], ids=repr
)
def test_blocks_of_layers_with_a_window_that_there_are_not_are_refused(windowed: Any, there_are: int) -> None:
    rank = a_rank(blocks=CacheBlocks(count=10, tokens=4, windowed=there_are, window=4))
    rank.execute(Open(0, 3, SAMPLING, ints(1, 2, 3)))
    with pytest.raises(StepError, match=f"of {there_are} blocks of layers with a window"):
        rank.execute(Step([SpanPlan(0, 0, 1, 0, 0, ints(7), windowed)], ints(1)))


def pairs(*numbers: tuple[int, int]) -> Any:
    return np.array(numbers, np.int32)


def test_blocks_are_copied_and_then_every_sequence_has_the_copies() -> None:
    engine = Engine()
    rank = a_rank(engine)
    for slot, blocks in ((0, ints(7, 3)), (1, ints(7, 4))):
        rank.execute(Open(slot, 3, SAMPLING, ints(1, 2, 3)))
        rank.execute(Step([SpanPlan(slot, 0, 3, 0, 0, blocks)], ints(1, 2, 3)))
    assert rank.execute(Move(pairs((7, 11), (3, 12)))) == Moved().encode()
    assert engine.moved == [(7, 11), (3, 12)]
    assert engine.spans[0].blocks.tolist() == [7, 4]
    rank.execute(Renumber(pairs((7, 11), (3, 12))))
    rank.execute(Step([SpanPlan(0, 3, 1, 0, 0, ints(5)), SpanPlan(1, 3, 1, 0, 0, ints())], ints(4, 4)))
    assert [span.blocks.tolist() for span in engine.spans] == [[11, 12, 5], [11, 4]]


def test_a_disk_that_cannot_be_written_to_is_told() -> None:
    told = a_rank().execute(Move(pairs((1, 13))))
    assert told is not None
    assert decode(told) == Moved("cache blocks cannot be moved: no disk")


@pytest.mark.parametrize("wrong", [(10, 11), (1, 2), (1, 14)], ids=["from far", "to near", "beyond"])
def test_moves_that_there_cannot_be_are_refused(wrong: tuple[int, int]) -> None:
    with pytest.raises(StepError, match="far ones are 10 to 13"):
        a_rank().execute(Move(pairs((1, 11), wrong)))
    with pytest.raises(StepError, match="only rank 0"):
        a_rank().execute(Moved())


def test_sequences_and_rows_that_there_are_not_are_refused() -> None:
    rank = a_rank()
    for message in (Step([SpanPlan(3, 0, 1, 0, 0, ints(1))], ints(1)), More(ints(3), ints(0), ints(5)), Close(3)):
        with pytest.raises(StepError, match="slot 3 is not open"):
            rank.execute(message)
    rank.execute(Open(3, 1, SAMPLING, ints(1)))
    with pytest.raises(StepError, match="slot 3 is open already"):
        rank.execute(Open(3, 1, SAMPLING, ints(1)))
    with pytest.raises(StepError, match="slot 3 has no logits of wanted row 0"):
        rank.execute(More(ints(3), ints(0), ints(5)))
    rank.execute(Step([SpanPlan(3, 0, 3, 2, 1, ints(1))], ints(1, 2, 3)))
    assert rank.execute(More(ints(3, 3), ints(0, 1), ints(5, 6)))
    with pytest.raises(StepError, match="slot 3 has no logits of wanted row 2"):
        rank.execute(More(ints(3), ints(2), ints(5)))


def test_sampling_that_is_none_is_an_error_of_the_step() -> None:
    with pytest.raises(StepError, match="the 3 bytes on sampling of an Open are malformed"):
        a_rank().execute(Open(0, 2, b"\xff\xff\xff", np.zeros(2, np.int32)))


@given(st.integers(0, 3), st.binary(max_size=40), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4))
def test_whatever_opens_a_sequence_opens_it_or_is_refused(slot: int, sampling: bytes, prompt: list[int]) -> None:
    message = decode(Open(slot, len(prompt), sampling, np.array(prompt, np.int32)).encode())
    with suppress(StepError, SamplingError):
        assert a_rank().execute(message) is None


numbers = st.integers(-3, 14) | st.integers(-(2**31), 2**31 - 1)
penalties = pb.Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.5).SerializeToString()


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Steps that can be read, of sequences and positions that need not be there."""
    spans = []
    for _ in range(draw(st.integers(1, 4))):
        rows = draw(st.integers(1, 4))
        wanted, want = draw(st.integers(0, rows)), draw(st.integers(0, 70))
        position = draw(st.integers(0, 5) | st.integers(0, 2**31 - 1))
        blocks = ints(*draw(st.lists(numbers, max_size=3)))
        spans.append(SpanPlan(draw(st.integers(0, 2)), position, rows, wanted, want, blocks))
    count = sum(span.rows for span in spans)
    return Step(spans, ints(*draw(st.lists(numbers, min_size=count, max_size=count))), draw(st.booleans()))


mores = st.lists(st.tuples(st.integers(0, 2), numbers, numbers), min_size=1, max_size=3).map(
    lambda fields: More(*np.array(fields, np.int32).T)
)


moves = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=3).flatmap(
    lambda numbers: st.sampled_from((Move, Renumber)).map(lambda kind: kind(pairs(*numbers)))
)


@given(st.lists(steps() | mores | moves, max_size=4), st.sampled_from((SAMPLING, penalties)))
def test_whatever_ranks_are_told_is_computed_or_refused(messages: list[Any], sampling: bytes) -> None:
    rank = a_rank()
    for slot in (0, 1):
        rank.execute(Open(slot, 2, sampling, ints(1, 2, 3)))
    for message in messages:
        with suppress(StepError):
            rank.execute(decode(message.encode()))


def test_candidates_that_there_cannot_be_are_refused() -> None:
    rank = a_rank()
    rank.execute(Open(0, 2, penalties, ints(1, 2)))
    rank.execute(Step([SpanPlan(0, 0, 2, 1, 5, ints(0))], ints(1, 2)))
    with pytest.raises(StepError, match="candidates below 0"):
        rank.execute(decode(More(ints(0), ints(0), ints(-3)).encode()))


def test_tokens_out_of_place_are_refused() -> None:
    rank = a_rank()
    rank.execute(Open(0, 3, penalties, ints(1, 2, 3)))
    for plan, tokens in (
        (SpanPlan(0, 5, 1, 1, 5, ints(0)), ints(1)),
        (SpanPlan(0, 0, 2, 1, 5, ints(0)), ints(1, 2)),
    ):
        with pytest.raises(StepError, match="has a prompt of 3 and knows 3"):
            rank.execute(Step([plan], tokens))
    with pytest.raises(StepError, match="tokens that there are not"):
        rank.execute(Step([SpanPlan(0, 0, 1, 0, 0, ints(0))], ints(64)))
    with pytest.raises(StepError, match="several spans of one"):
        decode(Step([SpanPlan(0, 0, 1, 0, 0, ints(0))] * 2, ints(1, 1)).encode())


def test_steps_with_guesses_are_decode_steps_too_and_steps_of_prompts_are_none() -> None:
    rank = a_rank()
    rank.execute(Open(0, 3, SAMPLING, ints(1, 2, 3)))
    rank.execute(Step([SpanPlan(0, 0, 3, 1, 1, ints(7))], ints(1, 2, 3)))
    assert (rank.times.count, rank.times.tokens) == (0, 0)
    rank.execute(Step([SpanPlan(0, 3, 1, 1, 1, ints())], ints(4)))
    rank.execute(Step([SpanPlan(0, 4, 3, 3, 1, ints(8))], ints(5, 6, 7)))
    assert (rank.times.count, rank.times.tokens) == (2, 2)
