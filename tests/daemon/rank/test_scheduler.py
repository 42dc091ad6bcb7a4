"""The schedule of steps: whatever else is asked at the same time, a request is answered as it would be alone.

The engine is a stand-in whose logits depend on all tokens of a sequence, and which refuses what an engine must never be
asked for; the scheduler, the executors and the samplers of all ranks are real, in one thread.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, pairwise
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.rank import scheduler
from motley.daemon.rank.executor import Executor
from motley.daemon.rank.scheduler import HEADROOM, MAX_ACTIVE, Scheduler
from motley.daemon.rank.steps import Able, Message, More, Open, Reserve, StepError, Wave, decode, join
from motley.plugins.engine import F32
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp
from motley.transport import Communicator
from motley.transport.stats import Stats

VOCABULARY = 200
BLOCK = 10
CHUNK = 16

Broken = Callable[[list[int]], bool]
"""After which tokens an engine computes NaN."""


class Done(Exception):
    """Every request has ended."""


@lru_cache(50_000)
def logits_after(*tokens: int) -> F32:
    """Of the whole vocabulary; several ranks, and a request alone, ask for the same."""
    return np.random.default_rng(tokens).normal(size=VOCABULARY).astype(np.float32)


@dataclass
class Engine:
    """Logits of `vocabulary` that depend on every token of a sequence, and on nothing else."""

    most_sequences: int
    context: int
    """Tokens that all sequences together may have."""
    vocabulary: range
    broken: Broken
    memory: int
    """Tokens that all sequences together may have room for."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Of each slot."""
    room: dict[int, int] = field(default_factory=dict)
    """Of each slot, in tokens."""
    peak: int = 0

    def open_slot(self, slot: int, _prompt_tokens: int) -> None:
        assert slot not in self.tokens
        self.tokens[slot] = []
        self.room[slot] = 0

    def close_slot(self, slot: int) -> None:
        del self.tokens[slot], self.room[slot]

    def reserve(self, slot: int, tokens: int) -> None:
        others = sum(self.room.values()) - self.room[slot]
        if others + tokens > self.memory:
            raise MemoryError(f"{self.memory - others} of {tokens} free")
        self.room[slot] = max(tokens, self.room[slot])

    def step(self, slot: int, hidden: F32, position: int, rows: Sequence[int], _halved: bool) -> F32:
        assert 1 <= len(hidden) <= CHUNK
        logits = self._feed(slot, hidden, position)
        return logits[None] if rows else np.empty((0, len(self.vocabulary)), np.float32)

    def decode(self, slots: Sequence[int], hidden: F32, positions: Sequence[int]) -> F32:
        assert 1 <= len(slots) <= self.most_sequences
        assert len(set(slots)) == len(slots)
        rows = np.split(hidden, len(slots))
        return np.stack([self._feed(*row) for row in zip(slots, rows, positions, strict=True)])

    def _feed(self, slot: int, hidden: F32, position: int) -> F32:
        tokens = self.tokens[slot]
        assert position == len(tokens)
        tokens += map(int, hidden[:, 0])
        assert len(tokens) <= self.room[slot], "a step would have to make room"
        self.peak = max(self.peak, sum(map(len, self.tokens.values())))
        assert self.peak <= self.context
        if self.broken(tokens):
            return np.full(len(self.vocabulary), np.nan, np.float32)
        return logits_after(*tokens)[self.vocabulary.start : self.vocabulary.stop]


