"""A training as a job of the mesh. Pure: what happens comes in, and what daemons are to be told comes out.

Member 0 leads, on the node of whoever has the data; the others train. In mode ``merge`` members are on their own: one
that dies is started again, goes on from its disk, and is left out where that does not help. In mode ``chain`` they are
one training: when a member dies, all begin anew, from the leader's last checkpoint, on the nodes that are left.

==========  =============================================================
state       meaning
==========  =============================================================
running     workers are started, wait for their device, or train
done        the leader has written the adapter
failed      it cannot go on; `why` says why
stopped     somebody has ended it
==========  =============================================================
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import Any, NamedTuple

from motley.protocol import LEADER
from motley.protocol.mesh_pb2 import Credentials, Empty, JobEvent, JobOrder, JobPeer, JobPeers, JobProgress, JobStart

START_S = 3600.0
"""A worker has so long to listen: it may have to fetch the model first."""
WAIT_S = 6 * 3600.0
"""A member waits for its device so long at most."""
DEATHS = 3
"""A worker that has died so often is not started again."""
POINTS = 128
"""Of a member's curve so many points are kept; of a longer one every second, fourth and so on."""
LINES, LINE = 200, 500
"""Of a job's log so many lines are kept, the latest ones, and so many characters of each."""
LEAST = 2
"""Members of a job: the leader, and one that trains."""
EPOCHS = 32
"""A chain that has begun so often does not begin again."""
BROKEN_S = 5.0
"""After a chain broke, it begins anew so much later, unless whoever broke it was told of before."""


class Mode(StrEnum):
    """How several nodes train together."""

    MERGE = "merge"
    """Each alone on a part of the data; their adapters are merged once."""
    CHAIN = "chain"
    """Each has some of the model's layers."""


class State(StrEnum):
    """See the table above."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


class Step(StrEnum):
    """How far a member is."""

    STARTING = "starting"
    WAITING = "waiting"
    """For its device."""
    THERE = "there"
    """It can be reached, or trains."""
    AWAY = "away"
    """Its node is not in the mesh."""
    DONE = "done"
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class Request:
    """What somebody asks for.

    Attributes:
        name: for people.
        owner: the node that has the data, by name; it leads.
        nodes: that are to train, by name.
        ticket: names the file by which somebody on the owner's machine has asked for it.
        others: of a chain: who else has data for it, the tickets by the nodes' names.
        serve: the adapter's name in the running session of the model, once it is done; empty: it is not served.
        patience_s: a node that is away for so long is left out.
        by: who has asked.
    """

    name: str
    model: str
    mode: Mode
    owner: str
    nodes: tuple[str, ...]
    ticket: str
    serve: str = ""
    patience_s: float = 300.0
    by: str = ""
    others: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """What a node gives to a training.

    Attributes:
        memory_bytes: that ranks and trainings may use there.
        speed: how fast it computes, in a unit that is the same for all nodes.
    """

    memory_bytes: int
    speed: float


@dataclass
class Member:
    """A worker of a job.

    Attributes:
        node: where it is, by name.
        since: when `step` began, by the table's clock.
        address: ``host:port`` of its data plane; empty: it has not told.
        why: it waits, or is left out.
        deaths: how often its process has ended without a word.
        latest: what it has told of its progress last, see `point`.
        curve: steps with their losses, as `latest` has them; thinned out as it grows.
    """

    node: str
    step: Step = Step.STARTING
    since: float = 0.0
    address: str = ""
    why: str = ""
    deaths: int = 0
    latest: dict[str, float] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)
    stride: int = 1
    """Of the points that came, every so many-th is in the curve."""
    heard: int = 0
    """Points that came."""

    @property
    def over(self) -> bool:
        """Whether nothing more is expected of it."""
        return self.step in (Step.DONE, Step.LEFT_OUT)

    def hear(self, progress: JobProgress) -> None:
        """Note a point."""
        told = point(progress)
        peak = max(self.latest.get("peak_bytes", 0.0), told["peak_bytes"])
        self.latest = self.latest | told | {"peak_bytes": peak}
        if "loss" not in told and "held_out" not in told:
            return
        while self.curve and self.curve[-1]["step"] >= told["step"]:
            self.curve.pop()  # it died, and has gone back to its checkpoint
        if self.heard % self.stride == 0 or "held_out" in told:
            self.curve.append({name: told[name] for name in ("step", "loss", "held_out") if name in told})
        self.heard += 1
        if len(self.curve) > POINTS:
            self.curve, self.stride = self.curve[::2], self.stride * 2


def point(progress: JobProgress) -> dict[str, float]:
    """A worker's progress as the API tells it; losses that it does not tell, or that are no numbers, are left out."""
    told = {"step": progress.step, "steps": progress.steps, "rate": progress.rate}
    told |= {"tokens_per_s": progress.tokens_per_s, "peak_bytes": progress.peak_bytes}
    losses = {name: getattr(progress, name) for name in ("loss", "held_out") if progress.HasField(name)}
    whole = {name: value if isfinite(value) else 0.0 for name, value in told.items()}
    return whole | {name: value for name, value in losses.items() if isfinite(value)}


