"""The leader's side of a session: which sequence gets the next step, and which token it gets.

Requests are admitted in order of arrival while the tokens they may come to need fit the session's context; admitted
ones take turns, a prompt one chunk at a time, so that nobody waits for another's whole answer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from motley.daemon.executor import Executor
from motley.daemon.sampling import Choice, LogitsError, SamplingError, SamplingParams, choose, initial_want
from motley.daemon.steps import Beat, Close, Message, More, Open, Step, Stop
from motley.protocol import mesh_pb2 as pb
from motley.transport import Communicator

BEAT_S = 1.0
"""An idle leader says so this often."""
MAX_ACTIVE = 16
STEP_HISTORY = 4096
SUMMARY_S = 120.0
"""A follower whose part in choosing a token is this late is taken for gone."""

Emit = Callable[..., None]
Commands = Callable[[float], Iterable[pb.RankCommand]]
"""Commands of the daemon, waiting for the first up to so many seconds."""


@dataclass
class _Request:
    decode: pb.Decode
    params: SamplingParams
    arrived: float
    slot: int = -1
    position: int = 0
    generated: int = 0
    last: int = -1

    @property
    def reserved(self) -> int:
        return len(self.decode.prompt) + self.decode.max_tokens


@dataclass
class Leader:
    """Runs a session until its daemon releases it."""

    executor: Executor
    communicator: Communicator
    context: int
    max_rows: int
    emit: Emit
    report: Callable[[], None]
    """Called after each request, to send this rank's timing."""
    step_ms: deque[float] = field(default_factory=lambda: deque(maxlen=STEP_HISTORY))

    def __post_init__(self) -> None:
        self._queue: deque[_Request] = deque()
        self._active: deque[_Request] = deque()

    def run(self, commands: Commands) -> None:
        """The step loop."""
        while True:
            for command in commands(0.0 if self._active else BEAT_S):
                self._obey(command)
            self._admit()
            if self._active:
                request = self._active.popleft()
                if self._advance(request):
                    self._active.append(request)
            else:
                self.communicator.check()
                self._tell(Beat())

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
        self._queue.append(_Request(decode, params, time.perf_counter()))

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
        while self._queue and len(self._active) < MAX_ACTIVE:
            reserved = sum(request.reserved for request in self._active)
            if reserved + self._queue[0].reserved > self.context:
                return
            request = self._queue.popleft()
            taken = {other.slot for other in self._active}
            request.slot = next(slot for slot in range(MAX_ACTIVE) if slot not in taken)
            prompt = np.array(request.decode.prompt, np.int32)
            self._do(Open(request.slot, request.decode.sampling.SerializeToString(), prompt))
            self._active.append(request)

    def _advance(self, request: _Request) -> bool:
        """Give a request one step; whether it goes on."""
        decode = request.decode
        began = time.perf_counter()
        prompt_left = decode.prompt[request.position : request.position + self.max_rows]
        tokens = np.array(prompt_left or [request.last], np.int32)
        decided = request.position + len(tokens) >= len(decode.prompt)
        want = initial_want(request.params) if decided else 0
        summary = self._do(Step(request.slot, request.position, want, tokens))
        request.position += len(tokens)
        if not decided:
            return True

        try:
            choice = self._choose(request, summary)
        except LogitsError as error:
            self._end(request)
            self._say(decode.request_id, finish="error", failure=pb.Failure(code="bad_logits", message=str(error)))
            return False
        if not prompt_left:
            self.step_ms.append(1e3 * (time.perf_counter() - began))
        request.last = choice.token
        request.generated += 1
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
                summaries.append(self.communicator.recv(rank, SUMMARY_S))
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
