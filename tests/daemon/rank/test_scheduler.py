"""The schedule of steps: whatever else is asked at the same time, a request is answered as it would be alone.

The engine is a stand-in whose logits depend on all tokens of a sequence, and which refuses what an engine must never be
asked for; the scheduler, the executors and the samplers of all ranks are real, in one thread.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count, pairwise, zip_longest
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from motley.daemon.rank.blocks import far_room
from motley.daemon.rank.blocks.kept_file import KeptFile
from motley.daemon.rank.executor import Executor
from motley.daemon.rank.guessing import drafts
from motley.daemon.rank.guessing.draft_model import DraftModel
from motley.daemon.rank.guessing.drafting import Drafting, Drafts
from motley.daemon.rank.guessing.handed_rows import HandedRows
from motley.daemon.rank.guessing.own_head import OwnHead
from motley.daemon.rank.pooling import POOLINGS
from motley.daemon.rank.scheduling import scheduler
from motley.daemon.rank.scheduling.request import Request
from motley.daemon.rank.scheduling.scheduler import Scheduler
from motley.daemon.rank.steps import Close, Message, More, Open, Step, StepError, decode, join
from motley.plugins.engine import F32, CacheBlocks, Span
from motley.plugins.recurrent import MOST_GUESSES
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp
from motley.transport import Communicator
from motley.transport.stats import Stats

VOCABULARY = 200
BLOCK = 10
CHUNK = 16
LONGEST = 60
"""Tokens of a sequence at most."""
BLOCKS = CacheBlocks(1000, 5)

Broken = Callable[[list[int]], bool]
"""After which tokens an engine computes NaN."""


class Done(Exception):
    """Every request has ended."""


@lru_cache(50_000)
def logits_after(*tokens: int) -> F32:
    """Of the whole vocabulary, and a few more that a draft model may know. Several ranks, and a request alone, ask for
    the same."""
    return np.random.default_rng(tokens).normal(size=VOCABULARY + 10).astype(np.float32)


def handed_after(tokens: Sequence[int]) -> float:
    """What the model hands its own head after some tokens; what they are computed with does not count."""
    return float(hash(tuple(token % 1000 for token in tokens)) % 10**6)


NEVER = 1 << 30


@dataclass
class Engine:
    """Logits of `vocabulary` that depend on the tokens of a sequence, as it finds them in its blocks."""

    most_spans: int
    blocks: CacheBlocks
    vocabulary: range
    broken: Broken
    memory: int
    """How many of the last tokens of a sequence the logits depend on: few, and greedy texts repeat themselves."""
    unwritable: Collection[int]
    """Which of the moves, by number, find a disk that cannot be written to."""
    places: Sequence[Place] = ()
    """Where the far blocks are."""
    slots: Mapping[int, int] = field(default_factory=dict)
    """The number of the adapter in each slot, above 0."""
    recurrent: bool = False
    """Whether it keeps a state of each sequence, which must get every token once."""
    hands: bool = False
    """Whether it gives what it hands the model's own head, behind its logits."""
    states: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    """By slot: the tokens that a state has, and those that have been guessed after them."""
    held: NDArray[np.int64] = field(init=False)
    """i64[count + far, tokens]: the token of each place of each block, and that of the adapter that it was computed
    with, times 1000: another one, and the logits are others."""
    windowed: NDArray[np.int64] = field(init=False)
    """i64[windowed, tokens]: the same of a layer with a window."""
    given: F32 | None = None
    """What the latest step has given: it is overwritten in the next one."""
    moves: int = 0
    steps: list[list[Span]] = field(default_factory=list)

    @property
    def cached(self) -> dict[str, NDArray[np.int64]]:
        """The arrays of its blocks, of two layers, the second with a window; a token is as long as two floats."""
        return {f"{name}_cache.{layer}": own for name in ("key", "value") for layer, own in enumerate(self._layers)}

    @property
    def _layers(self) -> tuple[NDArray[np.int64], ...]:
        return self.held, self.windowed

    def __post_init__(self) -> None:
        self.held = np.full((self.blocks.count + self.blocks.far, self.blocks.tokens), -1)
        self.windowed = np.full((self.blocks.windowed, self.blocks.tokens), -1)

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.moves += 1
        (place,) = [place for place in self.places if pairs[0][1] in place.numbers]
        if place.lost:
            raise OSError(place.lost)
        for block, far in pairs:
            assert block < self.blocks.count
            assert far in place.numbers, "blocks move to one place at a time"
            self.held[far] = self.held[block]
            if self.moves in self.unwritable and far < self.blocks.first_held:
                self.held[far] = -2
                raise OSError("no disk")

    def step(self, hidden: F32, spans: Sequence[Span], _halved: bool) -> F32:
        assert 1 <= len(spans) <= self.most_spans
        assert 1 <= len(hidden) == sum(span.rows for span in spans) <= CHUNK
        self.steps.append(list(spans))
        if self.given is not None:
            self.given.fill(np.nan)
        for place in self.places:
            if len(self.steps) > place.steps and not place.lost:
                place.lost = "a power cut"
                self.states = {at: state for at, state in self.states.items() if at >= self.blocks.slots}
                self.held[place.numbers.start : place.numbers.stop] = 7
        written: list[tuple[int, int]] = []
        logits: list[F32] = []
        rows = iter(hidden[:, 0].astype(int).tolist())
        for span in spans:
            for position in range(span.position, span.position + span.rows):
                block, place = divmod(position, self.blocks.tokens)
                written.append((int(span.blocks[block]), place))
                assert written[-1][0] < self.blocks.count, "a far block is written to"
                self.held[written[-1]] = next(rows) + 1000 * (self.slots[span.adapter] if span.adapter else 0)
                if span.windowed is not None:
                    self.windowed[span.windowed[block], place] = self.held[written[-1]]
        assert len(set(written)) == len(written), "two spans write to the same place"
        for span in spans:
            end = span.position + span.rows
            tokens = self.held[span.blocks].reshape(-1)[:end].tolist()
            assert not {-1, -2} & {*tokens}
            gone = any(place.lost for place in self.places)
            lost = gone and span.position and span.slot not in self.states
            if self.recurrent and not lost:  # else the step counts for nothing
                self._recur(span, tokens)
            for position in range(span.position, end) if self.blocks.windowed else ():
                assert span.windowed is not None
                seen = range(max(0, position - self.blocks.window + 1), position + 1)
                places = [divmod(each, self.blocks.tokens) for each in seen]
                assert all(span.windowed[block] >= 0 for block, _ in places), "a block is missing that is seen"
                in_window = [self.windowed[span.windowed[block], place] for block, place in places]
                assert in_window == tokens[seen.start : seen.stop], "a block that is seen has been given away"
            for known in range(end - span.wanted + 1, end + 1):
                made = self._logits(tokens[:known])
                logits.append(np.append(made, np.float32(handed_after(tokens[:known]))) if self.hands else made)
        self.given = np.stack(logits) if logits else np.empty((0, len(self.vocabulary)), np.float32)
        return self.given

    def _recur(self, span: Span, tokens: list[int]) -> None:
        """Have a state take a span's rows; `tokens` are all of the sequence, up to these."""
        assert 0 <= span.slot < self.blocks.slots
        sure, guessed = ([], []) if span.position == 0 else self.states[span.slot]
        known = span.position - len(sure)
        assert 0 <= known <= len(guessed), "a state gets tokens twice, or not at all"
        sure = [*sure, *guessed[:known], *tokens[span.position : len(tokens) - span.guesses]]
        self.states[span.slot] = sure, tokens[len(sure) :]
        assert sure == tokens[: len(sure)], "a state has got other tokens"

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            assert max(source, target) < self.blocks.states
            self.states[target] = [*self.states[source][0]], []

    def _logits(self, tokens: list[int]) -> F32:
        if self.broken(tokens):
            return np.full(len(self.vocabulary), np.nan, np.float32)
        return logits_after(*tokens[-self.memory :])[self.vocabulary.start : self.vocabulary.stop]


