"""Which expert host a trunk rank asks for what, and what it does when no answer comes: decisions only.

Nothing here touches a socket or a clock: events go in with the time they happened at, `Action`s come out.

The experts that a layer's rows have chosen are divided among the trunk ranks: rank ``(layer + expert) % size`` asks for
an expert, chooses the replica, and has the answer sent to all. Every rank waits for all of them, and helps itself::

    what happens                           what is done
    the host is lost, or answers garbage   its experts are asked for again elsewhere, at once; it is dropped
    it is late (`asked_host.PATIENCE`)     another replica is asked too, the first result counts; until it answers, the
                                           late host is asked for nothing that another has
    it is silent (`asked_host.SILENT_S`)   it is dropped
    another rank's experts do not come     this rank asks for them itself, for itself alone
    no replica can be reached              hosts are dialled again and a new placement is waited for: `STARVED_S`

Results have the same bits whoever computes them, so answers may come late, twice, early (another rank is ahead) or to
a question that somebody else asked: whichever comes first is taken. What was routed is part of a call's number: if
two ranks route a row differently (a tie within rounding, on unlike processors), each takes its own answers only.

Of an expert's replicas the one is asked that is expected to answer first. Those that are nearly as quick take turns,
and one that was slow once is tried again; so equal replicas have equal loads over time, and a far quicker one (on this
very machine, say) has nearly all until its queue is long.

Where an expert's rows are too many for a message, each piece of them is asked for by itself, as if it were an expert:
piece p of expert e has the number ``e + PIECE * p``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from motley.daemon.experts.asked_host import REDIAL_MAX_S, REDIAL_S, Asked, Host, patience_s
from motley.daemon.experts.keys import ExpertKey

PIECE = 1 << 16
"""What the numbers of an expert's pieces differ by; experts have lower numbers."""

RESEND_S = 0.1
"""Seconds that the results which another rank asks for may come later than those that this rank asks for."""
STARVED_S = 120.0
"""Seconds after an expert's first failure from which on nobody is asked for it; an answer under way may still come."""
NEARLY = 1.25
"""Hosts take turns that are expected to answer within so many times what the quickest takes."""

REPEATS = 4
"""A host may want a call so many times again for each expert of it."""
AHEAD = 4
"""Calls that another rank may be ahead of this one."""
EARLY = 1024
"""Results for later calls that are kept at most."""
_SEQUENCES = 1 << 32


class ExpertsMissing(Exception):
    """Experts that a step needs have no host that answers; the message names them and the hosts."""


class Ask(NamedTuple):
    """Send a host the rows of these experts of the current call."""

    host: int
    experts: tuple[int, ...]
    for_all: bool
    """Whether all trunk ranks get the answer, or this one alone."""


class Drop(NamedTuple):
    """End the link to a host."""

    host: int
    reason: str


class Dial(NamedTuple):
    """Try to reach a host; `connected` or `lost` follows."""

    host: int


class Starve(NamedTuple):
    """Tell that the step waits for an expert."""

    layer: int
    expert: int


Action: TypeAlias = Ask | Drop | Dial | Starve


@dataclass(eq=False)
class _Want:
    """An expert of the current call whose result is missing.

    Attributes:
        rows: that were sent to it.
        due: when this rank asks for it; later where it is another rank that asks on behalf of all.
        tried: hosts that owe it, or that have refused it.
        failed_at: when a host first failed it, or none was left to ask.
        told: whether `Starve` has told of it, for the present placement.
    """

    rows: int
    due: float
    tried: set[int] = field(default_factory=set)
    failed_at: float | None = None
    told: bool = False


@dataclass(eq=False)
class _Call:
    """The experts that one layer of one step needs.

    Attributes:
        number: the place among this session's calls, and in its lower 32 bits a digest of what was routed.
        rows: of each expert.
        wants: the experts whose results are missing.
        failed: hosts that failed it, and when they had been asked.
    """

    number: int
    layer: int
    rows: Mapping[int, int]
    wants: dict[int, _Want]
    failed: dict[int, float] = field(default_factory=dict)