class Order(NamedTuple):
    """What a node's daemon is to be told."""

    node: str
    order: JobOrder


@dataclass(frozen=True)
class Papers:
    """What members prove to each other, in one epoch: a secret, and a certificate for each."""

    secret: bytes
    credentials: Sequence[Credentials]


Issue = Callable[[str, int], Papers]
"""Makes new papers, for a session's name and a number of members."""


@dataclass
class Job:
    """One training. Its methods return what daemons are to be told."""

    id: str
    request: Request
    created: float
    """Unix time."""
    places: Mapping[str, Place]
    """By node's name."""
    issue: Issue
    state: State = State.RUNNING
    why: str = ""
    epoch: int = 0
    members: list[Member] = field(default_factory=list)
    given_up: dict[str, str] = field(default_factory=dict)
    """Nodes that are left out for good, and why."""
    away: set[str] = field(default_factory=set)
    """Nodes that are not in the mesh now."""
    told_in: int = 0
    """The latest epoch in which the leader was told where the others are."""
    broken: float | None = None
    """When its chain broke, by the table's clock; None: it has not, in this epoch."""
    log: list[str] = field(default_factory=list)
    said: int = 0
    """Lines that the log has had, of which it keeps the latest."""
    result: dict[str, Any] = field(default_factory=dict)
    """What the leader has told at the end."""
    ended: float = 0.0
    """Unix time; 0: it has not."""
    served_as: str = ""
    """The name under which the adapter is served; empty: it is not."""
    unserved: str = ""
    """Why it is not, although that was asked for; empty: it is, or that is not known yet."""
    _papers: Papers | None = None

    @property
    def runs(self) -> bool:
        return self.state is State.RUNNING

    @property
    def is_to_be_served(self) -> bool:
        """Whether the adapter is still to be served, or it is not known yet what has become of that."""
        return self.state is State.DONE and bool(self.request.serve) and not (self.served_as or self.unserved)

    @property
    def nodes(self) -> set[str]:
        """All nodes that may have files of it."""
        return {self.request.owner, *self.request.others, *self.request.nodes}

    def say(self, line: str) -> None:
        """Add a line to the log."""
        self.log = [*self.log, line[:LINE]][-LINES:]
        self.said += 1

    def begin(self, now: float) -> list[Order]:
        """Start all workers in a new epoch; those of the one before end by that."""
        if self.epoch >= EPOCHS:
            return self._end(State.FAILED, f"it has begun {EPOCHS} times", now)
        orders = [self._order(each.node, number, end=Empty()) for number, each in enumerate(self.members)]
        before = {(number == LEADER, each.node): each for number, each in enumerate(self.members)}
        self.members, self.broken = [], None
        for number, node in enumerate([self.request.owner, *self._trainers()]):
            step = Step.LEFT_OUT if node in self.given_up else Step.AWAY if node in self.away else Step.STARTING
            member = Member(node, step, now, why=self.given_up.get(node, ""))
            if old := before.get((number == LEADER, node)):
                member.deaths, member.latest, member.curve = old.deaths, old.latest, old.curve
            self.members.append(member)
        self.epoch += 1
        self._papers = self.issue(session_name(self.id, self.epoch), len(self.members))
        starting = [number for number, each in enumerate(self.members) if each.step is Step.STARTING]
        return orders + [self._start(number) for number in starting]

    def stop(self, now: float) -> list[Order]:
        """End it as somebody wants."""
        return self._end(State.STOPPED, "it was stopped", now)

    def on_event(self, node: str, event: JobEvent, now: float) -> list[Order]:
        """A node tells of a worker. What is said of an epoch before is ignored."""
        number = event.member
        if not self.runs or event.epoch != self.epoch or number >= len(self.members):
            return []
        member = self.members[number]
        if member.node != node or member.over:
            return []
        match event.WhichOneof("body"):
            case "waits":
                if member.why != event.waits:
                    self.say(f"{node} waits: {event.waits}")
                was = member.step
                if was is not Step.WAITING:
                    member.step, member.since = Step.WAITING, now
                member.why = event.waits
                if was is Step.THERE:  # its device was taken, and its process is no more
                    member.address = ""
                    return self._tell_peers()
            case "listening":
                member.step, member.since, member.address, member.why = Step.THERE, now, event.listening, ""
                return self._tell_peers()
            case "progress":
                member.hear(event.progress)
            case "says":
                self.say(f"{node}: {event.says}" if number else event.says)
            case "failed":
                return self._give_up(number, event.failed, now)
            case "died":
                member.deaths += 1
                self.say(f"{node}: {event.died}")
                if member.deaths >= DEATHS:
                    return self._give_up(number, f"its worker has died {DEATHS} times: {event.died}", now)
                return self._again(number, now)
            case "broke":
                self.say(f"{node}: {event.broke}")
                self.broken = now if self.broken is None else self.broken
            case "done":
                member.step, member.since = Step.DONE, now
                if number == LEADER:
                    self.result = _result(event.done)
                    return self._end(State.DONE, "", now)
        return []

    def on_node_back(self, node: str, held: Iterable[JobEvent], now: float) -> list[Order]:
        """A node has joined.

        Args:
            held: of its workers of this job, how each stands.
        """
        self.away.discard(node)
        if not self.runs:
            return [Order(node, JobOrder(job=self.id, forget=Empty()))]
        orders: list[Order] = []
        live = {number for number, each in enumerate(self.members) if each.node == node and not each.over}
        there: dict[int, JobEvent] = {}
        for event in held:
            if event.epoch == self.epoch and event.member in live:
                there[event.member] = event
            else:  # it was left out, or another epoch began, while nobody could tell it
                end = JobOrder(job=self.id, epoch=event.epoch, member=event.member, end=Empty())
                orders.append(Order(node, end))
        for number, member in enumerate(self.members):
            if member.node != node or member.over:
                continue
            if number in there:
                member.step, member.since = Step.THERE, now
                orders += self.on_event(node, there[number], now)
            elif self.runs:
                self.say(f"{node} is back; its worker begins again from its disk")
                orders += self._again(number, now)
        return orders

    def on_node_lost(self, node: str, why: str, now: float) -> list[Order]:
        """A node is gone: its worker may go on, and the node come back."""
        self.away.add(node)
        for member in self.members if self.runs else ():
            if member.node == node and not member.over and member.step is not Step.AWAY:
                member.step, member.since, member.why = Step.AWAY, now, why
                self.say(f"{node} {why}; it is waited for")
        return []

    def on_time(self, now: float) -> list[Order]:
        """Let deadlines pass."""
        if self.runs and self.broken is not None and now - self.broken > BROKEN_S:
            return self.begin(now)
        limits = {Step.AWAY: self.request.patience_s, Step.STARTING: START_S, Step.WAITING: WAIT_S}
        for number, member in enumerate(self.members if self.runs else ()):
            limit = limits.get(member.step)
            if limit is not None and now - member.since > limit:
                words = {Step.AWAY: "is away", Step.STARTING: "has not begun", Step.WAITING: f"waits ({member.why})"}
                return self._give_up(number, f"it {words[member.step]} for {limit:.0f} s", now)
        return []

    def _trainers(self) -> list[str]:
        """The nodes that train in the epoch to come: of a chain, those that are there, or else may come back; first
        those that have data."""
        request = self.request
        if request.mode is Mode.MERGE:
            return list(request.nodes)
        wanted = dict.fromkeys((*request.others, *request.nodes))
        able = [node for node in wanted if node not in self.given_up and node != request.owner]
        return [node for node in able if node not in self.away] or able

    def _again(self, number: int, now: float) -> list[Order]:
        """Have a worker begin again: alone, or in a chain with all others."""
        if self.request.mode is Mode.CHAIN or self._papers is None:  # none: this orchestrator was started since
            return self.begin(now)
        member = self.members[number]
        member.step, member.since, member.address, member.why = Step.STARTING, now, "", ""
        return [self._start(number), *self._tell_peers()]

    def _give_up(self, number: int, why: str, now: float) -> list[Order]:
        """Do without a member, if that goes."""
        member = self.members[number]
        if number == LEADER:
            return self._end(State.FAILED, f"{member.node}: {why}", now)
        member.step, member.since, member.why = Step.LEFT_OUT, now, why
        self.given_up[member.node] = why
        self.say(f"{member.node} is left out: {why}")
        if sum(each.step is not Step.LEFT_OUT for each in self.members) < LEAST:
            every = "; ".join(f"{node}: {each}" for node, each in self.given_up.items())
            return self._end(State.FAILED, f"no node is left to train: {every}", now)
        if self.request.mode is Mode.CHAIN:
            return self.begin(now)
        return [self._order(member.node, number, end=Empty()), *self._tell_peers()]

    def _end(self, state: State, why: str, now: float) -> list[Order]:
        self.state, self.why = state, why
        self.say(f"{state}: {why}" if why else str(state))
        for member in self.members:
            if state is State.DONE and member.step is Step.THERE:
                member.step = Step.DONE
        return [Order(node, JobOrder(job=self.id, forget=Empty())) for node in sorted(self.nodes)]

    def _tell_peers(self) -> list[Order]:
        """Tell the leader where the others are: once it and each of them is there or given up, and from then on
        whenever that changes. In a chain, tell all, and only when all are there."""
        chained = self.request.mode is Mode.CHAIN
        late = {Step.STARTING, Step.WAITING} | ({Step.AWAY} if chained else set())
        held_back = chained or self.told_in != self.epoch
        if held_back and any(each.step in late and (chained or not each.deaths) for each in self.members):
            return []
        if self.members[LEADER].step is not Step.THERE:
            return []
        self.told_in = self.epoch
        nowhere = Place(0, 0.0)
        peers = [
            JobPeer(
                member=number,
                node=each.node,
                address="" if each.over else each.address,
                left_out=each.why or "left out" if each.step is Step.LEFT_OUT else "",
                memory_bytes=self.places.get(each.node, nowhere).memory_bytes,
                speed=self.places.get(each.node, nowhere).speed,
                owns=number != LEADER and each.node in self.request.others,
            )
            for number, each in enumerate(self.members)
            if chained or number != LEADER
        ]
        told = range(len(self.members)) if chained else [LEADER]
        return [self._order(self.members[number].node, number, peers=JobPeers(peers=peers)) for number in told]

    def _start(self, number: int) -> Order:
        assert self._papers is not None, "an epoch has papers"
        start = JobStart(
            name=self.request.name,
            mode=self.request.mode,
            model=self.request.model,
            members=len(self.members),
            secret=self._papers.secret,
            tls=self._papers.credentials[number],
            ticket=self._ticket(number),
            computes=number != LEADER or self.request.mode is Mode.CHAIN,
        )
        return self._order(self.members[number].node, number, start=start)

    def _ticket(self, number: int) -> str:
        return self.request.ticket if number == LEADER else self.request.others.get(self.members[number].node, "")

    def _order(self, node: str, number: int, **body: Any) -> Order:
        return Order(node, JobOrder(job=self.id, epoch=self.epoch, member=number, **body))


def _result(told: str) -> dict[str, Any]:
    """What a leader tells at the end; nothing, if that is no JSON object, or has a number that JSON cannot write."""
    try:
        result = json.loads(told)
        json.dumps(result, allow_nan=False)
    except (ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}


def session_name(job: str, epoch: int) -> str:
    """What the certificates of a job's members are for."""
    return f"job-{job}-{epoch}"