@dataclass
class Place:
    """A disk or another machine that keeps far blocks, until so many steps have been computed."""

    numbers: range
    steps: int
    lost: str = ""

    def verify(self, new: object, used: object) -> None:
        """It is relied upon."""


def places_of(blocks: CacheBlocks, lost_after: Sequence[int]) -> list[Place]:
    """Where the far blocks of a rank are, and after how many steps each of these is lost; others never are."""
    numbers = range(blocks.count, blocks.first_held), range(blocks.first_held, blocks.count + blocks.far)
    steps = [*lost_after, NEVER, NEVER]
    return [Place(own, after) for own, after in zip(filter(None, numbers), steps, strict=False)]


class Followers:
    """The other ranks, as the communicator of rank 0."""

    deadline_s = 1.0

    def __init__(self, executors: Sequence[Executor], told_of_steps: Callable[[bytes], bytes]) -> None:
        self.size = 1 + len(executors)
        self.messages: list[Message] = []
        """What the scheduler has said."""
        self._executors = executors
        self._told = [deque([executor.able.encode()]) for executor in executors]
        self._told_of_steps = told_of_steps

    def broadcast_message(self, data: bytes, _root: int, _timeout: None) -> None:
        message = decode(data)
        self.messages.append(message)
        for executor, told in zip(self._executors, self._told, strict=True):
            summary = executor.execute(message)
            if summary is not None:
                told.append(self._told_of_steps(summary) if isinstance(message, Step) else summary)

    def wait_message(self, rank: int, _seconds: float) -> bool:
        return bool(self._told[rank - 1])

    def recv(self, rank: int, _timeout: float) -> bytes:
        return self._told[rank - 1].popleft()

    def none_waits(self) -> bool:
        return not any(self._told)


class Draft:
    """A draft model with an engine of its own.

    Args:
        memory: see `Engine.memory`; that of the session's model makes all guesses right.
        vocabulary: tokens that it knows.
        context: tokens of the longest text that it can go on with.
    """

    def __init__(
        self,
        most_spans: int = 16,
        blocks: CacheBlocks = BLOCKS,
        memory: int = LONGEST,
        vocabulary: int = VOCABULARY,
        context: int = LONGEST,
    ) -> None:
        self.engine = Engine(most_spans, blocks, range(vocabulary), lambda tokens: len(tokens) == 13, memory, ())
        executor = Executor(cast(Any, self.engine), blocks, context, _embed, range(vocabulary), BLOCK, Stats())
        self.model = DraftModel(executor, blocks, context, lambda _: 0, CHUNK, vocabulary, VOCABULARY)