class Followers:
    """The other ranks, as the communicator of rank 0."""

    deadline_s = 1.0

    def __init__(self, executors: Sequence[Executor], told_of_waves: Callable[[bytes], bytes]) -> None:
        self.size = 1 + len(executors)
        self.messages: list[Message] = []
        """What the scheduler has said."""
        self._executors = executors
        self._told = [deque([Able(executor.most_sequences).encode()]) for executor in executors]
        self._told_of_waves = told_of_waves

    def broadcast_message(self, data: bytes, _root: int, _timeout: None) -> None:
        message = decode(data)
        self.messages.append(message)
        for executor, told in zip(self._executors, self._told, strict=True):
            summary = executor.execute(message)
            if summary is not None:
                told.append(self._told_of_waves(summary) if isinstance(message, Wave) else summary)

    def recv(self, rank: int, _timeout: float) -> bytes:
        return self._told[rank - 1].popleft()

    def none_waits(self) -> bool:
        return not any(self._told)


class Session:
    """A scheduler and what its clients have heard.

    Args:
        most: how many sequences the engine of each rank takes in one step.
        memory: tokens that the last rank has room for.
        told_of_waves: what the scheduler hears instead of a follower's summaries.
    """

    def __init__(
        self,
        most: Sequence[int] = (16,),
        context: int = 200,
        broken: Broken = lambda tokens: False,
        told_of_waves: Callable[[bytes], bytes] = lambda summaries: summaries,
        memory: int = 1 << 30,
    ) -> None:
        cuts = [VOCABULARY * rank // len(most) // BLOCK * BLOCK for rank in range(len(most) + 1)]
        self.engines = [
            Engine(sequences, context, range(cuts[rank], cuts[rank + 1]), broken, 1 << 30)
            for rank, sequences in enumerate(most)
        ]
        self.engines[-1].memory = memory
        executors = [Executor(cast(Any, engine), _embed, engine.vocabulary, BLOCK, Stats()) for engine in self.engines]
        self.followers = Followers(executors[1:], told_of_waves)
        communicator = cast(Communicator, self.followers)
        self.texts: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        """Why each request has ended, in the order in which they did."""
        self.failures: dict[str, pb.Failure] = {}
        self.signs_of_life: Counter[str] = Counter()
        self._scheduler = Scheduler(
            executors[0], communicator, context, VOCABULARY, CHUNK, False, self._tell, lambda: None, lambda: None
        )

    def run(
        self,
        requests: Collection[wp.Decode],
        arrivals: Mapping[str, int] | None = None,
        cancels: Collection[tuple[int, str]] = (),
    ) -> None:
        """Answer all requests, which arrive and are cancelled in given rounds of the scheduler."""
        rounds = count()

        def commands(_timeout: float) -> Iterator[wp.WorkerCommand]:
            now = next(rounds)
            assert now < 10_000, f"{len(requests) - len(self.ends)} requests never end"
            if len(self.ends) == len(requests):
                raise Done
            for request in requests:
                if now == (arrivals or {}).get(request.request_id, 0):
                    yield wp.WorkerCommand(decode=request)
            for then, request_id in cancels:
                if now == then:
                    yield wp.WorkerCommand(cancel=request_id)

        with pytest.raises(Done):
            self._scheduler.run(commands)
        assert not any(engine.tokens for engine in self.engines), "slots are left open"
        assert self.followers.none_waits()

    def said(self, kind: type[Any]) -> list[Any]:
        """The messages of one kind that followers, if there are any, have had."""
        return [message for message in self.followers.messages if isinstance(message, kind)]

    def _tell(self, tokens: wp.Tokens) -> None:
        assert tokens.request_id not in self.ends
        self.texts.setdefault(tokens.request_id, []).extend(tokens.ids)
        if tokens.finish:
            self.ends[tokens.request_id] = tokens.finish
        elif not tokens.ids:
            self.signs_of_life[tokens.request_id] += 1
        if tokens.HasField("failure"):
            self.failures[tokens.request_id] = tokens.failure

    @property
    def failure_codes(self) -> dict[str, str]:
        return {name: failure.code for name, failure in self.failures.items()}


def _embed(tokens: Sequence[int]) -> F32:
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


def assert_as_alone(session: Session, requests: Collection[wp.Decode], **settings: Any) -> None:
    for asked in requests:
        name = asked.request_id
        text, end = alone(asked, **settings)
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


@given(
    st.data(),
    st.sampled_from(((1,), (3,), (16,), (128,), (16, 3), (2, 128, 16))),
    st.sampled_from((40, 100, 200)),
    st.integers(1, 24),
)
def test_a_request_is_answered_as_if_it_were_alone(
    data: st.DataObject, most: tuple[int, ...], context: int, number: int
) -> None:
    requests = []
    for name in map(str, range(number)):
        prompt = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20))
        longest = data.draw(st.integers(1, min(40, context - len(prompt))))
        stop = data.draw(st.sampled_from(((), range(0, VOCABULARY, 20))))
        requests.append(request(name, prompt, longest, stop, **data.draw(sampling)))
    rounds = st.integers(0, 60)
    names = st.sampled_from([asked.request_id for asked in requests])
    arrivals = {asked.request_id: data.draw(rounds) for asked in requests}
    cancels = data.draw(st.lists(st.tuples(rounds, names), max_size=3))
    bad_length = data.draw(st.none() | st.integers(3, 30))

    def broken(tokens: list[int]) -> bool:
        return len(tokens) == bad_length and tokens[-1] % 4 == 0

    longest = max(len(asked.prompt) + asked.max_tokens for asked in requests)
    memory = data.draw(st.just(1 << 30) | st.integers(longest, longest + context))
    session = Session(most, context, broken, memory=memory)
    session.run(requests, arrivals, cancels)
    assert_as_alone(session, requests, most=most, context=context, broken=broken)


