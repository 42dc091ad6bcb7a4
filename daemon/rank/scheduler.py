"""The schedule of a session's steps, on rank 0: which requests the next step is for, and which tokens they get.

Requests that are being answered get their next token in one step, a *wave*, which reads the weights once. All are in
one if every rank's engine can take so many sequences, else in as few as the least able rank makes necessary. Before
each round of waves one prompt is computed by a chunk, so that nobody waits for another's whole prompt. Together they
may hold as many tokens as the session's context: when that is reached, or a rank lacks the memory for more, the request
admitted last steps back, and computes its tokens again once there is room. The oldest always goes on; if there is no
memory for it alone, it ends with an error, and the session serves on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from motley.daemon.pipe.daemon import Commands, Tell
from motley.daemon.rank.chunk_sizes import ChunkSizes
from motley.daemon.rank.executor import STEP_HISTORY, Executor
from motley.daemon.rank.steps import (
    Able,
    Close,
    Message,
    More,
    Open,
    Reserve,
    Step,
    StepError,
    Stop,
    Wave,
    decode,
    split,
)
from motley.daemon.sampling.choice import Choice, LogitsError, NeedMore, choose, initial_want
from motley.daemon.sampling.parameters import SamplingError, SamplingParams
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp
from motley.transport import Communicator

LOOK_S = 0.5
"""Seconds between two looks after the other ranks, while there are no requests."""
MAX_ACTIVE = 16
"""Requests that are answered at a time; others wait in the queue."""
SIGN_OF_LIFE_S = 10.0
"""Seconds between two signs of life to a client while its prompt is computed, or its answer once more."""
HEADROOM = 32
"""Tokens that every active request should have left when another is admitted, or they would soon step back again."""
FIRST_ROOM = 256
"""Tokens that every rank has room for when a request is admitted, or as many as it has if that is more."""


@dataclass(eq=False)
class _Request:
    """A request, in the queue or being answered, and how far it has come."""

    decode: wp.Decode
    params: SamplingParams
    arrived: float
    spoken: float
    """When its client last heard something."""
    tokens: list[int]
    """The prompt and what has been generated."""
    slot: int = -1
    """Where its sequence is on every rank; -1: it has ended, or has not been admitted yet."""
    position: int = 0
    """Tokens of it whose keys and values are in the caches."""
    room: int = 0
    """Tokens that the caches of all ranks have room for."""

    @property
    def longest(self) -> int:
        """Tokens that it may come to have in the caches."""
        return len(self.decode.prompt) + self.decode.max_tokens

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.decode.prompt)

    @property
    def prompted(self) -> bool:
        """Whether its prompt is in the caches."""
        return self.position >= len(self.decode.prompt)


@dataclass
class Scheduler:
    """Decides each step, has every rank execute it, and chooses the tokens.

    Attributes:
        executor: this rank's own, rank 0's.
        communicator: the way to the other ranks, the followers.
        context: tokens that all active requests together may hold, the longest sequence served.
        vocabulary: tokens that the model knows.
        max_rows: the most tokens of a prompt that one step may have.
        halves: whether prompts may be computed in micro-chunks.
        tell: tells the daemon `tokens`.
        check: called now and then while there is nothing to do, to see whether everyone is still there.
        report: called after each request, to tell where this rank's time went.
        step_ms: what the latest decode steps have taken, in milliseconds.
    """

    executor: Executor
    communicator: Communicator
    context: int
    vocabulary: int
    max_rows: int
    halves: bool
    tell: Tell
    check: Callable[[], None]
    report: Callable[[], None]
    step_ms: deque[float] = field(default_factory=lambda: deque(maxlen=STEP_HISTORY))

    def __post_init__(self) -> None:
        self._queue: deque[_Request] = deque()
        self._active: deque[_Request] = deque()
        self._chunks = ChunkSizes(self.max_rows, self.halves)
        self._most = 0
        """Sequences that one wave may have, once the followers have told."""
        self._full = False
        """Whether a rank lacked memory for one more, and none has ended since: nobody else is admitted."""

    def run(self, commands: Commands) -> None:
        """Answer requests until `commands` raises.

        Raises:
            StepError, SummaryError: a follower says something that does not fit.
            TransportError, EngineError: a rank is lost, or cannot compute.
            Exception: what `commands`, `tell`, `check` and `report` raise.
        """
        while True:
            for command in commands(0.0 if self._active else LOOK_S):
                self._obey(command)
            self._make_room()
            self._admit()
            if self._active:
                self._advance()
            else:
                self.check()

    def stop(self) -> None:
        """Tell the followers that the session is over."""
        self._broadcast(Stop())

    def _obey(self, command: wp.WorkerCommand) -> None:
        match command.WhichOneof("body"):
            case "decode":
                self._accept(command.decode)
            case "cancel":
                self._cancel(command.cancel)

    def _accept(self, decode: wp.Decode) -> None:
        try:
            params = SamplingParams.from_proto(decode.sampling)
        except SamplingError as error:
            failure = pb.Failure(code="invalid_request", message=str(error))
            self._say(decode.request_id, finish="error", failure=failure)
            return
        if params.top_k >= self.vocabulary:  # every token passes: no rank has to sort and send its whole slice for it
            decode.sampling.top_k = 0
            params = replace(params, top_k=0)
        now = time.perf_counter()
        self._queue.append(_Request(decode, params, arrived=now, spoken=now, tokens=list(decode.prompt)))

    def _cancel(self, request_id: str) -> None:
        for request in [*self._queue, *self._active]:
            if request.decode.request_id == request_id:
                if request in self._queue:
                    self._queue.remove(request)
                else:
                    self._active.remove(request)
                    self._end(request)
                self._say(request_id, finish="cancelled")
                return

    def _admit(self) -> None:
        if self._queue and not self._most:
            self._most = min([self.executor.most_sequences, *map(self._ability, range(1, self.communicator.size))])
        while self._queue and not self._full and len(self._active) < MAX_ACTIVE and self._has_room(self._queue[0]):
            request = self._queue.popleft()
            taken = {other.slot for other in self._active}
            request.slot = next(slot for slot in range(MAX_ACTIVE) if slot not in taken)
            self._active.append(request)
            room = min(request.longest, max(FIRST_ROOM, len(request.tokens) + HEADROOM))
            prompt = np.array(request.decode.prompt, np.int32)
            self._reserve(request, Open(request.slot, room, request.decode.sampling.SerializeToString(), prompt))

    def _has_room(self, request: _Request) -> bool:
        """Whether `request` and the active ones can all go on for a while; one alone always can."""
        headroom = HEADROOM * (len(self._active) + 1)
        return not self._active or self._held() + len(request.tokens) + headroom <= self.context

    def _held(self) -> int:
        """Tokens that the active requests hold, or will when their prompts are computed."""
        return sum(len(request.tokens) for request in self._active)

    def _make_room(self) -> None:
        """Make sure that every active request can have another token, or steps back."""
        while len(self._active) > 1 and self._held() + len(self._active) > self.context:
            self._step_back(self._last())
        for request in [request for request in self._active if request.position >= request.room]:
            if request.slot >= 0:  # it has not stepped back for one before it
                self._reserve(request, Reserve(request.slot, min(request.longest, 2 * request.room)))

    def _reserve(self, request: _Request, asked: Open | Reserve) -> None:
        """Have every rank make room for a request.

        If one has no memory for it, the requests that were admitted last step back for it, itself perhaps, until one
        has ended. If it is the only one, it ends.
        """
        lacking = self._lacking(asked)
        while lacking and request.slot >= 0:
            if len(self._active) == 1:
                self._active.remove(request)
                self._end(request)
                why = f"there is no memory for {asked.room} tokens of this request and its answer ({lacking})"
                self._fail(request, "out_of_memory", f"{why}; ask for less, or give that rank a smaller share")
                return
            self._full = True
            self._step_back(self._last())
            if request.slot >= 0:
                lacking = self._lacking(Reserve(request.slot, asked.room))
        request.room = asked.room

    def _lacking(self, asked: Open | Reserve) -> str:
        """Have every rank make room; those that have none for it, and why; empty: all have."""
        told = enumerate(self._told(asked))
        return "; ".join(f"rank {rank}: {why.decode(errors='replace')}" for rank, why in told if why)

    def _last(self) -> _Request:
        """The active request that came last."""
        return max(self._active, key=lambda request: request.arrived)

    def _step_back(self, request: _Request) -> None:
        """Have an active request wait once more, in front of the queue."""
        self._active.remove(request)
        self._do(Close(request.slot))
        request.slot, request.position, request.spoken = -1, 0, time.perf_counter()
        self._queue.appendleft(request)

    def _ability(self, rank: int) -> int:
        """How many sequences a follower can take in one wave, which it has said once it was loaded."""
        with _from_rank(rank):
            message = decode(self._hear(rank))
        if not isinstance(message, Able):
            raise StepError(f"rank {rank} has not said how many sequences it can take, but {message}")
        return message.sequences

    def _advance(self) -> None:
        """Compute a chunk of one prompt, then a token of every request that is being answered."""
        waiting = next((request for request in self._active if not request.prompted), None)
        if waiting is not None:
            self._compute_prompt(waiting)
            self._active.remove(waiting)
            self._active.append(waiting)
        answered = [request for request in self._active if request.prompted and request is not waiting]
        for start in range(0, len(answered), self._most):
            self._answer(answered[start : start + self._most])
        self._active = deque(request for request in self._active if request.slot >= 0)

    def _compute_prompt(self, request: _Request) -> None:
        began = time.perf_counter()
        position, prompt = request.position, len(request.decode.prompt)
        chunk = self._chunks.choose(position, prompt - position)
        request.position = position + chunk.rows
        tokens = np.array(request.tokens[position : request.position], np.int32)
        want = self._want(request)
        summary = self._do(Step(request.slot, position, want, chunk.halved, tokens))
        self._chunks.took(chunk, position, time.perf_counter() - began)
        if want:
            assert summary is not None
            self._settle([request], [[summary, *self._hear_all()]])
        else:
            self._show_life(request)

    def _answer(self, requests: Sequence[_Request]) -> None:
        """Have a wave run, and settle on the next tokens.

        Tokens of an answer that are computed once more after a break come one by one, too: kernels for several tokens
        of a sequence round otherwise, and its text must not change.
        """
        began = time.perf_counter()
        positions = [request.position for request in requests]
        tokens = [request.tokens[request.position] for request in requests]
        for request in requests:
            request.position += 1
        wants = list(map(self._want, requests))
        fields = [[request.slot for request in requests], positions, wants, tokens]
        told = self._told(Wave(*np.array(fields, np.int32)))
        self.step_ms.append(1e3 * (time.perf_counter() - began))  # first: a request that ends has it reported
        wanted = []
        for request, want in zip(requests, wants, strict=True):
            if want:
                wanted.append(request)
            else:
                self._show_life(request)
        self._settle(wanted, _by_sequence(told, len(wanted)))

    def _want(self, request: _Request) -> int:
        """How many candidates to ask every rank for, if the request's next token is due; else 0."""
        return initial_want(request.params) if request.position == len(request.tokens) else 0

    def _settle(self, requests: Sequence[_Request], summaries: Iterable[Sequence[bytes]]) -> None:
        """Choose the next token of each request and tell it; the request ends with it, or goes on.

        Those whose candidates do not decide ask for more, all in one round.

        Args:
            summaries: of each request, by rank.
        """
        undecided, wants = [], []
        for request, told in zip(requests, summaries, strict=True):
            try:
                choice = choose(told, request.params, request.generated)
            except LogitsError as error:
                self._end(request)
                self._fail(request, "bad_logits", str(error))
                continue
            if isinstance(choice, NeedMore):
                undecided.append(request)
                wants.append(choice.want)
            else:
                self._go_on(request, choice)
        if undecided:
            slots = [request.slot for request in undecided]
            more = self._told(More(*np.array([slots, wants], np.int32)))
            self._settle(undecided, _by_sequence(more, len(undecided)))

    def _go_on(self, request: _Request, choice: Choice) -> None:
        """Tell a request's next token, with which it may end."""
        decode = request.decode
        request.tokens.append(choice.token)
        finish = ""
        if choice.token in decode.stop_tokens:
            finish = "stop"
        elif request.generated >= decode.max_tokens:
            finish = "length"
        said: dict[str, Any] = {"ids": [choice.token], "finish": finish}
        if request.params.logprobs:
            said["logprobs"] = [_logprob_row(choice)]
        if request.generated == 1:
            said["prefill_s"] = time.perf_counter() - request.arrived
        if finish:
            self._end(request)
        self._say(decode.request_id, **said)

    def _end(self, request: _Request) -> None:
        self._do(Close(request.slot))
        request.slot = -1
        self._full = False
        self.report()

    def _told(self, message: Message) -> list[bytes]:
        """Have every rank execute a message; what each of them tells, by rank."""
        own = self._do(message)
        assert own is not None
        return [own, *self._hear_all()]

    def _hear_all(self) -> Iterator[bytes]:
        """What the followers tell, by rank."""
        return map(self._hear, range(1, self.communicator.size))

    def _hear(self, rank: int) -> bytes:
        return self.communicator.recv(rank, self.communicator.deadline_s)

    def _do(self, message: Message) -> bytes | None:
        """Have every rank, this one included, execute a message."""
        self._broadcast(message)
        return self.executor.execute(message)

    def _broadcast(self, message: Message) -> None:
        """Send a message to every follower."""
        if self.communicator.size > 1:
            self.communicator.broadcast_message(message.encode(), 0, None)

    def _show_life(self, request: _Request) -> None:
        """Give a request that has no news a sign of life when it is due."""
        now = time.perf_counter()
        if now - request.spoken > SIGN_OF_LIFE_S:
            request.spoken = now
            self._say(request.decode.request_id)

    def _fail(self, request: _Request, code: str, message: str) -> None:
        """Tell that a request has ended with an error, and that alone."""
        self._say(request.decode.request_id, finish="error", failure=pb.Failure(code=code, message=message))

    def _say(self, request_id: str, **said: Any) -> None:
        self.tell(tokens=wp.Tokens(request_id=request_id, **said))


@contextmanager
def _from_rank(rank: int) -> Iterator[None]:
    """Errors name the rank that a message is from."""
    try:
        yield
    except StepError as error:
        raise StepError(f"rank {rank}: {error}") from error


def _by_sequence(told: Sequence[bytes], count: int) -> Iterator[Sequence[bytes]]:
    """Of each of so many sequences the summaries by rank, from what every rank tells of all of them.

    Raises:
        StepError: a rank tells of more or fewer; the message names it.
    """
    by_rank = []
    for rank, data in enumerate(told):
        with _from_rank(rank):
            by_rank.append(split(data, count))
    return zip(*by_rank, strict=True)


def _logprob_row(choice: Choice) -> pb.LogprobRow:
    return pb.LogprobRow(
        chosen=pb.TokenLogprob(id=choice.token, logprob=choice.logprob),
        top=[pb.TokenLogprob(id=token, logprob=logprob) for token, logprob in choice.top],
    )