class Eager(Drafting[Request]):
    """Asks a draft model all it can, whatever that costs."""

    def guesses(self, answered: Sequence[Request], may: Sequence[bool], *_: object) -> Any:
        left = {one: self.drafter.unread(one) for one, own in zip(answered, may, strict=True) if own}
        for one, unread in left.items():
            if unread and len(one.tokens) % 3:
                self.drafter.read(one, unread // 2)
        wanted = [(one, 1 + len(one.tokens) * 7 % 5) for one, unread in left.items() if unread is not None]
        guessed, _ = self.drafter.guess(wanted)
        assert all(len(own) <= number for own, (_, number) in zip(guessed, wanted, strict=True))
        told = zip(wanted, guessed, strict=True)
        return Drafts({one: (own, [1.0] * len(own)) for (one, _), own in told if own}, 0.0)


class Session:
    """A scheduler and what its clients have heard.

    Args:
        most: how many spans the engine of each rank takes in one step.
        blocks: of the caches.
        told_of_steps: what the scheduler hears instead of a follower's summaries.
        memory: see `Engine.memory`.
        sequences: requests that are under way at a time.
        draft: a draft model, if there is one.
        unwritable: see `Engine.unwritable`, of the last rank.
        kept: the files in which each rank keeps blocks between two sessions; empty: none are kept.
        lost_after: steps after which the far blocks of the last rank are lost, by the places where they are; empty:
            never.
        block_s: what each rank has measured that a block costs in each place; empty: there is one place.
        waves: steps that may be under way at a time.
        adapted: what each rank has of adapters; empty: there are no slots for any.
        slots: for adapters.
        recurrent: whether engines keep states of sequences.
        pooling: how texts are embedded, in the place of being answered.
        own_head: guesses tokens by what it is handed; the model's own.
    """

    def __init__(
        self,
        most: Sequence[int] = (16,),
        blocks: CacheBlocks = BLOCKS,
        broken: Broken = lambda tokens: False,
        told_of_steps: Callable[[bytes], bytes] = lambda summaries: summaries,
        memory: int = LONGEST,
        sequences: int = 64,
        draft: Draft | None = None,
        unwritable: Collection[int] = (),
        lost_after: Sequence[int] = (),
        kept: Sequence[KeptFile] = (),
        block_s: Sequence[Sequence[float]] = (),
        waves: int = 1,
        adapted: Sequence[Any] = (),
        slots: int = 0,
        recurrent: bool = False,
        pooling: str = "",
        own_head: tuple[OwnHead, HandedRows] | None = None,
    ) -> None:
        last = len(most) - 1
        if blocks.on_disk and blocks.held:
            block_s = block_s or [(1.0, 2.0)] * len(most)
        cuts = [VOCABULARY * rank // len(most) // BLOCK * BLOCK for rank in range(len(most) + 1)]
        self.engines = [
            Engine(
                spans,
                blocks,
                range(cuts[rank], cuts[rank + 1]),
                broken,
                memory,
                unwritable if rank == last else (),
                places_of(blocks, lost_after if rank == last else ()),
                adapted[rank].slots if adapted else {},
                recurrent,
                hands=own_head is not None and rank == 0,
            )
            for rank, spans in enumerate(most)
        ]
        executors = [
            Executor(
                cast(Any, engine),
                blocks,
                LONGEST,
                _embed,
                engine.vocabulary,
                BLOCK,
                Stats(),
                cast(Any, engine.places),
                file,
                own,
                block_s=measured or (),
                keeps_logits=waves > 1,
                pooling=pooling,
                handed=own_head[1] if own_head and engine.hands else None,
            )
            for engine, file, own, measured in zip_longest(self.engines, kept, adapted, block_s)
        ]
        self.followers = Followers(executors[1:], told_of_steps)
        communicator = cast(Communicator, self.followers)
        self.texts: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        """Why each request has ended, in the order in which they did."""
        self.failures: dict[str, pb.Failure] = {}
        self.cached: dict[str, int] = {}
        """Tokens of the prompt of each request that were found in the caches."""
        self.signs_of_life: Counter[str] = Counter()
        self.adapter_events: dict[str, pb.AdapterEvent] = {}
        """What became of orders about adapters."""
        self.activities: list[pb.Activity] = []
        """What the daemon has been told of all requests together."""
        self._scheduler = Scheduler(
            executor=executors[0],
            communicator=communicator,
            blocks=blocks,
            vocabulary=VOCABULARY,
            sequences=sequences,
            max_rows=CHUNK,
            halves=False,
            same_tables=lambda _: 0,
            tell=self._tell,
            together=nullcontext,
            check=lambda: None,
            report=lambda: None,
            tell_steps=lambda: None,
            draft_model=draft.model if draft else own_head[0] if own_head else None,
            waves=waves,
            adapters=slots,
            recurrent=recurrent,
            embeds=bool(pooling),
        )
        self._draft = draft
        self.embeddings: dict[str, F32] = {}

    def run(
        self,
        requests: Collection[wp.Decode],
        arrivals: Mapping[str, int] | None = None,
        cancels: Collection[tuple[int, str]] = (),
        holds: Collection[tuple[int, str, bool]] = (),
        orders: Collection[tuple[int, pb.AdapterOrder]] = (),
    ) -> None:
        """Answer all requests, which arrive, are cancelled, held and go on in given rounds of the scheduler, in
        which things are ordered of adapters, too."""
        rounds = count()

        def commands(_timeout: float) -> Iterator[wp.WorkerCommand]:
            now = next(rounds)
            assert now < 10_000, f"{len(requests) - len(self.ends)} requests never end"
            if len(self.ends) == len(requests) and all(order.id in self.adapter_events for _, order in orders):
                raise Done
            for then, order in orders:
                if now == then:
                    yield wp.WorkerCommand(adapter=order)
            for request in requests:
                if now == (arrivals or {}).get(request.request_id, 0):
                    yield wp.WorkerCommand(decode=request)
            for then, request_id, held in holds:
                if now == then:
                    yield wp.WorkerCommand(hold=pb.Hold(request_id=request_id, held=held))
            for then, request_id in cancels:
                if now == then:
                    yield wp.WorkerCommand(cancel=request_id)

        with pytest.raises(Done):
            self._scheduler.run(commands)
        schedule = self._scheduler._made_schedule()
        assert not schedule.active
        assert not schedule.waiting
        assert schedule._store.used == 0, "blocks are left taken"
        opened, closed = (Counter(message.slot for message in self.said(kind)) for kind in (Open, Close))
        assert opened == closed, "sequences are left open"
        assert self.followers.none_waits()
        if self._draft:
            assert not self._draft.model._texts
            assert self._draft.model._store.used == 0

    def said(self, kind: type[Any]) -> list[Any]:
        """The messages of one kind that followers, if there are any, have had."""
        return [message for message in self.followers.messages if isinstance(message, kind)]

    def _tell(
        self,
        tokens: wp.Tokens | None = None,
        activity: pb.Activity | None = None,
        adapter: pb.AdapterEvent | None = None,
    ) -> None:
        if adapter is not None:
            self.adapter_events[adapter.id] = adapter
        if activity is not None:
            self.activities.append(activity)
        if tokens is not None:
            self._hear(tokens)

    def _hear(self, tokens: wp.Tokens) -> None:
        assert tokens.request_id not in self.ends
        self.texts.setdefault(tokens.request_id, []).extend(tokens.ids)
        if tokens.embedding:
            self.embeddings[tokens.request_id] = np.frombuffer(tokens.embedding, "<f4")
        if tokens.cached_tokens:
            self.cached[tokens.request_id] = tokens.cached_tokens
        if tokens.finish:
            self.ends[tokens.request_id] = tokens.finish
        elif not tokens.ids:
            self.signs_of_life[tokens.request_id] += 1
        if tokens.HasField("failure"):
            self.failures[tokens.request_id] = tokens.failure

    @property
    def failure_codes(self) -> dict[str, str]:
        return {name: failure.code for name, failure in self.failures.items()}


def _nothing() -> None:
    pass


def _embed(tokens: Sequence[int], recent: object = None) -> F32:
    return np.array(tokens, np.float32)[:, None]


def request(name: str, prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = (), **sampling: Any) -> wp.Decode:
    sampling = {"top_p": 1.0, "repetition_penalty": 1.0} | sampling
    return wp.Decode(
        request_id=name, prompt=prompt, sampling=pb.Sampling(**sampling), max_tokens=max_tokens, stop_tokens=stop
    )


def alone(asked: wp.Decode, **session: Any) -> tuple[list[int], str]:
    """The text of a request that is the only one, and why it ends."""
    only = Session(**session)
    only.run([asked])
    return only.texts[asked.request_id], only.ends[asked.request_id]


def assert_as_alone(
    session: Session,
    requests: Collection[wp.Decode],
    known: dict[str, tuple[list[int], str]] | None = None,
    **settings: Any,
) -> None:
    """`known`: what requests are answered alone by these settings, by their names; those that it lacks come to it."""
    known = {} if known is None else known
    for asked in requests:
        name = asked.request_id
        text, end = known[name] = known.get(name) or alone(asked, **settings)
        if session.ends[name] == "cancelled":
            heard = session.texts[name]
            assert heard == text[: len(heard)]
        else:
            assert (session.texts[name], session.ends[name]) == (text, end)


sampling = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from((0.0, 0.8, 1.5)),
        "top_p": st.sampled_from((1.0, 0.7, 0.98)),
        "top_k": st.sampled_from((0, 0, 3, VOCABULARY)),
        "repetition_penalty": st.sampled_from((1.0, 1.5)),
        "frequency_penalty": st.sampled_from((0.0, 0.5)),
        "seed": st.integers(0, 9),
        "logprobs": st.booleans(),
    }
)