def test_who_came_last_steps_back_when_the_context_is_full() -> None:
    context, longest = 100, 80
    first, last = requests = [request("first", [1, 2, 3], longest), request("last", [4, 5, 6], longest)]
    assert len(first.prompt) + len(last.prompt) + 2 * HEADROOM <= context < 2 * longest, "both start, and meet"
    session = Session((16, 16), context)
    session.run(requests)
    assert_as_alone(session, requests)
    assert list(session.ends) == ["first", "last"]
    assert [message.slot for message in session.said(Open)] == [0, 1, 0], "the last begins twice"
    assert all(context - 4 < engine.peak <= context for engine in session.engines)


@pytest.mark.parametrize("rank_size", [1, 2])
def test_who_came_last_steps_back_when_a_rank_lacks_memory(rank_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "FIRST_ROOM", 4)
    requests = [request(str(i), [i, i, i], 90) for i in range(3)]
    longest = 93
    session = Session((16,) * rank_size, 1000, memory=2 * longest - 1)
    session.run(requests)
    assert_as_alone(session, requests, context=1000)
    assert session.failures == {}
    assert list(session.ends) == ["0", "1", "2"]
    if rank_size > 1:
        assert len(session.said(Open)) > 3, "somebody began twice"
        assert len(session.said(Reserve)) < 20, "nobody is asked at every step"


def test_a_request_that_no_memory_is_left_for_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "FIRST_ROOM", 4)
    small = [request(str(i), [i], 20) for i in range(2)]
    too_long, endless = request("too long", [3] * 80, 5), request("endless", [4], 200)
    session = Session((16, 16, 16), 1000, memory=70)
    session.run([endless, small[0], too_long, small[1]])
    assert_as_alone(session, small, context=1000)
    assert session.failure_codes == {"too long": "out_of_memory", "endless": "out_of_memory"}
    assert "rank 2: 70 of 85 free" in session.failures["too long"].message
    assert session.texts["too long"] == []
    text, _ = alone(endless, context=1000)
    heard = session.texts["endless"]
    assert 20 < len(heard) < 70
    assert heard == text[: len(heard)]


def test_a_request_that_is_computed_once_more_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "SIGN_OF_LIFE_S", 0.0)
    requests = [request("first", [1, 2, 3], 80), request("last", [4, 5, 6], 80)]
    session = Session((16, 16), context=100)
    session.run(requests)
    assert_as_alone(session, requests)
    again = len(session.said(Open)) - len(requests)
    assert again == 1
    assert session.signs_of_life["first"] == 0
    assert 40 < session.signs_of_life["last"] < 80


