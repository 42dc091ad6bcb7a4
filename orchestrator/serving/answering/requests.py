"""A request's life: it goes to the leader of its session, deltas come back, an error or a last delta ends it.

When the session loses ranks and recovers, a request goes to the new leader, with the tokens that have come of it: what
comes then goes on from these, so the client sees no more of it than that it takes a while.

A client may make several requests at once, for as many answers. They get places together or not at all, and what comes
of them is one series of deltas.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from motley.orchestrator.control import Control
from motley.orchestrator.mesh.nodes import Node
from motley.orchestrator.serving.answering.kept_answers import KeptAnswer
from motley.orchestrator.serving.answering.places import Places
from motley.orchestrator.serving.answering.tally import AdapterTally, Outcome, Tally, outcome_of
from motley.orchestrator.serving.errors import AnswerError, BusyError, refusal, unready
from motley.orchestrator.sessions.session import Session
from motley.orchestrator.store.usage import Used
from motley.orchestrator.traces import Span, begin
from motley.protocol.mesh_pb2 import Cancel, Delta, Failure, Generate, Hold, Involved, OrchestratorMessage
from motley.protocol.wording import counted

_log = logging.getLogger(__name__)

ANSWER_S = 300.0
"""A leader says of every request at least this often that it lives, also while that waits."""
LOOK_S = 1.0
"""How often that is looked at."""
FRUITLESS = 3
"""A request ends when a rank was lost so often in a row before there was another token of it, and of no older one."""
MOST_UNTAKEN = 1 << 16
"""Bytes of deltas that may wait for a client to take them; with more, its request is held until there are fewer than a
quarter of that. What is under way from the leader when it is told so comes on top, a few steps at most."""


@dataclass(eq=False)
class _Request:
    """A request under way.

    Attributes:
        generate: what the leader is asked for; ``request_id`` is another in each epoch of the session.
        tally: of its session.
        span: of OpenTelemetry.
        began: when it came.
        heard: when the leader last said something of it, or when it began.
        token_at: when it last said tokens of it, or when it began.
        kept: where what comes of it is kept, too; None: nowhere.
        number: among those that were made together, from 0 on.
        deltas: of all that were made together, that have not been taken.
        answered: whether there have been tokens.
        first_s: how long after it began the first ones came.
        replayed: whether there had been tokens when the leader was asked last.
        untaken: bytes of its deltas that have not been taken.
        held: whether the leader was told to compute no more of it for now.
        asked: whether there is a leader that was asked; else it waits for one.
        told: whether the leader that was asked last has told a token.
        fruitless: how often ranks were lost before there was another token, while it was the oldest such request.
        cacheless: how often it lost caches that there was no room for without a cache holder.
        beside: of those requests of its session that have its adapter; None: it has none.
    """

    generate: Generate
    session: Session
    tally: Tally
    span: Span
    began: float
    heard: float
    token_at: float
    number: int
    deltas: asyncio.Queue[_Told] = field(repr=False)
    kept: KeptAnswer | None = field(default=None, repr=False)
    answered: bool = False
    first_s: float = 0.0
    replayed: bool = False
    untaken: int = 0
    held: bool = False
    asked: bool = False
    told: bool = False
    fruitless: int = 0
    cacheless: int = 0
    beside: AdapterTally | None = None

    @property
    def id(self) -> str:
        return self.generate.request_id

    @property
    def name(self) -> str:
        """What the client and all logs call it."""
        return self.generate.name or self.id

    @property
    def about(self) -> dict[str, str]:
        """What a line in the log is about that is about this request."""
        return {"request": self.name, "session": self.session.id}

    @property
    def state(self) -> str:
        if self.held:
            return "held"
        return "recovering" if not self.asked else "answering" if self.answered else "waiting"

    def put(self, delta: Delta) -> None:
        if self.kept is not None:
            self.kept.put(self.number, delta)
        self.tell(delta)

    def tell(self, delta: Delta) -> None:
        """Have a delta wait for the client."""
        size = delta.ByteSize()
        self.untaken += size
        self.deltas.put_nowait((self, delta, size))

    def count(self, now: float) -> None:
        """Tokens of it have come at `now` seconds."""
        if not self.answered:
            self.span.event("first token")
            self.first_s = now - self.began
        (self.tally.gap_s if self.answered else self.tally.first_s).add(now - self.token_at)
        self.answered, self.token_at = True, now


_Told = tuple["_Request", Delta, int]
"""A delta that waits for its client, with its request and its size in bytes."""


class UnderWay(NamedTuple):
    """A request as others see it: what the client and all logs call it, the name of its session, what it does
    ("waiting" for its first token, "answering", "held" for a slow client, "recovering"), for how long it has been
    there, and how many tokens have come of it."""

    name: str
    model: str
    state: str
    seconds: float
    tokens: int


class Requests:
    """All requests that are being answered."""

    def __init__(self, control: Control, clock: Callable[[], float]) -> None:
        self._control = control
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        """By id."""
        self._places: dict[str, Places] = {}
        """By session."""
        self._tallies: dict[str, Tally] = {}
        """By session."""
        self._by_adapter: dict[tuple[str, str], AdapterTally] = {}
        """By session, and the name of its adapter."""

    @contextlib.asynccontextmanager
    async def generate(
        self, session: Session, generates: Sequence[Generate], kept: KeptAnswer | None = None, adapter: str = ""
    ) -> AsyncIterator[Answers]:
        """Run requests, each for one answer. Leaving the context cancels those whose last delta has not come.

        Args:
            kept: what has come of the same requests before, which comes first now; what comes is kept there.
            adapter: the name of what they are computed with beside the model; empty: nothing.

        Raises:
            BusyError: the session has no places for so many more; its nodes have heard nothing of these.
            ServingError: the session has not been ready, or has ended, or never has so many places. The answers raise
                it where one breaks off.
        """
        if not session.takes_requests:
            raise unready(session)
        complete = kept.finished if kept else set()
        places, tally, count = self.places(session), self.tally(session), len(generates) - len(complete)
        if count > places.number:
            limit = f"{session.name!r} takes {counted(places.number, 'request')} at a time"
            raise refusal("invalid_request", f"{count} answers are asked for, each of which is a request; {limit}")
        if not places.take(count):
            tally.ended[Outcome.TOO_MANY] += count
            raise self._busy(session, places)
        now = self._clock()
        deltas: asyncio.Queue[_Told] = asyncio.Queue()
        requests: list[_Request] = []
        beside = self.adapter_tally(session, adapter) if adapter else None
        for number, generate in enumerate(generates):
            generate.request_id, generate.session = secrets.token_hex(8), session.id
            generate.asked_at = generate.asked_at or datetime.now().isoformat(timespec="seconds")
            about = {"motley.request": generate.name, "motley.model": session.name, "motley.session": session.id}
            span = Span() if number in complete else begin("answer", about)
            requests.append(
                _Request(generate, session, tally, span, now, now, now, number, deltas, kept, beside=beside)
            )
        if kept and not kept.generates:
            kept.ask(generates)
        before = kept.deltas() if kept else []
        for number, delta in before:
            requests[number].tell(delta)
        for request in requests:
            if request.number not in complete:
                self._requests[request.id] = request
        self.resume(session)
        for request in requests:
            _log.info("request %s: asked of %s", request.name, session.name, extra=request.about)
        try:
            yield Answers(requests, deltas, self._clock, self._go_on, before)
        finally:
            for request in requests:
                if self._remove(request, Outcome.CANCELLED) and request.asked:
                    cancel = OrchestratorMessage(cancel=Cancel(request_id=request.id))
                    self._control.send(session.leader.node_id, cancel)

    def on_delta(self, node: Node, delta: Delta) -> None:
        """A node says the next part of an answer, or, with an empty one, that the request lives; ignored if that was
        cancelled or is not of that node."""
        request = self._asked_of(node, delta)
        if request is None:
            return
        request.heard = self._clock()
        if delta.text:
            request.generate.echo = False  # the prompt came with it, if it was asked for
        if delta.ids and not request.generate.only_prompt:
            request.generate.written.extend(delta.ids)
            request.told, request.fruitless = True, 0
            request.count(request.heard)
            if request.beside is not None:
                request.beside.tokens += len(delta.ids)
        ends = bool(delta.finish) or delta.HasField("failure")
        if delta.finish and request.replayed:
            delta.prefill_s = request.first_s  # what the leader tells is of the replay
        if ends or delta.ids or delta.text:
            request.put(delta)
        if ends:
            self._remove(request, outcome_of(delta.finish, delta.failure.code))
        elif request.untaken > MOST_UNTAKEN and not request.held:
            self._hold(request, True)

    def without_caches(self, node: Node, delta: Delta) -> Session | None:
        """The session of a request that a node ends as its caches are lost; None: it does not, or the request has lost
        caches too often, so that others would be of no use either."""
        if delta.failure.code != "caches_lost":  # of most, which are tokens, nothing else is asked
            return None
        request = self._asked_of(node, delta)
        if request is None or request.cacheless == FRUITLESS:
            return None
        request.cacheless += 1
        return request.session

    def _asked_of(self, node: Node, delta: Delta) -> _Request | None:
        """The request that a node says something of; None: it is none that this node was asked for."""
        request = self._requests.get(delta.request_id)
        return None if request is None or request.session.leader.node_id != node.id else request

    def under_way(self) -> list[UnderWay]:
        """All requests that have not ended, in the order in which they came."""
        now = self._clock()
        return [
            UnderWay(each.name, each.session.name, each.state, now - each.began, len(each.generate.written))
            for each in sorted(self._requests.values(), key=lambda each: each.began)
        ]

    def end(self, session: Session, failure: Failure) -> None:
        """End all requests of a session with this failure."""
        for request in self._of(session):
            self._break_off(request, failure)

    def set_aside(self, session: Session) -> list[_Request]:
        """The leader of a session cannot be reached, or is no more: what it still says of the requests that it was
        asked is ignored. They wait until it is asked again; which these are."""
        asked = [request for request in self._of(session) if request.asked]
        for request in asked:
            self._involve(request, ended=True)
            del self._requests[request.id]
            request.generate.request_id = secrets.token_hex(8)
            self._requests[request.id] = request
            request.asked = request.held = False
            request.replayed = request.answered
        return asked

    def suspend(self, session: Session) -> None:
        """A rank of a session is lost: its requests wait as `set_aside` has it.

        Of those that the leader has told no token of, the oldest ends when that has happened too often: it may be what
        ranks are lost by.
        """
        asked = self.set_aside(session)
        if oldest := next((request for request in asked if not request.told), None):
            oldest.fruitless += 1
            if oldest.fruitless >= FRUITLESS:
                why = session.losses.last[-1].why
                message = f"{FRUITLESS} times in a row a rank was lost before there was a token: {why.message}"
                self._break_off(oldest, Failure(code=why.code, message=message, lost_rank=why.lost_rank))

    def resume(self, session: Session) -> None:
        """Ask the leader of a session, if that can be asked, for what the requests still lack that wait for one."""
        if not session.answers:
            return
        for request in [each for each in self._of(session) if not each.asked]:
            request.asked, request.told, request.heard = True, False, self._clock()
            self._control.send(session.leader.node_id, OrchestratorMessage(generate=request.generate))
            request.span.event("asked", {"motley.epoch": session.epoch, "motley.node": session.leader.node_name})
            self._involve(request, ended=False)

    def _involve(self, request: _Request, ended: bool) -> None:
        """Tell the ranks besides the leader that they begin to compute a request, or have ended with it."""
        for rank in request.session.ranks[1:]:
            told = Involved(name=request.name, session=request.session.id, rank=rank.index, ended=ended)
            self._control.send(rank.node_id, OrchestratorMessage(involved=told))

    def _of(self, session: Session) -> list[_Request]:
        return [request for request in self._requests.values() if request.session is session]

    def _break_off(self, request: _Request, failure: Failure) -> None:
        self._remove(request, Outcome.FAILED)
        request.put(Delta(request_id=request.id, finish="error", failure=failure))

    def forget(self, session: Session) -> None:
        """A session without requests is over."""
        self._places.pop(session.id, None)
        self._tallies.pop(session.id, None)
        for key in [each for each in self._by_adapter if each[0] == session.id]:
            del self._by_adapter[key]

    def tally(self, session: Session) -> Tally:
        """How the requests of a session have gone; it goes on counting."""
        return self._tallies.setdefault(session.id, Tally())

    def adapter_tally(self, session: Session, adapter: str) -> AdapterTally:
        """How the requests of a session have gone that have an adapter of this name; it goes on counting."""
        return self._by_adapter.setdefault((session.id, adapter), AdapterTally())

    def forget_adapter(self, session: Session, adapter: str) -> None:
        """No request may have an adapter of this name any more."""
        self._by_adapter.pop((session.id, adapter), None)

    def places(self, session: Session) -> Places:
        """How many requests a session takes, and has."""
        if session.id not in self._places:
            self._places[session.id] = Places(session.request.sequences + session.request.queue)
        return self._places[session.id]

    def _busy(self, session: Session, places: Places) -> BusyError:
        asked, wait = session.request, places.retry_after(self._clock())
        limits = f"{asked.sequences} under way and {asked.queue} that wait"
        full = ", as many as" if places.taken == places.number else f" of the {places.number} that"
        message = f"{session.name!r} has {counted(places.taken, 'request')}{full} its session takes ({limits})"
        return BusyError(f"{message}; try again in {counted(wait, 'second')}", wait)

    def _remove(self, request: _Request, outcome: Outcome) -> bool:
        """A request has ended, which frees its place; False: it had already."""
        if self._requests.pop(request.id, None) is None:
            return False
        request.tally.ended[outcome] += 1
        if request.beside is not None:
            request.beside.ended[outcome] += 1
        if request.asked:
            self._involve(request, ended=True)
        seconds, tokens = self._clock() - request.began, counted(len(request.generate.written), "token")
        request.span.set({"motley.outcome": str(outcome), "motley.tokens": len(request.generate.written)})
        request.span.end()
        _log.info("request %s: %s after %.3f s, %s", request.name, outcome, seconds, tokens, extra=request.about)
        self.places(request.session).leave(self._clock())
        return True

    def _go_on(self, request: _Request) -> None:
        """The client has taken deltas: a request that is held goes on once few are left."""
        if request.held and request.untaken < MOST_UNTAKEN // 4 and request.id in self._requests:
            self._hold(request, False)

    def _hold(self, request: _Request, held: bool) -> None:
        """Have the leader compute no more of an answer for now, or go on with it."""
        request.held = held
        message = OrchestratorMessage(hold=Hold(request_id=request.id, held=held))
        self._control.send(request.session.leader.node_id, message)


class Answers:
    """What comes of requests that were made together, to be taken in the order in which it comes: deltas, each with the
    number of the request that it is of. The last delta of each has ``finish`` "stop" or "length"."""

    def __init__(
        self,
        requests: Sequence[_Request],
        deltas: asyncio.Queue[_Told],
        clock: Callable[[], float],
        taken: Callable[[_Request], None],
        before: Sequence[tuple[int, Delta]],
    ) -> None:
        """
        Args:
            deltas: of all of them.
            taken: called when a delta of a request has been taken.
            before: deltas, with the numbers of their requests, that were told another time and come first now.
        """
        self.used = Used(requests=len(requests) - len({number for number, delta in before if delta.finish}))
        """What the requests have taken this time, as far as that was told."""
        self._before = len(before)
        self._written = Counter[int]()
        """Tokens that were told, by the number of their request."""
        self._waited_for = list(requests)
        """Those whose last delta has not been taken."""
        self._deltas = deltas
        self._clock = clock
        self._taken = taken

    @property
    def ended(self) -> bool:
        """Whether the last delta of each has been taken."""
        return not self._waited_for

    @property
    def waiting(self) -> bool:
        """Whether the next delta is there to be taken."""
        return not self._deltas.empty()

    async def next(self, within_s: float) -> tuple[int, Delta] | None:
        """The next delta, and which request it is of; None: there is none within so many seconds.

        Raises:
            AnswerError: an answer breaks off.
            ServingError: the leader is silent about one.
        """
        until = self._clock() + within_s
        while True:
            try:
                request, delta = await self._take(min(LOOK_S, max(0.0, until - self._clock())))
                break
            except TimeoutError:
                now = self._clock()
            for request in self._waited_for:
                if request.asked and now - request.heard >= ANSWER_S:  # else requests that came before may keep it busy
                    why = f"{request.session.leader} has said nothing of this request for {now - request.heard:.0f} s"
                    raise refusal("timed_out", why)
            if now >= until:
                return None
        self._taken(request)
        if delta.HasField("failure"):
            raise AnswerError(delta.failure, request.number)
        if delta.finish not in ("", "stop", "length"):
            raise refusal("cancelled", f"{request.session.leader} ended the request ({delta.finish})")
        self._count(request.number, delta)
        if delta.finish:
            self._waited_for.remove(request)
        return request.number, delta

    def _count(self, number: int, delta: Delta) -> None:
        """Count what a delta tells, unless it was told another time."""
        fresh = len(delta.ids)
        if delta.finish:
            fresh = max(0, delta.completion_tokens - self._written[number])
        self._written[number] += fresh
        if self._before:
            self._before -= 1
            return
        self.used.completion_tokens += fresh
        self.used.prompt_tokens += delta.prompt_tokens

    async def _take(self, within_s: float) -> tuple[_Request, Delta]:
        """The next delta.

        Raises:
            TimeoutError: there is none within so many seconds.
        """
        if self._deltas.empty():
            async with asyncio.timeout(within_s):
                request, delta, size = await self._deltas.get()
        else:
            request, delta, size = self._deltas.get_nowait()
        request.untaken -= size
        return request, delta