FAR = (
    CacheBlocks(3, 4, far=12, held=7),
    CacheBlocks(1, 4, far=14),
    CacheBlocks(3, 7, far=6),
    CacheBlocks(8, 4, far=8),
    CacheBlocks(5, 5, far=40),
    CacheBlocks(30, 1, far=30),
)
WINDOWED = (
    CacheBlocks(60, 1, windowed=5, window=5),
    CacheBlocks(16, 4, windowed=2, window=5),
    CacheBlocks(16, 4, windowed=9, window=9),
    CacheBlocks(9, 7, windowed=4, window=2),
    CacheBlocks(3, 7, far=6, windowed=3, window=9),
    CacheBlocks(5, 5, far=40, windowed=12, window=8),
)


def drawn_requests(data: st.DataObject, number: int) -> list[wp.Decode]:
    """Requests that share openings, of any length."""
    openings = data.draw(st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=12), min_size=1, max_size=3))
    requests = []
    for name in map(str, range(number)):
        prompt = data.draw(st.sampled_from(openings))
        prompt = prompt + data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20))
        requests.append(request(name, prompt, data.draw(st.integers(1, LONGEST - len(prompt))), **data.draw(sampling)))
    return requests


@given(
    st.data(),
    st.sampled_from(((16,), (16, 3), (2, 128, 16))),
    st.sampled_from(
        (
            CacheBlocks(16, 4, far=16),
            CacheBlocks(9, 7, far=20),
            CacheBlocks(60, 1, far=60),
            CacheBlocks(16, 4, far=16, windowed=4, window=9),
            CacheBlocks(16, 4, far=16, held=4),
            CacheBlocks(16, 4, far=16, held=12, windowed=4, window=9),
            CacheBlocks(16, 4, far=2, held=1),
        )
    ),
    st.integers(1, 12),
    st.lists(st.integers(0, 60), min_size=2, max_size=2),
    st.booleans(),
)
def test_a_machine_or_a_disk_that_keeps_blocks_and_is_lost_shows_in_no_text(
    data: st.DataObject, most: tuple[int, ...], blocks: CacheBlocks, number: int, lost_after: list[int], backwards: bool
) -> None:
    """Whatever was computed with what it had is computed again."""
    requests = drawn_requests(data, number)
    memory = data.draw(st.sampled_from((2, LONGEST)))
    slots, snapshots = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 3))
    recurrent, blocks = data.draw(st.booleans()), replace(blocks, slots=slots, snapshots=snapshots)
    costs = [(2.0, 1.0) if backwards else (1.0, 2.0)] * len(most) if 0 < blocks.held < blocks.far else ()
    session = Session(most, blocks, lost_after=lost_after, memory=memory, block_s=costs, recurrent=recurrent)
    arrivals = {each.request_id: data.draw(st.integers(0, 40)) for each in requests}
    session.run(requests, arrivals)
    assert_as_alone(session, requests, most=most, blocks=blocks, memory=session.engines[0].memory)
    assert not session.failures


@given(st.data(), st.sampled_from(((16,), (2, 128, 16))), st.sampled_from((BLOCKS, *FAR)), st.sampled_from(POOLINGS))
def test_embeddings_are_of_whole_texts_whoever_else_is_asked(
    data: st.DataObject, most: tuple[int, ...], blocks: CacheBlocks, pooling: str
) -> None:
    """Also of those that begin alike, and of those that step back, are held or lose what far blocks had."""
    requests = drawn_requests(data, data.draw(st.integers(1, 8)))
    for asked in requests:
        asked.max_tokens = 0
    lost_after = data.draw(st.lists(st.integers(0, 20), max_size=2)) if blocks.far else ()
    session = Session(most, blocks, pooling=pooling, lost_after=lost_after)
    holds = [(start, asked.request_id, held) for asked in requests[::2] for start, held in ((2, True), (5, False))]
    session.run(requests, {each.request_id: data.draw(st.integers(0, 9)) for each in requests}, holds=holds)
    words = session.engines[-1].vocabulary
    for asked in requests:
        name, prompt = asked.request_id, list(asked.prompt)
        if session.ends[name] == "error":  # longer than what is left of the caches
            assert session.failure_codes[name] == "caches_lost"
            continue
        rows = [logits_after(*prompt[: end + 1])[words.start : words.stop] for end in range(len(prompt))]
        expected = np.mean(rows, axis=0, dtype=np.float64) if pooling == "mean" else rows[-1]
        assert np.allclose(session.embeddings[name], expected / np.linalg.norm(expected), atol=1e-5)
        assert (session.ends[name], session.texts[name]) == ("stop", [])


def test_an_embedding_that_is_not_finite_is_refused() -> None:
    session = Session(broken=lambda tokens: 13 in tokens, pooling="last")
    session.run([request("bad", [1, 13, 2], 0), request("good", [1, 2], 0)])
    assert session.failure_codes == {"bad": "bad_logits"}
    assert session.embeddings.keys() == {"good"}


@given(
    st.data(),
    st.sampled_from(((16,), (2, 128, 16))),
    st.integers(1, 6),
    st.lists(st.integers(0, 60), min_size=2, max_size=2),
    st.sampled_from((0, 12, 20)),
)
def test_without_what_kept_blocks_texts_are_as_long_as_the_others_hold(
    data: st.DataObject, most: tuple[int, ...], number: int, lost_after: list[int], held: int
) -> None:
    """Those that would be longer are the beginning of that, and are told why they break off there."""
    requests, blocks = drawn_requests(data, number), CacheBlocks(4, 5, far=20, held=held)
    session = Session(most, blocks, lost_after=lost_after)
    session.run(requests)
    for each in requests:
        text, end = alone(each, most=most, blocks=blocks)
        name, heard = each.request_id, session.texts.get(each.request_id, [])
        assert heard == text[: len(heard)]
        if name not in session.failures:
            if held or (heard, session.ends[name]) == (text, end):
                assert (heard, session.ends[name]) == (text, end)
            else:
                assert (session.ends[name], len(each.prompt) + len(heard)) == ("length", 20)
            continue
        assert session.failures[name].code == "caches_lost"
        assert "Start the session anew" in session.failures[name].message
        assert len(each.prompt) + len(heard) >= 20
        assert len(each.prompt) + each.max_tokens > 20