class ExpertCalls:
    """One trunk rank's decisions about whom to ask for experts, call after call: there is one current call.

    Its methods are told what has happened, and when, and return what is to be done.

    Attributes:
        hosts: by number.
        results: of the current call so far, by expert; whatever was given to `answered`.
    """

    def __init__(self, rank: int, size: int) -> None:
        """`size`: trunk ranks, of which this is number `rank`; all of them make the same calls in the same order."""
        self.hosts: list[Host] = []
        self.results: dict[int, Any] = {}
        self._rank = rank
        self._size = size
        self._replicas: Mapping[ExpertKey, Sequence[int]] = {}
        self._sequence = 0
        self._call = _Call(0, 0, {}, {})
        self._early: dict[tuple[int, int], tuple[int, Any]] = {}
        self._clock = 0.0

    @property
    def number(self) -> int:
        """The number of the current call."""
        return self._call.number

    @property
    def due(self) -> float:
        """When `tick` has something to do; infinity: never, unless something else happens."""
        times = [host.redial_at for host in self.hosts]
        for host in self.hosts:
            for asked in host.asked:
                times += asked.late_at, asked.silent_at
        for expert, want in self._call.wants.items():
            if not want.tried and want.failed_at is None:
                times.append(want.due)
            if (gives_up := self._gives_up_at(expert, want)) is not None:
                times.append(gives_up)
        return min(times, default=math.inf)

    def is_early(self, number: int) -> bool:
        """Whether a call is one that this rank has not begun, and another may have."""
        return 0 < self._ahead(number) <= (AHEAD if self._size > 1 else 0)

    def is_mine(self, layer: int, expert: int) -> bool:
        """Whether it is this rank that asks for an expert on behalf of all."""
        return (layer + expert % PIECE) % self._size == self._rank

    # -- events -----------------------------------------------------------------------------------------------------

    def place(
        self, replicas: Mapping[ExpertKey, Sequence[int]], alive: Sequence[bool], moved: Collection[int], now: float
    ) -> list[Action]:
        """A placement is to be adopted.

        Args:
            replicas: the hosts of every expert.
            alive: of every host, whether it may be asked at all.
            moved: hosts that are new, or were started anew.
        """
        self._replicas = replicas
        self.hosts += [Host(asked_at=now) for _ in range(len(alive) - len(self.hosts))]
        actions: list[Action] = []
        for number, (host, lives) in enumerate(zip(self.hosts, alive, strict=True)):
            if (host.connected or host.dialled) and (not lives or number in moved):
                reason = "it has been started anew" if lives else "the orchestrator has given it up"
                actions += self._drop(number, reason, now)
            if not lives:
                host.barred, host.redial_at = True, math.inf
            elif number in moved:
                host.barred, host.redial_at, host.pause_s = False, now, REDIAL_S
        for expert, want in self._call.wants.items():  # who had refused it may have it now
            want.tried = {number for number in want.tried if self._owing(expert, [number])}
            want.told = False  # that was about the placement before
        return actions + self._ask_open(now) + self._dials(now)

    def connected(self, number: int, now: float) -> list[Action]:
        """A host is there."""
        host = self.hosts[number]
        host.connected, host.dialled, host.lost = True, False, ""
        return self._ask_open(now)

    def lost(self, number: int, reason: str, now: float) -> list[Action]:
        """The link to a host has ended, or could not be made."""
        self._count_wait(now)
        host = self.hosts[number]
        if not host.connected and not host.dialled:
            return []
        host.connected, host.dialled, host.lost = False, False, reason
        if not host.barred:
            host.redial_at = now + host.pause_s
            host.pause_s = min(2 * host.pause_s, REDIAL_MAX_S)
        owed, host.asked, host.queued = host.asked, [], 0
        if owed:
            host.owing_s += now - host.owing_since
        for asked in owed:
            self._failed(number, asked, now)
        for want in self._call.wants.values():
            want.tried.discard(number)
        return self._ask_open(now)

    def begin(self, layer: int, rows: Mapping[int, int], routing: int, now: float) -> list[Action]:
        """A call begins: each of these experts has so many rows. `routing`: 32 bits that say which rows these are."""
        assert not self._call.wants, "the call before has not ended"
        self._sequence = (self._sequence + 1) % _SEQUENCES
        self._clock = now
        self.results = {}
        call = self._call = _Call(self._sequence << 32 | routing, layer, rows, {})
        for expert, count in rows.items():
            held = self._early.pop((call.number, expert), None)
            if held is not None and held[0] == count:
                self.results[expert] = held[1]
            else:
                call.wants[expert] = _Want(count, now)
        self._early = {key: held for key, held in self._early.items() if self._ahead(key[0]) > 0}
        if self._size > 1:
            total = sum(rows.values())
            others = patience_s(max((host.patient_s(total) for host in self.hosts), default=0.0)) + RESEND_S
            for expert, want in call.wants.items():
                if not self.is_mine(self._call.layer, expert):
                    want.due = now + others
        return self._ask_open(now)

    def answered(
        self, number: int, call: int, layer: int, parts: Sequence[tuple[int, int, Any]], busy_s: float, now: float
    ) -> list[Action]:
        """A host answers.

        Args:
            number: of the host.
            call: the number of the call that it answers.
            parts: experts, each with its number of rows and its result.
            busy_s: how long the host says that it has computed.
        """
        self._count_wait(now)
        host = self.hosts[number]
        if not host.connected:
            return []
        current, is_early, ahead = self._call, self.is_early(call), self._ahead(call)
        if (ahead > 0 and not is_early) or (self._size == 1 and ahead == 0 and call != current.number):
            return self.garbage(number, f"it answers call {call:#x}, which has not been made", now)
        if call == current.number:
            if layer != current.layer or any(current.rows.get(expert) != rows for expert, rows, _ in parts):
                return self.garbage(number, f"it answers other rows than it was sent for layer {current.layer}", now)
            for expert, _, result in parts:
                if current.wants.pop(expert, None) is not None:
                    self.results[expert] = result
            if not current.wants:
                for failed, since in current.failed.items():
                    self.hosts[failed].stalls_s.append(now - since)
                current.failed.clear()
        elif is_early:
            for expert, rows, result in parts:
                if len(self._early) < EARLY:
                    self._early[call, expert] = rows, result
        self._settle(host, call, parts, busy_s, now)
        return []

    def refused(self, number: int, call: int, now: float) -> list[Action]:
        """A host does not have what it was asked for in call `call`."""
        self._count_wait(now)
        host = self.hosts[number]
        asked = next((asked for asked in host.asked if asked.number == call), None)
        if asked is None:
            return []
        self._end(host, asked, now)
        self._failed(number, asked, now)
        return self._ask_open(now)

    def repeated(self, number: int, call: int, now: float) -> list[Action]:
        """A host that owes an answer to call `call` was sent some of it again, with what it lacked: patience with it
        begins anew, but not for ever."""
        for asked in self.hosts[number].asked:
            if asked.number == call:
                asked.sent_at = asked.heard_at = now
                asked.repeats += 1
                if asked.repeats > REPEATS * len(asked.missing):
                    return self._drop(number, "it lacks again and again what it was sent", now)
        return []

    def garbage(self, number: int, reason: str, now: float) -> list[Action]:
        """A host has said what is wrong: it is not asked again until it has been started anew."""
        if not self.hosts[number].connected:
            return []
        self.hosts[number].barred = True
        return self._drop(number, reason, now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed.

        Raises:
            ExpertsMissing: the current call has waited for experts as long as it may.
        """
        self._count_wait(now)
        actions: list[Action] = []
        for number, host in enumerate(self.hosts):
            for asked in host.asked:
                if now >= asked.late_at:
                    asked.late = True
                    self._failed(number, asked, now)
            if any(now >= asked.silent_at for asked in host.asked):
                oldest = host.asked[0].heard_at
                actions += self._drop(number, f"it has owed an answer for {now - oldest:.1f} s in silence", now)
        actions += self._ask_open(now)
        given_up = [expert for expert, want in self._call.wants.items() if self._given_up(expert, want, now)]
        if given_up:
            raise ExpertsMissing(self._obituary(given_up))
        return actions + self._dials(now)

    # -- decisions --------------------------------------------------------------------------------------------------

    def _ask_open(self, now: float) -> list[Action]:
        """Ask for all that is due and that nobody owes who is not late, where a replica is left to try.

        Each expert is asked of the replica that is expected to answer first.
        """
        groups: dict[tuple[int, bool], list[int]] = {}
        actions: list[Action] = []
        for expert, want in self._call.wants.items():
            owing = self._owing(expert, want.tried)
            if now < want.due or not all(asked.late for asked in owing):
                continue
            if want.failed_at is not None and now >= want.failed_at + STARVED_S:
                continue
            number = self._choice(expert, want, now)
            if number is not None:
                groups.setdefault((number, self.is_mine(self._call.layer, expert)), []).append(expert)
                self.hosts[number].queued += want.rows
                want.tried.add(number)
            elif not owing:
                want.failed_at = now if want.failed_at is None else want.failed_at
                if not want.told:
                    want.told = True
                    actions.append(Starve(self._call.layer, expert % PIECE))
        for (number, for_all), experts in groups.items():
            self._note(number, experts, now)
            actions.append(Ask(number, tuple(experts), for_all))
        return actions

    def _choice(self, expert: int, want: _Want, now: float) -> int | None:
        """The connected replica, not tried yet, that is expected to answer first. Of those that are nearly as quick, it
        is who owes least, then whose turn it is."""
        replicas = [
            number
            for number in self._replicas.get((self._call.layer, expert % PIECE), ())
            if self.hosts[number].connected and number not in want.tried
        ]
        if len(replicas) < 2:
            return replicas[0] if replicas else None
        hosts = self.hosts
        expected = [(hosts[number].suspect, hosts[number].faded_s(want.rows, now), number) for number in replicas]
        suspect, shortest, _ = min(expected)
        near = [number for late, seconds, number in expected if late == suspect and seconds <= NEARLY * shortest]
        return min(near, key=lambda number: (hosts[number].queued, hosts[number].asked_at, hosts[number].rows, number))

    def _note(self, number: int, experts: Sequence[int], now: float) -> None:
        """Remember that a host is being asked for experts."""
        host = self.hosts[number]
        rows = sum(self._call.wants[expert].rows for expert in experts)
        if not host.asked:
            host.owing_since = now
        idle_s, host.asked_at = now - host.asked_at, now
        host.asked.append(Asked(self._call.number, set(experts), rows, now, now, host.patient_s(0), idle_s))

    def _drop(self, number: int, reason: str, now: float) -> list[Action]:
        return [Drop(number, reason), *self.lost(number, reason, now)]

    def _dials(self, now: float) -> list[Action]:
        """The hosts that are to be dialled now."""
        actions: list[Action] = []
        for number, host in enumerate(self.hosts):
            if now >= host.redial_at:
                host.redial_at, host.dialled = math.inf, True
                actions.append(Dial(number))
        return actions

    def _failed(self, number: int, asked: Asked, now: float) -> None:
        """A host has not answered in time, or never will."""
        if asked.number == self._call.number:
            wants = [self._call.wants[expert] for expert in asked.missing if expert in self._call.wants]
            for want in wants:
                want.failed_at = now if want.failed_at is None else want.failed_at
            if wants:
                self._call.failed.setdefault(number, asked.sent_at)

    def _settle(self, host: Host, call: int, parts: Sequence[tuple[int, int, Any]], busy_s: float, now: float) -> None:
        """What the host owes is less by an answer."""
        answered = {expert for expert, _, _ in parts}
        for place, asked in enumerate(host.asked):
            if asked.number == call and asked.missing & answered:
                asked.missing -= answered
                asked.busy_s += busy_s
                for later in host.asked[place:]:
                    later.heard_at = now
                if not asked.missing:
                    self._end(host, asked, now)
                    host.calls += 1
                    host.rows += asked.rows
                    host.computed_s += asked.busy_s
                    host.measure(asked, now)
                    host.pause_s = REDIAL_S
                return

    def _end(self, host: Host, asked: Asked, now: float) -> None:
        host.asked.remove(asked)
        host.queued -= asked.rows
        if not host.asked:
            host.owing_s += now - host.owing_since

    def _count_wait(self, now: float) -> None:
        """Time has passed in which this rank waited, if it did."""
        if self._call.wants:
            owing = [host for host in self.hosts if any(asked.number == self._call.number for asked in host.asked)]
            for host in owing:
                host.waited_s += (now - self._clock) / len(owing)
        self._clock = now

    def _owing(self, expert: int, numbers: Iterable[int]) -> list[Asked]:
        """The questions about an expert of the current call that these hosts have not answered."""
        return [
            asked
            for number in numbers
            for asked in self.hosts[number].asked
            if asked.number == self._call.number and expert in asked.missing
        ]

    def _gives_up_at(self, expert: int, want: _Want) -> float | None:
        """When the call fails unless an expert comes; None: there is hope."""
        if want.failed_at is None:
            return None
        hopes = [asked.late_at for asked in self._owing(expert, want.tried) if not asked.late]
        return max([want.failed_at + STARVED_S, *hopes])

    def _given_up(self, expert: int, want: _Want, now: float) -> bool:
        gives_up = self._gives_up_at(expert, want)
        return gives_up is not None and now >= gives_up

    def _obituary(self, experts: Iterable[int]) -> str:
        """Say which experts are missing, and what became of each of their hosts."""
        layer = self._call.layer
        said = []
        for expert in sorted({part % PIECE for part in experts}):
            hosts = [
                f"host {number}: {self.hosts[number].lost or 'it does not answer'}"
                for number in self._replicas.get((layer, expert), ())
            ]
            said.append(f"layer {layer} expert {expert} ({'; '.join(hosts) or 'no host has it'})")
        return f"waited {STARVED_S:.0f} s for experts that no host answers for: {', '.join(said)}"

    def _ahead(self, number: int) -> int:
        """How many calls after the current one this one is."""
        half = _SEQUENCES // 2
        return ((number >> 32) - self._sequence + half) % _SEQUENCES - half