def test_top_k_of_the_whole_vocabulary_asks_ranks_for_no_more_than_without(monkeypatch: pytest.MonkeyPatch) -> None:
    for top_k, want in ((VOCABULARY - 1, VOCABULARY - 1), (VOCABULARY, 1), (1_000_000, 1)):
        asked = request("any", [1], 10, temperature=1.0, seed=3, top_k=top_k)
        session = Session((16, 16))
        session.run([asked])
        assert {int(number) for wave in session.said(Wave) for number in wave.wants} == {want}
        if want == 1:
            assert session.texts["any"] == alone(request("any", [1], 10, temperature=1.0, seed=3))[0]


def test_waves_are_as_large_as_the_least_able_rank_allows() -> None:
    requests = [request(str(i), [i], 10) for i in range(8)]
    session = Session((16, 3, 5), 1000)
    session.run(requests)
    assert_as_alone(session, requests)
    sizes = Counter(len(wave.slots) for wave in session.said(Wave))
    assert max(sizes) == 3
    assert sizes[3] > sizes[1] + sizes[2], "and no smaller without need"


def test_no_more_are_active_than_there_are_slots() -> None:
    requests = [request(str(i), [i], 5) for i in range(MAX_ACTIVE + 5)]
    session = Session((128, 128), 10_000)
    session.run(requests)
    assert_as_alone(session, requests, context=10_000)
    assert {message.slot for message in session.said(Open)} == set(range(MAX_ACTIVE))


def test_one_of_a_wave_may_need_more_candidates() -> None:
    sharp = [request(str(i), [i], 10) for i in range(3)]
    flat = request("flat", [7], 10, temperature=2.0, top_p=0.99, seed=5)
    session = Session((16, 16))
    session.run([*sharp[:2], flat, *sharp[2:]])
    assert_as_alone(session, [*sharp, flat])
    assert {tuple(message.slots) for message in session.said(More)} == {(2,)}
    assert any(2 in wave.slots and len(wave.slots) == 4 for wave in session.said(Wave))


def test_all_of_a_wave_that_need_more_candidates_ask_in_one_round() -> None:
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


def test_a_request_is_cancelled_between_waves() -> None:
    requests = [request(str(i), [i], 30) for i in range(3)]
    session = Session((16, 16))
    session.run(requests, cancels=[(12, "1"), (13, "1"), (13, "unknown")])
    assert_as_alone(session, requests)
    assert session.ends == {"0": "length", "1": "cancelled", "2": "length"}
    assert 0 < len(session.texts["1"]) < 30


def test_a_request_is_cancelled_before_it_begins() -> None:
    requests = [request(str(i), [i], 60) for i in range(3)]
    session = Session((16, 16), context=65)
    assert 2 + 2 * HEADROOM > 65, "one at a time"
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


def test_sampling_that_cannot_be_is_refused_at_once() -> None:
    requests = [request("good", [1], 5), request("bad", [1], 5, temperature=-1.0)]
    session = Session()
    session.run(requests)
    assert session.failure_codes == {"bad": "invalid_request"}
    assert session.ends == {"bad": "error", "good": "length"}


def test_a_rank_that_can_take_no_sequence_is_named() -> None:
    with pytest.raises(StepError, match=r"rank 2: .*no sequence"):
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
    session = Session((16, 16), told_of_waves=lambda data: told(data) if both(data) else data)
    with pytest.raises(StepError, match=rf"rank 1: .*{reason}"):
        session.run([request(str(i), [i], 5) for i in range(2)])


def both(data: bytes) -> bool:
    """Whether these are two summaries: the first is not all."""
    return len(data) > 4 + int.from_bytes(data[:4], "little")