def test_a_machine_that_is_lost_while_blocks_move_is_done_without() -> None:
    """When nothing can be computed without moving them."""
    session = Session((16, 16), CacheBlocks(16, 4, far=16, held=16), lost_after=[4])
    requests = [request(str(number), [number] * 20, 30) for number in range(8)]
    session.run(requests)
    assert_as_alone(session, requests, most=(16, 16))
    told = session.activities[-1]
    assert (told.far_blocks, told.trouble) == (
        0,
        "far cache blocks are lost (rank 1: a power cut); their tokens are computed again",
    )


def test_requests_are_shared_out_over_waves() -> None:
    """No step has a request of the one before it, and a long prompt holds nobody up."""
    session = Session((16, 16), waves=2)
    short = [request(str(number), [number], 30) for number in range(4)]
    session.run([*short, request("long", [7] * 50, 9)], {"long": 40})
    assert_as_alone(session, short, most=(16, 16))
    steps = [[int(span.blocks[0]) for span in step] for step in session.engines[0].steps]
    settled = steps[8:30]
    assert all(len(step) == 2 for step in settled)
    assert all(not {*one} & {*other} for one, other in pairwise(settled))
    prompt = [at for at, step in enumerate(session.engines[0].steps) if any(span.rows > 1 for span in step)]
    answers = [len(step) - (at in prompt) for at, step in enumerate(steps)]
    assert all(sum(answers[at : at + 3]) >= 2 for at in prompt), "who is answered goes on beside a prompt"
    assert list(session.ends)[-1] == "long"


@given(
    st.data(),
    st.sampled_from(((1,), (3,), (16,), (128,), (16, 3), (2, 128, 16))),
    st.sampled_from((CacheBlocks(60, 1), CacheBlocks(16, 4), CacheBlocks(9, 7), CacheBlocks(2, 60), *FAR, *WINDOWED)),
    st.integers(1, 24),
    st.integers(1, 3),
)
def test_a_request_is_answered_as_if_it_were_alone(
    data: st.DataObject, most: tuple[int, ...], blocks: CacheBlocks, number: int, waves: int
) -> None:
    """Whoever else is, steps back, or has left the beginning of its text in the caches; whatever was guessed, and
    wherever blocks have moved; however many steps are under way at a time."""
    requests = []
    openings = data.draw(st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=12), min_size=1, max_size=3))
    for name in map(str, range(number)):
        opening = data.draw(st.sampled_from(openings))
        prompt = opening + data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20))
        longest = data.draw(st.integers(1, LONGEST - len(prompt)))
        stop = data.draw(st.sampled_from(((), range(0, VOCABULARY, 20))))
        requests.append(request(name, prompt, longest, stop, **data.draw(sampling)))
    rounds = st.integers(0, 60)
    names = st.sampled_from([asked.request_id for asked in requests])
    arrivals = {asked.request_id: data.draw(rounds) for asked in requests}
    cancels = data.draw(st.lists(st.tuples(rounds, names), max_size=3))
    bad_length = data.draw(st.none() | st.integers(3, 30))

    def broken(tokens: list[int]) -> bool:
        return len(tokens) == bad_length and tokens[-1] % 4 == 0

    memory = data.draw(st.sampled_from((1, 2, LONGEST)))
    draft = data.draw(
        st.none()
        | st.builds(
            Draft,
            most_spans=st.sampled_from((1, 5, 16)),
            blocks=st.sampled_from((CacheBlocks(60, 1), CacheBlocks(16, 4), CacheBlocks(1, 60))),
            memory=st.sampled_from((memory, memory, 1)),
            vocabulary=st.sampled_from((VOCABULARY, VOCABULARY - 10, VOCABULARY + 10)),
            context=st.sampled_from((LONGEST, 30)),
        )
    )
    holds = data.draw(st.lists(st.tuples(rounds, names), max_size=3))
    unwritable = data.draw(st.sets(st.integers(1, 30), max_size=10)) if blocks.far else ()
    waves = 1 if blocks.far else waves
    slots, snapshots = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 3))
    recurrent, blocks = data.draw(st.booleans()), replace(blocks, slots=slots, snapshots=snapshots)
    session = Session(
        most, blocks, broken, memory=memory, draft=draft, unwritable=unwritable, waves=waves, recurrent=recurrent
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "Drafting", Eager)
        patch.setattr(far_room, "RETRY_S", 0.0)
        on_and_off = [each for at, name in holds for each in ((at, name, True), (at + 20, name, False))]
        session.run(requests, arrivals, cancels, sorted(on_and_off))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(far_room, "RETRY_S", 0.0)
        patch.setattr(drafts.Lookup, "guess", lambda self, tokens, most: [])
        assert_as_alone(session, requests, most=most, blocks=blocks, broken=broken, memory=memory)


def test_each_token_counts_once_however_its_request_was_held_or_resumed() -> None:
    """What was written before a rank was lost is not what this session does: by what it does it is judged to work."""
    fresh, resumed = request("held", [1], 30), request("resumed", [1, 2], 40)
    resumed.written.extend([3] * 15)
    session = Session()
    session.run([fresh, resumed], holds=[(5, "held", True), (12, "held", False)])
    assert len(session.texts["held"]) == 30
    assert session.activities[-1].generated_tokens == 30 + 25


def test_who_is_more_urgent_begins_earlier() -> None:
    session = Session(sequences=1)
    requests = [request("patient", [1], 3), request("urgent", [2], 3)]
    requests[1].priority = -1
    session.run(requests)
    assert list(session.ends) == ["urgent", "patient"]


def test_who_came_last_steps_back_when_there_are_no_blocks() -> None:
    blocks = CacheBlocks(20, 5)
    requests = [request("first", [1, 2, 3], 50), request("last", [4, 5, 6], 57)]
    session = Session((16, 16), blocks)
    session.run(requests)
    assert_as_alone(session, requests)
    assert list(session.ends) == ["first", "last"]
    first, last, again = session.said(Open)
    assert [first.slot, last.slot, again.slot] == [0, 1, 0], "the last begins twice"
    assert len(again.tokens) > 40, "with what it has generated"
    assert again.prompt == 3


