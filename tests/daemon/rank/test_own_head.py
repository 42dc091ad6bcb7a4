"""The model's own head as a guesser: whatever has been guessed before, it guesses by what the model has made.

The engine is a stand-in: what it makes of a pair depends on all pairs before it, as it finds them in the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.rank.guessing.handed_rows import MOST, HandedRows
from motley.daemon.rank.guessing.own_head import OwnHead
from motley.daemon.rank.scheduling import scheduler
from motley.daemon.rank.scheduling.request import Request
from motley.daemon.sampling.choice import Choice, choose
from motley.daemon.sampling.parameters import SamplingParams
from motley.daemon.sampling.shard import ShardSampler
from motley.plugins.engine import F32, CacheBlocks, Span
from motley.protocol import mesh_pb2 as pb
from tests.daemon.rank.test_scheduler import (
    FAR,
    LONGEST,
    VOCABULARY,
    WINDOWED,
    Eager,
    Session,
    assert_as_alone,
    drawn_requests,
    handed_after,
)

WORDS = 30
BLOCKS = CacheBlocks(60, 5)
GREEDY = pb.Sampling(top_p=1.0, repetition_penalty=1.0)
PENALISED = pb.Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.5, seed=3)

Pairs = list[tuple[float, int]]


def row_of(tokens: Sequence[int]) -> F32:
    """f32[1], what the model makes of the last of some tokens."""
    return np.random.default_rng([7, *tokens]).normal(size=1).astype(np.float32)


def made_of(pairs: Pairs, words: int = WORDS) -> F32:
    """f32[words + 1], what the head makes of the last of some pairs: logits, and what it hands."""
    seed = [word for row, token in pairs for word in (int(np.float32(row).view(np.uint32)), token)]
    return np.random.default_rng(seed).normal(size=words + 1).astype(np.float32)


@dataclass
class Engine:
    """Finds pairs in its blocks; `most_rows` and `most_spans` are what a step may have."""

    most_spans: int
    most_rows: int
    words: int = WORDS
    cells: dict[int, tuple[float, int]] = field(default_factory=dict)

    def step(self, hidden: F32, spans: Sequence[Span], halved: bool = False) -> F32:
        assert not halved
        assert len(spans) <= self.most_spans
        assert len(hidden) == sum(span.rows for span in spans) <= self.most_rows
        made, at = [], 0
        for span in spans:
            places = [int(block) * BLOCKS.tokens + place for block in span.blocks for place in range(BLOCKS.tokens)]
            for number in range(span.rows):
                token, row = hidden[at]
                self.cells[places[span.position + number]] = float(row), int(token)
                at += 1
            made.append(made_of([self.cells[place] for place in places[: span.position + span.rows]], self.words))
        return np.stack(made)

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        raise AssertionError("it has no far blocks")

    def close(self) -> None:
        raise AssertionError("whoever has made it closes it")


def embed(tokens: Sequence[int]) -> F32:
    return np.array(tokens, np.float32)[:, None]


def head_of(handed: HandedRows, most_spans: int = 4, most_rows: int = 100, context: int = 100) -> OwnHead:
    return OwnHead(Engine(most_spans, most_rows), embed, handed, BLOCKS, context, most_rows, range(WORDS), 8)


def request_of(prompt: list[int], slot: int, sampling: pb.Sampling = GREEDY) -> Request:
    return Request(slot, [*prompt], len(prompt), 200, slot=slot, sampling=sampling)


def compute(handed: HandedRows, request: Request, chosen: int, guesses: Sequence[int] = (), right: int = 0) -> None:
    """A step of the model: the last token of a request, and guesses after it, of which the first ones are right; after
    these another token is chosen."""
    first = len(request.tokens) - 1
    tokens = [*request.tokens, *guesses]
    handed.keep(request.slot, first, np.stack([row_of(tokens[: end + 1]) for end in range(first, len(tokens))]))
    request.tokens += [*guesses[:right], chosen]


def likeliest(begin: int, request: Request, number: int) -> list[int]:
    """The guesses for a greedy text of a head that has its pairs from the row at `begin` on."""
    tokens, guesses = request.tokens, []
    pairs: Pairs = [(float(row_of(tokens[: at + 1])[0]), tokens[at + 1]) for at in range(begin, len(tokens) - 1)]
    for _ in range(number):
        made = made_of(pairs)
        guesses.append(int(made[:WORDS].argmax()))
        pairs.append((float(made[WORDS]), guesses[-1]))
    return guesses


@given(st.data())
def test_guesses_do_not_depend_on_what_was_guessed_before(data: st.DataObject) -> None:
    """Of several texts, however many of them share a step, and whether they are asked for each time."""
    handed = HandedRows()
    head = head_of(handed, data.draw(st.integers(1, 3)), most_rows=MOST)
    texts = [request_of([slot + 1] * (slot + 2), slot) for slot in range(3)]
    for _ in range(data.draw(st.integers(1, 12))):
        for request in texts:
            guesses = likeliest(request.prompt - 1, request, data.draw(st.integers(0, 3))) if request.generated else []
            right = data.draw(st.integers(0, len(guesses)))
            compute(handed, request, data.draw(st.integers(0, WORDS - 1)), guesses, right)
        asked = [(each, data.draw(st.integers(1, 4))) for each in texts if data.draw(st.booleans())]
        for request, _ in asked:
            unread = head.unread(request)
            assert unread is not None
            if data.draw(st.booleans()):
                head.read(request, data.draw(st.integers(1, 3)))
        if asked:
            guessed, took = head.guess(asked)
            assert took > 0
            assert guessed == [likeliest(each.prompt - 1, each, number) for each, number in asked]


def test_a_text_is_begun_anew_where_rows_are_missing() -> None:
    """As after many tokens for which nobody has asked the head, or where a request goes on in another slot."""
    handed = HandedRows()
    head = head_of(handed)
    request = request_of([1, 2, 3], 0)
    compute(handed, request, 4)
    assert head.guess([(request, 2)])[0] == [likeliest(2, request, 2)]
    for number in range(MOST + 1):
        compute(handed, request, number % WORDS)
    assert head.unread(request) == MOST - 1
    assert head.guess([(request, 2)])[0] == [likeliest(len(request.tokens) - 1 - MOST, request, 2)]

    head.forget(request)
    request.slot = 1
    assert head.unread(request) is None
    assert head.guess([(request, 2)])[0] == [[]]
    compute(handed, request, 5)
    assert head.guess([(request, 2)])[0] == [likeliest(len(request.tokens) - 2, request, 2)]


def test_rows_of_a_request_that_has_ended_are_not_the_next_ones() -> None:
    """Whose text is as long as the first one had become."""
    handed = HandedRows()
    head = head_of(handed)
    one = request_of([1, 2, 3], 0)
    compute(handed, one, 4)
    head.guess([(one, 1)])
    head.forget(one)
    other = request_of([9, 8, 7, 6], 0)
    compute(handed, other, 5)
    assert head.guess([(other, 3)])[0] == [likeliest(3, other, 3)]


def test_a_text_that_is_too_long_is_not_guessed_for_and_blocks_come_back() -> None:
    handed = HandedRows()
    head = head_of(handed, context=40)
    for _ in range(10):
        request = request_of([1, 2], 0)
        for number in range(30):
            compute(handed, request, number)
        assert len(head.guess([(request, 15)])[0][0]) == 40 - 30 + 1
        head.forget(request)
    request = request_of([1] * 41, 0)
    compute(handed, request, 1)
    assert head.unread(request) is None


def test_a_head_that_makes_no_numbers_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    handed = HandedRows()
    head = head_of(handed)
    one, other = request_of([1, 2], 0), request_of([2, 3], 1)
    for each in (one, other):
        compute(handed, each, 4)
    made: Callable[..., F32] = made_of
    broken = float(row_of([1, 2])[0])
    monkeypatch.setitem(globals(), "made_of", lambda pairs, *_: made(pairs) * (np.nan if pairs[0][0] == broken else 1))
    assert head.guess([(one, 1), (other, 1)])[0] == [[], likeliest(1, other, 1)]
    for each in (one, other):
        compute(handed, each, 5)
    assert head.unread(one) is None
    assert head.unread(other) == 0


def test_tokens_are_chosen_as_the_model_chooses_them() -> None:
    """By the same noise and penalties: a head that makes the logits of the model chooses what it does."""
    handed = HandedRows()
    head = head_of(handed)
    request = request_of([1, 2, 3], 0, PENALISED)
    for token in (4, 4, 9):
        compute(handed, request, token)
    (guessed,), _ = head.guess([(request, 4)])
    params = SamplingParams.from_proto(PENALISED)
    sampler = ShardSampler(params, 0, WORDS, request.tokens[:3], 8)
    for step, token in enumerate([*request.tokens[3:], *guessed]):
        sampler.accept(step, token)
    tokens = request.tokens
    pairs: Pairs = [(float(row_of(tokens[: at + 1])[0]), tokens[at + 1]) for at in range(2, len(tokens) - 1)]
    for number, token in enumerate(guessed):
        made = made_of(pairs)
        choice = choose([sampler.summarise(made[:WORDS], 3 + number, WORDS)], params, 3 + number)
        assert isinstance(choice, Choice)
        assert choice.token == token
        pairs.append((float(made[WORDS]), token))
    assert len(guessed) == 4


class Watchful(Eager):
    """Also makes sure that the model hands what it has made of the text so far, whatever has been guessed wrongly."""

    def guesses(self, answered: Sequence[Request], may: Sequence[bool], *more: object) -> Any:
        assert isinstance(self.drafter, OwnHead)
        for one in answered:
            first, rows = self.drafter._handed.between(one.slot, 0, len(one.tokens) - 1)
            assert [float(row) for (row,) in rows] == [
                handed_after(one.tokens[: position + 1]) for position in range(first, len(one.tokens) - 1)
            ]
        return super().guesses(answered, may, *more)


@pytest.mark.soak
@given(
    st.data(),
    st.sampled_from(((1,), (16, 3))),
    st.sampled_from((CacheBlocks(16, 4), CacheBlocks(2, 60), *FAR, *WINDOWED)),
    st.integers(1, 4),
)
def test_texts_are_as_without_it(data: st.DataObject, most: tuple[int, ...], blocks: CacheBlocks, number: int) -> None:
    """Whoever else is answered, steps back, is held or cancelled, has recurrent states or loses far blocks."""
    requests = drawn_requests(data, number)
    rounds, names = st.integers(0, 60), st.sampled_from([asked.request_id for asked in requests])
    arrivals = {asked.request_id: data.draw(rounds) for asked in requests}
    cancels = data.draw(st.lists(st.tuples(rounds, names), max_size=2))
    holds = [
        each
        for at, name in data.draw(st.lists(st.tuples(rounds, names), max_size=2))
        for each in ((at, name, True), (at + 20, name, False))
    ]
    memory, handed = data.draw(st.sampled_from((2, LONGEST))), HandedRows()
    blocks = replace(blocks, slots=data.draw(st.integers(1, 6)), snapshots=data.draw(st.integers(0, 3)))
    recurrent = data.draw(st.booleans())
    head = OwnHead(Engine(4, 100, words=VOCABULARY), embed, handed, BLOCKS, 60, MOST, range(VOCABULARY), 8)
    session = Session(most, blocks, memory=memory, recurrent=recurrent, own_head=(head, handed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "Drafting", Watchful)
        session.run(requests, arrivals, cancels, sorted(holds))
    assert_as_alone(session, requests, most=most, blocks=blocks, memory=memory)
    assert not head._texts
    assert not handed._kept
    assert sorted(head._free) == [*range(BLOCKS.count)]
