"""The leader's side of a session: which sequence gets the next step, and which token it gets.

Requests take turns, a prompt one chunk at a time, so that nobody waits for another's whole answer. Together they may
hold as many tokens as the session's context: when that is reached, the request admitted last steps back, and computes
its tokens again once there is room. The oldest always goes on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from motley.daemon.executor import STEP_HISTORY, Executor
from motley.daemon.prefill import Chunk, ChunkSizes
from motley.daemon.sampling import Choice, LogitsError, SamplingError, SamplingParams, choose, initial_want
from motley.daemon.steps import Close, Message, More, Open, Step, Stop
from motley.protocol import mesh_pb2 as pb
from motley.transport import Communicator

LOOK_S = 0.5
"""An idle leader looks after its peers this often."""
MAX_ACTIVE = 16
SIGN_OF_LIFE_S = 10.0
"""While a long prompt is computed, its client hears of it this often."""
HEADROOM = 32
"""Tokens that every active request should have left when another is admitted, or they would soon step back again."""

Emit = Callable[..., None]
Commands = Callable[[float], Iterable[pb.RankCommand]]
"""Commands of the daemon, waiting for the first up to so many seconds."""


@dataclass(eq=False)
class _Request:
    decode: pb.Decode
    params: SamplingParams
    arrived: float
    spoken: float
    """When its client last heard something."""
    tokens: list[int]
    """The prompt and what has been generated."""
    slot: int = -1
    position: int = 0
    """Tokens whose keys and values are in the caches."""

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.decode.prompt)


@dataclass
class Leader:
    """Runs a session until its daemon releases it."""

    executor: Executor
    communicator: Communicator
    context: int
    max_rows: int
    halves: bool
    """Whether prompts may be computed in micro-chunks."""
    emit: Emit
    report: Callable[[], None]
    """Called after each request, to send this rank's timing."""
    step_ms: deque[float] = field(default_factory=lambda: deque(maxlen=STEP_HISTORY))

    def __post_init__(self) -> None:
        self._queue: deque[_Request] = deque()
        self._active: deque[_Request] = deque()
        self._chunks = ChunkSizes(self.max_rows, self.halves)

    def run(self, commands: Commands) -> None:
        """The step loop."""
        while True:
            for command in commands(0.0 if self._active else LOOK_S):
                self._obey(command)
            self._make_room()
            self._admit()
            if self._active:
                request = self._active.popleft()
                if self._advance(request):
                    self._active.append(request)
            else:
                self.communicator.check()

    def stop(self) -> None:
        """Tell the followers that the session is over."""
        self._tell(Stop())

    def _obey(self, command: pb.RankCommand) -> None:
        match command.WhichOneof("body"):
            case "decode":
                self._accept(command.decode)
            case "cancel":
                self._cancel(command.cancel)

    def _accept(self, decode: pb.Decode) -> None:
        try:
            params = SamplingParams.from_proto(decode.sampling)
        except SamplingError as error:
            failure = pb.Failure(code="invalid_request", message=str(error))
            self._say(decode.request_id, finish="error", failure=failure)
            return
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
        while self._queue and len(self._active) < MAX_ACTIVE and self._has_room(self._queue[0]):
            request = self._queue.popleft()
            taken = {other.slot for other in self._active}
            request.slot = next(slot for slot in range(MAX_ACTIVE) if slot not in taken)
            prompt = np.array(request.decode.prompt, np.int32)
            self._do(Open(request.slot, request.decode.sampling.SerializeToString(), prompt))
            self._active.append(request)

    def _has_room(self, request: _Request) -> bool:
        """Whether `request` and the active ones can all go on for a while; one alone always can."""
        headroom = HEADROOM * (len(self._active) + 1)
        return not self._active or self._held() + len(request.tokens) + headroom <= self.context

    def _held(self) -> int:
        """Tokens that the active requests hold, or will when their prompts are computed."""
        return sum(len(request.tokens) for request in self._active)

    def _make_room(self) -> None:
        """Have the request that was admitted last step back, if another token each would be too many."""
        while len(self._active) > 1 and self._held() + len(self._active) > self.context:
            last = max(self._active, key=lambda request: request.arrived)
            self._active.remove(last)
            self._do(Close(last.slot))
            last.position = 0
            self._queue.appendleft(last)

    def _advance(self, request: _Request) -> bool:
        """Give a request one step; whether it goes on."""
        decode = request.decode
        began = time.perf_counter()
        prompt = len(decode.prompt)
        position = request.position
        # Prompt and answer never share a step: only the answer counts for penalties. A token of the answer is computed
        # alone, also once more after a break: kernels for several tokens round otherwise, and its text must not change.
        chunk = self._chunks.choose(position, prompt - position) if position < prompt else Chunk(1, False)
        stop = position + chunk.rows
        tokens = np.array(request.tokens[position:stop], np.int32)
        decided = stop == len(request.tokens)
        want = initial_want(request.params) if decided else 0
        summary = self._do(Step(request.slot, position, want, chunk.halved, tokens))
        request.position = stop
        self._chunks.took(chunk, position, time.perf_counter() - began)
        if not decided:
            if time.perf_counter() - request.spoken > SIGN_OF_LIFE_S:
                self._say(decode.request_id)
                request.spoken = time.perf_counter()
            return True

        try:
            choice = self._choose(request, summary)
        except LogitsError as error:
            self._end(request)
            self._say(decode.request_id, finish="error", failure=pb.Failure(code="bad_logits", message=str(error)))
            return False
        if stop > prompt and len(tokens) == 1:
            self.step_ms.append(1e3 * (time.perf_counter() - began))
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
        return not finish

    def _end(self, request: _Request) -> None:
        self._do(Close(request.slot))
        self.report()

    def _choose(self, request: _Request, summary: bytes | None) -> Choice:
        while True:
            assert summary is not None
            summaries = [summary]
            for rank in range(1, self.communicator.size):
                summaries.append(self.communicator.recv(rank, self.communicator.deadline_s))
            choice = choose(summaries, request.params, request.generated)
            if isinstance(choice, Choice):
                return choice
            summary = self._do(More(request.slot, choice.want))

    def _do(self, message: Message) -> bytes | None:
        """Have every rank, this one included, execute a message."""
        self._tell(message)
        return self.executor.execute(message)

    def _tell(self, message: Message) -> None:
        if self.communicator.size > 1:
            self.communicator.broadcast_message(message.encode(), 0, None)

    def _say(self, request_id: str, **said: Any) -> None:
        self.emit(tokens=pb.Tokens(request_id=request_id, **said))


def _logprob_row(choice: Choice) -> pb.LogprobRow:
    return pb.LogprobRow(
        chosen=pb.TokenLogprob(id=choice.token, logprob=choice.logprob),
        top=[pb.TokenLogprob(id=token, logprob=logprob) for token, logprob in choice.top],
    )