@pytest.mark.parametrize("most", [(16,), (16, 16)])
def test_a_text_is_four_times_as_long_as_the_near_blocks(most: tuple[int, ...]) -> None:
    blocks = CacheBlocks(3, 5, far=9)
    asked = request("long", range(40), 20)
    session = Session(most, blocks)
    session.run([asked])
    assert (session.texts["long"], session.ends["long"]) == alone(asked)
    assert [len(span.blocks) for (span,) in session.engines[0].steps][-1] == 12
    assert session.activities[-1].far_blocks_used == 9
    assert len(session.said(Open)) == len(most) - 1, "it has never stepped back"


@pytest.mark.parametrize(
    ("block_s", "filled"),
    [([(1.0, 2.0), (1.0, 9.0)], ["disk", "nodes"]), ([(1.0, 2.0), (5.0, 4.0)], ["nodes", "disk"])],
)
def test_what_costs_the_slowest_rank_least_is_filled_first(block_s: Any, filled: list[str]) -> None:
    session = Session((16, 16), CacheBlocks(3, 5, far=9, held=5), block_s=block_s)
    asked = request("long", range(25), 5)
    session.run([asked])
    assert (session.texts["long"], session.ends["long"]) == alone(asked)
    first, second = session.activities[-1].far_tiers
    assert ([first.place, second.place], first.blocks_used, second.blocks_used) == (filled, 3, 0)
    assert first.block_ms < second.block_ms


def test_a_rank_that_has_not_measured_every_place_is_named() -> None:
    session = Session((16, 16), CacheBlocks(3, 5, far=9, held=5), block_s=[(1.0, 2.0), (1.0,)])
    with pytest.raises(StepError, match="rank 1 has measured 1 of 2 places"):
        session.run([request("any", [1], 5)])


def test_without_places_for_states_nothing_is_found_and_slots_bound_who_is_under_way() -> None:
    requests = [request(str(number), [*range(30)], 10) for number in range(4)]
    session = Session((16, 16), replace(BLOCKS, slots=2), recurrent=True)
    session.run(requests)
    assert_as_alone(session, requests)
    assert not session.cached
    assert max(told.active for told in session.activities) == 2
    assert {message.slot for message in session.said(Open)} == {0, 1}
    assert drafts.MOST <= MOST_GUESSES


def test_what_is_found_ends_where_a_state_is_remembered() -> None:
    """At the last whole block of a prompt, and where a second one has gone on otherwise: a third may, too."""
    prompts = [[*range(30)], [*range(30), 99], [*range(12), *range(50, 60)], [*range(12), *range(70, 80)]]
    requests = [request(str(number), prompt, 3) for number, prompt in enumerate(prompts)]
    session = Session((16, 16), replace(BLOCKS, slots=1, snapshots=4), recurrent=True)
    session.run(requests)
    assert_as_alone(session, requests)
    assert session.cached == {"1": 25, "3": 10}


def test_the_state_that_was_not_begun_with_for_longest_gives_way() -> None:
    def asked(number: int) -> list[int]:
        return [number, *range(100, 110)]

    order = [0, 1, 0, 2, 0, 1]
    requests = [request(str(number), asked(each), 2) for number, each in enumerate(order)]
    session = Session((16,), replace(BLOCKS, slots=1, snapshots=2), recurrent=True)
    session.run(requests)
    assert_as_alone(session, requests)
    assert session.cached == {"2": 10, "4": 10}


def test_a_prefix_is_found_far_and_used_there() -> None:
    """Another text has had all near blocks since."""
    first, other, again = (
        request("first", range(20), 3),
        request("other", range(100, 140), 3),
        request("again", [*range(20), 1], 3),
    )
    session = Session((16, 16), CacheBlocks(9, 5, far=9))
    session.run([first, other, again], arrivals={"other": 10, "again": 30})
    assert_as_alone(session, [first, other, again])
    (span,) = session.engines[0].steps[-3]
    assert (span.position, span.rows) == (20, 1), "only its last token was computed"
    assert (span.blocks[:4] >= 9).all()


def test_a_prefix_that_fills_all_near_blocks_can_be_gone_on_with() -> None:
    requests = [request("first", range(15), 1), request("again", range(18), 3)]
    session = Session((16, 16), CacheBlocks(3, 5, far=9))
    session.run(requests, arrivals={"again": 10})
    assert_as_alone(session, requests)
    assert session.activities[-1].cached_tokens == 15


def test_a_request_waits_while_the_disk_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_room, "RETRY_S", 0.0)
    monkeypatch.setattr(scheduler, "ACTIVITY_S", 0.0)
    asked = request("long", range(40), 20)
    session = Session((16, 16), CacheBlocks(3, 5, far=9), unwritable=range(2, 9))
    session.run([asked])
    assert_as_alone(session, [asked])
    told = [activity.trouble for activity in session.activities]
    assert told.count("rank 1: cache blocks cannot be moved: no disk") == 7
    assert told[0] == told[-1] == ""


def test_what_was_computed_is_found_again() -> None:
    """By the one that steps back, and by another prompt that begins like one before it."""
    opening = list(range(20))
    first, second = request("first", [*opening, 1], 5), request("second", [*opening, 2], 5)
    session = Session(blocks=CacheBlocks(40, 4))
    session.run([first, second], arrivals={"second": 8})
    assert_as_alone(session, [first, second])
    begun = [span for step in session.engines[0].steps for span in step if span.wanted and span.rows < 20]
    assert [span.position for span in session.engines[0].steps[0]] == [0]
    assert min(span.position for span in begun[-5:]) >= 20, "only the last token of the second prompt was computed"


def test_prompts_are_computed_beside_answers() -> None:
    """Who is being answered gets a token in every step while another's prompt is computed."""
    answered, long = request("answered", [1], 40), request("long", [index % 7 for index in range(55)], 3)
    session = Session(blocks=CacheBlocks(100, 4))
    session.run([answered, long], arrivals={"long": 5})
    assert_as_alone(session, [answered, long], blocks=CacheBlocks(100, 4))
    mixed = [step for step in session.engines[0].steps if len(step) == 2 and max(span.rows for span in step) > 1]
    assert len(mixed) > 3
    assert all(step[0].rows == step[0].wanted == 1 for step in mixed)


def test_a_text_that_repeats_itself_is_guessed() -> None:
    asked = request("any", [1], 59)
    session = Session((16, 16), memory=1)
    session.run([asked])
    steps = session.engines[0].steps
    text = session.texts["any"]
    assert len(text) == 59
    assert len(steps) < 45, "several tokens came of one step"
    assert any(span.wanted > 3 for step in steps for span in step)
    told = session.activities[-1]
    assert told.tried_drafts == sum(span.wanted - 1 for step in steps for span in step)
    assert told.accepted_drafts == 59 - len(steps), "each step gives one token that was not guessed"


def test_guesses_that_need_more_candidates_ask_for_their_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever guesses here knows the text, but for every fifth token; penalties count what was guessed rightly only."""
    flat = request("flat", [7], 40, temperature=2.0, top_p=0.99, seed=5)
    sharp = request("sharp", [8], 40, temperature=1.0, seed=3, frequency_penalty=0.5)
    texts = {asked.prompt[0]: alone(asked)[0] for asked in (flat, sharp)}

    def guess(_lookup: drafts.Lookup, tokens: Sequence[int], most: int) -> list[int]:
        right = texts[tokens[0]][len(tokens) - 1 :][:most]
        return [token if (len(tokens) + ahead) % 5 else 0 for ahead, token in enumerate(right)]

    monkeypatch.setattr(drafts.Lookup, "guess", guess)
    session = Session((16, 16))
    session.run([flat, sharp])
    assert session.texts == {"flat": texts[7], "sharp": texts[8]}
    assert len(session.engines[0].steps) < 35
    assert {int(row) for message in session.said(More) for row in message.rows} > {0, 1}


@pytest.mark.parametrize(
    "how",
    [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 4}, {"temperature": 1.0, "frequency_penalty": 0.7, "seed": 1}],
)
def test_a_draft_model_that_is_like_the_model_guesses_all_tokens(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same noise and after the same penalties, so sampled ones too."""
    monkeypatch.setattr(scheduler, "Drafting", Eager)
    monkeypatch.setattr(drafts.Lookup, "guess", lambda self, tokens, most: [])
    requests = [request(str(i), [i + 20] * 14, 40, logit_bias={3: 2.0}, **how) for i in range(3)]
    session = Session((16, 16), draft=Draft(vocabulary=VOCABULARY + 10))
    session.run(requests)
    activity = session.activities[-1]
    assert activity.tried_drafts == activity.accepted_drafts > 10
    monkeypatch.undo()
    assert_as_alone(session, requests)


def test_texts_that_begin_alike_are_read_once_by_the_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "Drafting", Eager)
    draft = Draft()
    session = Session((16,), draft=draft)
    session.run([request(str(i), [*range(30, 60), i], 5) for i in range(4)], {str(i): 12 * i for i in range(4)})
    rows = sum(span.rows for step in draft.engine.steps for span in step)
    assert rows < 30 + 4 * 25


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    long, short = request("long", [index % 7 for index in range(59)], 1), request("short", [3, 4, 5], 1)
    session = Session(blocks=CacheBlocks(100, 4))
    session.run([long, short], arrivals={"short": 2})
    assert list(session.ends) == ["short", "long"]


def test_whoever_hears_nothing_for_a_while_gets_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "SIGN_OF_LIFE_S", 0.0)
    requests = [request("first", [1, 2, 3], 50), request("waits", [index % 7 for index in range(50)], 5)]
    session = Session((16, 16), CacheBlocks(6, 10))
    session.run(requests)
    assert_as_alone(session, requests, blocks=CacheBlocks(6, 10))
    assert 40 < session.signs_of_life["waits"] < 70


def test_the_daemon_is_told_what_is_under_way_now_and_then_and_once_more_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opening = list(range(20))
    requests = [request("first", [*opening, 1], 30), request("second", [*opening, 2], 30)]
    monkeypatch.setattr(scheduler, "ACTIVITY_S", 1e9)
    session = Session(blocks=CacheBlocks(15, 4))
    session.run(requests, arrivals={"second": 8})
    assert [(each.active, each.blocks_used > 0) for each in session.activities] == [(1, True), (0, False)]

    monkeypatch.setattr(scheduler, "ACTIVITY_S", 0.0)
    session = Session(blocks=CacheBlocks(15, 4))
    session.run(requests, arrivals={"second": 8})
    *before, last = session.activities
    assert all(each.active + each.waiting for each in before)
    assert (last.active, last.waiting, last.blocks_used) == (0, 0, 0)
    assert {(each.active, each.waiting) for each in before} >= {(1, 0), (2, 0), (1, 1)}, "the second steps back"
    assert all(each.blocks_used <= each.blocks - each.blocks_kept for each in before)
    assert all(bool(each.active) == bool(each.blocks_used) for each in before)
    assert (last.prompt_tokens, last.cached_tokens) == (42, 20), "each prompt once, though the second began twice"
    assert [each.generated_tokens for each in session.activities] == sorted(
        each.generated_tokens for each in session.activities
    )
    assert last.generated_tokens == 60
    assert (last.blocks, last.block_tokens) == (15, 4)
    assert last.blocks_kept > 10, "what both have computed"


def test_a_session_whose_last_request_is_cancelled_is_told_to_be_idle() -> None:
    session = Session()
    session.run([request("any", [1], 30)], cancels=[(5, "any")])
    last = session.activities[-1]
    assert (last.active, last.waiting, last.blocks_used) == (0, 0, 0)
    assert last.generated_tokens == len(session.texts["any"])


def test_top_k_of_the_whole_vocabulary_asks_ranks_for_no_more_than_without(monkeypatch: pytest.MonkeyPatch) -> None:
    for top_k, want in ((VOCABULARY - 1, VOCABULARY - 1), (VOCABULARY, 1), (1_000_000, 1)):
        asked = request("any", [1], 10, temperature=1.0, seed=3, top_k=top_k)
        session = Session((16, 16))
        session.run([asked])
        assert {span.want for step in session.said(Step) for span in step.spans} == {want}
        if want == 1:
            assert session.texts["any"] == alone(request("any", [1], 10, temperature=1.0, seed=3))[0]


def test_steps_have_as_many_spans_as_the_least_able_rank_allows() -> None:
    requests = [request(str(i), [i], 10) for i in range(8)]
    session = Session((16, 3, 5))
    session.run(requests)
    assert_as_alone(session, requests)
    sizes = Counter(len(step.spans) for step in session.said(Step))
    assert max(sizes) == 3
    assert sizes[3] > sizes[1] + sizes[2], "and no fewer without need"


def test_no_more_are_active_than_the_session_has_sequences() -> None:
    requests = [request(str(i), [i], 5) for i in range(12)]
    session = Session((128, 128), sequences=7)
    session.run(requests)
    assert_as_alone(session, requests)
    assert {message.slot for message in session.said(Open)} == set(range(7))


def test_one_of_a_step_may_need_more_candidates() -> None:
    sharp = [request(str(i), [i], 10) for i in range(3)]
    flat = request("flat", [7], 10, temperature=2.0, top_p=0.99, seed=5)
    session = Session((16, 16))
    session.run([*sharp[:2], flat, *sharp[2:]])
    assert_as_alone(session, [*sharp, flat])
    assert {tuple(message.slots) for message in session.said(More)} == {(2,)}
    assert any(len(step.spans) == 4 for step in session.said(Step))


def test_all_of_a_step_that_need_more_candidates_ask_in_one_round() -> None:
    flat = [request(str(i), [i], 10, temperature=2.0, top_p=0.99, seed=5) for i in range(5)]
    sharp = request("sharp", [7], 10)
    session = Session((16, 16))
    session.run([*flat, sharp])
    assert_as_alone(session, [*flat, sharp])
    asked = [tuple(message.slots) for message in session.said(More)]
    assert asked.count((0, 1, 2, 3, 4)) > 2
    assert not any(
        isinstance(message, More) for last, message in pairwise(session.followers.messages) if isinstance(last, More)
    )


def test_a_request_is_cancelled_in_the_middle_of_its_prompt() -> None:
    session = Session((16, 16))
    session.run([request("gone", [index % 7 for index in range(59)], 1)], cancels=[(2, "gone")])
    assert (session.ends, session.texts) == ({"gone": "cancelled"}, {"gone": []})
    computed = [span.rows for step in session.said(Step) for span in step.spans]
    assert len(computed) == 2, "a step for each round before it"
    assert sum(computed) < 59


def test_a_request_that_is_held_computes_nothing_and_goes_on_with_the_same_text() -> None:
    requests = [request("slow", [1, 2, 3], 30), request("other", [4, 5, 6], 40)]
    session = Session((16, 16))
    again = [(5, "slow", True), (30, "other", False), (31, "unknown", True)]  # what changes nothing
    session.run(requests, holds=[(4, "slow", True), *again, (36, "slow", False)])
    assert_as_alone(session, requests)
    _, _, reopened = session.said(Open)
    assert list(reopened.tokens[:3]) == [1, 2, 3]
    alone_since = [len(step.spans) for step in session.said(Step)]
    assert 1 in alone_since[4:30]
    assert session.ends == {"slow": "length", "other": "length"}
    assert list(session.ends) == ["other", "slow"]


def test_while_all_are_held_nothing_is_computed_but_they_show_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "SIGN_OF_LIFE_S", 0.0)
    requests = [request("first", [1, 2, 3], 8), request("second", [4, 5, 6], 8)]
    session = Session((16, 16))
    held = [(2, "first", True), (2, "second", True), (50, "first", False)]
    session.run(requests, holds=held, cancels=[(60, "second")])
    assert_as_alone(session, requests)
    assert session.ends == {"first": "length", "second": "cancelled"}
    assert min(session.signs_of_life.values()) > 40
    assert len(session.said(Step)) < 12


def test_who_was_held_goes_on_before_those_that_wait() -> None:
    requests = [request(name, [index], 20) for index, name in enumerate(("slow", "second", "third"))]
    session = Session((16, 16), sequences=1)
    session.run(requests, holds=[(4, "slow", True), (6, "slow", False)])
    assert_as_alone(session, requests)
    assert list(session.ends) == ["second", "slow", "third"]


def test_a_request_is_cancelled_between_steps() -> None:
    requests = [request(str(i), [i], 30) for i in range(3)]
    session = Session((16, 16))
    session.run(requests, cancels=[(12, "1"), (13, "1"), (13, "unknown")])
    assert_as_alone(session, requests)
    assert session.ends == {"0": "length", "1": "cancelled", "2": "length"}
    assert 0 < len(session.texts["1"]) < 30


def test_a_request_is_cancelled_before_it_begins() -> None:
    requests = [request(str(i), [i], 59) for i in range(3)]
    session = Session((16, 16), CacheBlocks(1, 60))
    session.run(requests, cancels=[(5, "1")])
    assert_as_alone(session, requests)
    assert session.ends == {"1": "cancelled", "0": "length", "2": "length"}
    assert session.texts["1"] == []
    assert len(session.said(Open)) == 2


def test_logits_that_are_not_numbers_end_only_their_request() -> None:
    requests = [request(str(i), [i], 20) for i in range(4)]
    text, _ = alone(requests[1])
    bad = [1, *text[:7]]
    session = Session((16, 16), broken=lambda tokens: tokens == bad)
    session.run(requests)
    assert_as_alone(session, [requests[0], *requests[2:]])
    assert session.texts["1"] == text[:7]
    assert session.ends["1"] == "error"
    assert session.failure_codes == {"1": "bad_logits"}


def test_who_asks_again_after_a_rank_has_computed_wrongly_is_not_given_what_that_left() -> None:
    """Its keys and values may be no numbers either."""
    ranks = iter("01")
    first, again = (request(name, [*range(20)], 9) for name in ("first", "again"))
    session = Session((16, 16), broken=lambda tokens: len(tokens) == 25 and next(ranks, "") != "")
    session.run([first, again], arrivals={"again": 20})
    assert session.ends == {"first": "error", "again": "length"}
    assert [span.position for (span,) in session.engines[0].steps].count(0) == 2
    assert_as_alone(session, [again])


def test_sampling_that_cannot_be_is_refused_at_once() -> None:
    requests = [request("good", [1], 5), request("bad", [1], 5, temperature=-1.0)]
    session = Session()
    session.run(requests)
    assert session.failure_codes == {"bad": "invalid_request"}
    assert session.ends == {"bad": "error", "good": "length"}


def test_a_rank_that_can_take_no_sequence_is_named() -> None:
    with pytest.raises(StepError, match=r"rank 2: .*no span"):
        Session((16, 16, 0)).run([request("any", [1], 5)])


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (lambda summaries: b"", "0 summaries, not 2"),
        (lambda summaries: summaries + join([b""]), "3 summaries, not 2"),
        (lambda summaries: summaries[:-1], "end in the middle"),
    ],
    ids=["none", "one too many", "cut short"],
)
def test_a_rank_that_tells_of_other_sequences_is_named(told: Callable[[bytes], bytes], reason: str) -> None:
    session = Session((16, 16), told_of_steps=lambda data: told(data) if both(data) else data)
    with pytest.raises(StepError, match=rf"rank 1: .*{reason}"):
        session.run([request(str(i), [i], 5) for i in range(2)])


def both(data: bytes) -> bool:
    """Whether these are two summaries: the first is not all."""
    return len(data) > 4 + int.from_bytes(data[:4], "little")
