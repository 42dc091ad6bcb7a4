"""Decisions about experts elsewhere, in simulated time: whatever hosts do, ranks end with all results or an error.

`Mesh` is trunk ranks, each with an `ExpertCalls`, and hosts that answer, die, hang, dawdle, repeat themselves, talk
nonsense and come back. Its clock jumps from event to event. All tests are of the one state machine that `ExpertCalls`
is, so they are in one file, though it is long.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.experts import asked_host
from motley.daemon.experts.asked_host import PATIENCE_S, SILENT_S
from motley.daemon.experts.calls import (
    PIECE,
    REPEATS,
    RESEND_S,
    STARVED_S,
    Action,
    Ask,
    Dial,
    Drop,
    ExpertCalls,
    ExpertsMissing,
    Starve,
)

LATENCY_S = 0.001
ROW_S = 0.002

Replicas = dict[tuple[int, int], list[int]]


@dataclass
class SimulatedHost:
    """A host by its faults; `habit` is about every answer, times are when it changes for good or comes back."""

    habit: str = "good"
    dies_at: float | None = None
    """Its links end at once."""
    hangs_at: float | None = None
    """It says nothing any more, and nobody is told."""
    returns_at: float | None = None
    speed: float = 1.0
    free_at: float = 0.0
    generation: int = 0

    def is_up(self, now: float) -> bool:
        back = self.returns_at is not None and now >= self.returns_at
        return back or ((self.dies_at is None or now < self.dies_at) and not self.hangs(now))

    def hangs(self, now: float) -> bool:
        back = self.returns_at is not None and now >= self.returns_at
        return not back and self.hangs_at is not None and now >= self.hangs_at


def truth(layer: int, expert: int, rows: int) -> tuple[int, int, int]:
    return layer, expert, rows


@dataclass
class Step:
    layer: int
    rows: dict[int, int]


@dataclass
class Rank:
    core: ExpertCalls
    linked: dict[int, int] = field(default_factory=dict)
    """The generation of the link to each host that this rank has."""
    steps_done: int = 0
    results: list[dict[int, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: ExpertsMissing | None = None
    asks: list[Ask] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    starved: list[Starve] = field(default_factory=list)
    began: float = 0.0
    in_call: bool = False


class Mesh:
    def __init__(
        self,
        size: int,
        hosts: Sequence[SimulatedHost],
        replicas: Replicas,
        steps: Sequence[Step],
        *,
        seed: int = 0,
        ahead: int = 1,
        known: int | None = None,
    ) -> None:
        """
        Args:
            ahead: by how many calls a rank may be before another.
            known: hosts that are there from the beginning; None: all.
        """
        self.hosts = hosts
        self.replicas = replicas
        self.steps = steps
        self.random = Random(seed)
        self.ahead = ahead
        self.now = 0.0
        self.ranks = [Rank(ExpertCalls(rank, size)) for rank in range(size)]
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        for host in hosts:
            if host.dies_at is not None:
                self.at(host.dies_at, lambda host=host: self._die(host))
        known = len(hosts) if known is None else known
        first = {expert: [host for host in own if host < known] for expert, own in replicas.items()}
        for rank in self.ranks:
            self.do(rank, rank.core.place(first, [True] * known, range(known), 0.0))

    def tell(self, rank: Rank) -> None:
        """A rank hears of all hosts."""
        joined = range(len(rank.core.hosts), len(self.hosts))
        self.do(rank, rank.core.place(self.replicas, [True] * len(self.hosts), joined, self.now))

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def run(self, until: float = 2000.0) -> None:
        """Let every rank make all its calls, or fail."""
        for rank in self.ranks:
            self.at(0.01, lambda rank=rank: self._go_on(rank))
        while not all(rank.error or rank.steps_done == len(self.steps) for rank in self.ranks):
            due = min((rank.core.due for rank in self.ranks if rank.error is None), default=until)
            if self._events and self._events[0][0] <= due:
                self.now, _, event = heapq.heappop(self._events)
                event()
            else:
                assert due < until, f"nothing ends these calls: {[rank.core.results for rank in self.ranks]}"
                self.now = max(self.now, due)
                for rank in self.ranks:
                    if rank.error is None and rank.core.due <= self.now:
                        self._tick(rank)

    def _tick(self, rank: Rank) -> None:
        before = rank.core.due
        try:
            self.do(rank, rank.core.tick(self.now))
        except ExpertsMissing as error:
            rank.error = error
            return
        assert rank.core.due > before, "a tick that leaves the same to do"
        self._finished(rank)

    def _go_on(self, rank: Rank) -> None:
        """Begin the next call, when no other rank is too far behind."""
        if rank.in_call or rank.error or rank.steps_done == len(self.steps):
            return
        if any(not other.error and rank.steps_done - other.steps_done >= self.ahead for other in self.ranks):
            return
        step = self.steps[rank.steps_done]
        rank.in_call, rank.began = True, self.now
        self.do(rank, rank.core.begin(step.layer, step.rows, 0, self.now))
        self._finished(rank)

    def _finished(self, rank: Rank) -> None:
        if rank.in_call and rank.core.results.keys() == self.steps[rank.steps_done].rows.keys():
            rank.in_call = False
            rank.results.append(dict(rank.core.results))
            rank.times.append(self.now - rank.began)
            rank.steps_done += 1
            for other in self.ranks:
                self.at(self.now + self.random.uniform(0, 0.005), lambda other=other: self._go_on(other))

    def do(self, rank: Rank, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Ask(host, experts, for_all):
                    step = self.steps[rank.steps_done]
                    assert host in rank.linked, "asked of a host that is not connected"
                    assert all(host in self.replicas.get((step.layer, expert), ()) for expert in experts)
                    assert all(rank.core.is_mine(step.layer, expert) == for_all for expert in experts)
                    rank.asks.append(action)
                    self._ask(rank, action, step)
                case Drop(host):
                    rank.linked.pop(host, None)
                    rank.drops.append(action)
                case Dial(host):
                    self.at(self.now + LATENCY_S, lambda host=host: self._dialled(rank, host))
                case Starve():
                    rank.starved.append(action)

    def _dialled(self, rank: Rank, number: int) -> None:
        host = self.hosts[number]
        if host.is_up(self.now):
            rank.linked[number] = host.generation
            self.do(rank, rank.core.connected(number, self.now))
        elif host.hangs(self.now):
            self.at(self.now + 10, lambda: self.do(rank, rank.core.lost(number, "no answer", self.now)))
        else:
            self.do(rank, rank.core.lost(number, "refused", self.now))
        self._finished(rank)

    def _die(self, host: SimulatedHost) -> None:
        number = self.hosts.index(host)
        host.generation += 1
        for rank in self.ranks:
            self.at(self.now + self.random.uniform(0, 0.002), lambda rank=rank: self._reset(rank, number))

    def _reset(self, rank: Rank, number: int) -> None:
        if rank.linked.get(number, self.hosts[number].generation) < self.hosts[number].generation:
            del rank.linked[number]
            self.do(rank, rank.core.lost(number, "reset", self.now))

    def _ask(self, rank: Rank, ask: Ask, step: Step) -> None:
        """The host gets to it after what it has to do, and tells everybody who shall know."""
        host = self.hosts[ask.host]
        call, generation = rank.core.number, rank.linked[ask.host]
        parts = [(expert, step.rows[expert]) for expert in ask.experts]
        busy = sum(rows for _, rows in parts) * ROW_S * host.speed
        host.free_at = max(host.free_at, self.now + LATENCY_S) + busy
        ready = host.free_at
        if host.habit == "late" and self.random.random() < 0.3:
            ready += self.random.uniform(0.2, 3.0)
        to = self.ranks if ask.for_all else [rank]

        def answer() -> None:
            if host.is_up(self.now) and host.generation == generation:
                for other in to:
                    delay = LATENCY_S * self.random.uniform(0.5, 1.5)
                    self.at(
                        self.now + delay, lambda other=other: self._answer(other, ask.host, call, step, parts, busy)
                    )

        self.at(ready, answer)
        if host.habit == "twice":
            self.at(ready + self.random.uniform(0, 0.5), answer)

    def _answer(
        self, rank: Rank, number: int, call: int, step: Step, parts: Sequence[tuple[int, int]], busy: float
    ) -> None:
        if rank.linked.get(number) != self.hosts[number].generation or rank.error:
            return
        answered = [(expert, rows, truth(step.layer, expert, rows)) for expert, rows in parts]
        layer = step.layer
        pieces = [answered]
        match self.hosts[number].habit:
            case "pieces":
                pieces = [[part] for part in answered]
            case "garbage":
                match self.random.randrange(4):
                    case 0:
                        self.do(rank, rank.core.garbage(number, "cannot be read", self.now))
                        self._finished(rank)
                        return
                    case 1:
                        pieces = [[(expert, rows + 1, "wrong") for expert, rows, _ in answered]]
                    case 2:
                        pieces = [[(expert + 100, rows, "wrong") for expert, rows, _ in answered]]
                    case 3:
                        call += 1 << 40
                        pieces = [[(expert, rows, "wrong") for expert, rows, _ in answered]]
            case "forgetful":
                self.do(rank, rank.core.refused(number, call, self.now))
                self._finished(rank)
                return
        for piece in pieces:
            self.do(rank, rank.core.answered(number, call, layer, piece, busy / len(pieces), self.now))
        self._finished(rank)


def check(mesh: Mesh) -> None:
    """All ranks that have not failed hold the same results, and they are right."""
    for rank in mesh.ranks:
        for step, results in zip(mesh.steps, rank.results, strict=False):
            assert results == {expert: truth(step.layer, expert, rows) for expert, rows in step.rows.items()}
        if rank.error is None:
            assert rank.steps_done == len(mesh.steps)


def everywhere(hosts: int, layers: int = 4, experts: int = 8) -> Replicas:
    return {(layer, expert): list(range(hosts)) for layer in range(layers) for expert in range(experts)}


# ---------------------------------------------------------------- properties


habits = st.sampled_from(["good", "good", "late", "twice", "pieces", "garbage", "forgetful"])
moments = st.none() | st.floats(0.0, 0.3)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    size = draw(st.integers(1, 3))
    hosts = [
        SimulatedHost(
            draw(habits),
            dies_at=draw(moments),
            hangs_at=draw(moments),
            returns_at=draw(st.none() | st.floats(0.5, 100)),
            speed=draw(st.sampled_from([0.1, 1.0, 5.0])),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]
    numbers = st.lists(st.integers(0, len(hosts) - 1), unique=True)
    replicas = {(layer, expert): sorted(draw(numbers)) for layer in range(2) for expert in range(4)}
    rows = st.dictionaries(st.integers(0, 3), st.integers(1, 20), min_size=1)
    steps = [Step(draw(st.integers(0, 1)), draw(rows)) for _ in range(draw(st.integers(1, 6)))]
    return Mesh(size, hosts, replicas, steps, seed=draw(st.integers(0, 2**16)), ahead=draw(st.integers(1, 2)))


@given(meshes())
def test_every_rank_ends_with_all_results_or_an_error(mesh: Mesh) -> None:
    mesh.run()
    check(mesh)


@given(meshes(), st.data())
def test_where_every_expert_has_a_host_that_is_well_nothing_fails(mesh: Mesh, data: st.DataObject) -> None:
    well = SimulatedHost()
    number = data.draw(st.integers(0, len(mesh.hosts) - 1))
    hosts = [*mesh.hosts]
    hosts[number] = well
    replicas = {key: sorted({*numbers, number}) for key, numbers in mesh.replicas.items()}
    again = Mesh(len(mesh.ranks), hosts, replicas, mesh.steps, seed=7, ahead=mesh.ahead)
    again.run()
    check(again)
    assert not any(rank.error for rank in again.ranks)
    # No call waits longer than for every host that fails in turn, and for another rank that does not ask.
    longest = len(hosts) * (PATIENCE_S + 20 * 60 * 5 * ROW_S) + 2 * RESEND_S + SILENT_S
    assert all(took < longest for rank in again.ranks for took in rank.times)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 2))
def test_among_hosts_that_are_well_every_expert_is_asked_for_once(size: int, hosts: int, ahead: int) -> None:
    steps = [Step(layer, {expert: 1 + expert for expert in range(6)}) for layer in range(4)] * 3
    mesh = Mesh(size, [SimulatedHost() for _ in range(hosts)], everywhere(hosts), steps, ahead=ahead)
    mesh.run()
    check(mesh)
    asked = [expert for rank in mesh.ranks for ask in rank.asks for expert in ask.experts]
    assert Counter(asked) == {expert: len(steps) for expert in range(6)}
    assert all(ask.for_all for rank in mesh.ranks for ask in rank.asks)


@given(
    st.integers(1, 3),
    st.integers(1, 2),
    st.floats(0.0, 0.3),
    st.lists(st.floats(0.0, 60.0), min_size=3, max_size=3),
)
def test_a_host_that_joins_takes_over_whenever_each_rank_hears_of_it(
    size: int, ahead: int, dies_at: float, told_at: list[float]
) -> None:
    """The only host that there was dies before, while or after the ranks, one by one, are told of another."""
    steps = [Step(layer, {expert: 1 + expert for expert in range(4)}) for layer in range(4)] * 3
    hosts = [SimulatedHost(dies_at=dies_at), SimulatedHost()]
    mesh = Mesh(size, hosts, everywhere(2), steps, ahead=ahead, known=1)
    for rank, at in zip(mesh.ranks, told_at, strict=False):
        mesh.at(at, lambda rank=rank: mesh.tell(rank))
    mesh.run()
    check(mesh)
    assert not any(rank.error for rank in mesh.ranks)
    for rank, at in zip(mesh.ranks, told_at, strict=False):
        assert at > mesh.now or len(rank.core.hosts) == 2


# ---------------------------------------------------------------- who of several replicas


def rows_of(hosts: Sequence[SimulatedHost], steps: Sequence[Step], seed: int = 1) -> list[int]:
    """What each of some replicas of all experts has computed."""
    mesh = Mesh(1, hosts, everywhere(len(hosts)), steps, seed=seed)
    mesh.run(until=1e6)
    check(mesh)
    return [host.rows for host in mesh.ranks[0].core.hosts]


@pytest.mark.parametrize("chosen", [1, 2, 3])
@pytest.mark.parametrize("seed", [1, 2])
def test_equal_replicas_have_equal_loads(chosen: int, seed: int) -> None:
    random = Random(seed)
    steps = [Step(number % 4, dict.fromkeys(random.sample(range(8), chosen), 1)) for number in range(1000)]
    rows = rows_of([SimulatedHost(), SimulatedHost()], steps, seed)
    assert sum(rows) == 1000 * chosen
    assert min(rows) > 0.4 * sum(rows)


def test_a_replica_that_was_slow_once_has_its_part_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked_host, "FADING_S", 1.0)  # instead of ten, for less to compute
    steps = [Step(number % 4, {number % 8: 1}) for number in range(4000)]
    rows = rows_of([SimulatedHost(), SimulatedHost(free_at=0.2)], steps)
    assert min(rows) > 0.3 * sum(rows)


def test_a_far_quicker_replica_has_nearly_all_until_its_queue_is_long() -> None:
    slow, quick = rows_of([SimulatedHost(speed=3.0), SimulatedHost()], [Step(0, {0: 1})] * 1000)
    assert quick > 50 * slow
    slow, quick = rows_of([SimulatedHost(speed=3.0), SimulatedHost()], [Step(0, dict.fromkeys(range(8), 1))] * 100)
    assert 2 * slow < quick < 5 * slow


# ---------------------------------------------------------------- what is done when


def one_rank(hosts: int, replicas: Replicas | None = None) -> ExpertCalls:
    """Connected to all hosts at time 0."""
    core = ExpertCalls(0, 1)
    assert core.place(replicas or everywhere(hosts), [True] * hosts, range(hosts), 0.0) == [
        Dial(host) for host in range(hosts)
    ]
    for host in range(hosts):
        assert core.connected(host, 0.0) == []
    return core


def answer(core: ExpertCalls, host: int, rows: dict[int, int], now: float, *, busy_s: float = 0.001) -> list[Action]:
    parts = [(expert, count, truth(0, expert, count)) for expert, count in rows.items()]
    return core.answered(host, core.number, 0, parts, busy_s, now)


def test_a_lost_hosts_experts_are_asked_for_elsewhere_at_once() -> None:
    core = one_rank(2)
    assert core.begin(0, {3: 2}, 0, 1.0) == [Ask(0, (3,), True)]
    assert core.lost(0, "reset", 1.1) == [Ask(1, (3,), True)]
    assert answer(core, 1, {3: 2}, 1.2) == []
    assert core.results == {3: truth(0, 3, 2)}
    assert core.hosts[0].stalls_s == [pytest.approx(0.2)]
    assert core.hosts[0].lost == "reset"


def test_a_late_host_is_hedged_then_avoided_and_dropped_in_silence() -> None:
    core = one_rank(2)
    core.begin(0, {3: 1}, 0, 1.0)
    assert core.due == pytest.approx(1.0 + PATIENCE_S)
    assert core.tick(1.0 + PATIENCE_S) == [Ask(1, (3,), True)]
    answer(core, 1, {3: 1}, 1.3)
    assert core.begin(0, {3: 1, 4: 1}, 0, 1.4) == [Ask(1, (3, 4), True)]
    answer(core, 1, {3: 1, 4: 1}, 1.5)
    assert core.tick(1.0 + SILENT_S) == [Drop(0, "it has owed an answer for 5.0 s in silence")]
    assert core.due == pytest.approx(2.0 + SILENT_S), "it is dialled again"


def test_a_host_that_lacks_something_is_given_the_time_to_get_it_but_not_for_ever() -> None:
    core = one_rank(2)
    core.begin(0, {3: 1}, 0, 1.0)
    now = 1.0
    for _ in range(REPEATS):
        now += PATIENCE_S / 2
        assert core.repeated(0, core.number, now) == []
    assert core.due == pytest.approx(now + PATIENCE_S)
    assert core.repeated(0, core.number + 1, now) == [], "of another call"
    assert core.repeated(0, core.number, now) == [
        Drop(0, "it lacks again and again what it was sent"),
        Ask(1, (3,), True),
    ]


def test_a_late_host_that_answers_is_asked_again() -> None:
    core = one_rank(2)
    core.begin(0, {3: 1}, 0, 1.0)
    core.tick(1.25)
    answer(core, 1, {3: 1}, 1.3)
    assert answer(core, 0, {3: 1}, 1.4) == []
    assert core.results == {3: truth(0, 3, 1)}
    assert core.begin(0, {3: 1}, 0, 1.5) == [Ask(1, (3,), True)], "it was slow"
    answer(core, 1, {3: 1}, 1.6)
    later = 100.0
    for _ in range(3):  # the estimate of who is not asked fades
        (asked,) = core.begin(0, {3: 1}, 0, later)
        assert isinstance(asked, Ask)
        answer(core, asked.host, {3: 1}, later + 0.05)
        later += 100
    assert core.hosts[0].rows > 1


def test_the_quicker_replica_is_asked_until_its_queue_is_longer() -> None:
    core = one_rank(2)
    for host, busy_s in ((0, 0.004), (1, 0.001)):
        core.begin(0, {3: 1}, 0, 1.0)
        if host == 1:
            core.lost(0, "reset", 1.0)
        answer(core, host, {3: 1}, 1.005, busy_s=busy_s)
    core.tick(2.0 + 1.0)
    core.connected(0, 3.0)
    actions = core.begin(0, dict.fromkeys(range(8), 1), 0, 1.01)
    asked = {action.host: len(action.experts) for action in actions if isinstance(action, Ask)}
    assert asked[1] > asked[0] >= 1


def test_pieces_of_an_experts_rows_are_asked_for_by_themselves() -> None:
    core = one_rank(2, {(0, 3): [0, 1]})
    asked = core.begin(0, {3: 6, 3 + PIECE: 2}, 0, 1.0)
    assert asked == [Ask(0, (3,), True), Ask(1, (3 + PIECE,), True)]
    answer(core, 0, {3: 6}, 1.1)
    assert core.lost(1, "reset", 1.1) == [Ask(0, (3 + PIECE,), True)]
    answer(core, 0, {3 + PIECE: 2}, 1.2)
    assert core.results.keys() == {3, 3 + PIECE}
    core.begin(0, {3: 6, 3 + PIECE: 2}, 0, 1.3)
    assert core.lost(0, "reset", 1.4) == [Starve(0, 3), Starve(0, 3)]
    with pytest.raises(ExpertsMissing, match=r"for: layer 0 expert 3 \(host 0: reset; host 1: reset\)$"):
        core.tick(1.4 + STARVED_S)


def test_another_ranks_experts_are_asked_for_after_a_while_for_oneself() -> None:
    core = ExpertCalls(0, 2)
    core.place(everywhere(1), [True], [0], 0.0)
    core.connected(0, 0.0)
    assert core.begin(0, {0: 1, 1: 1}, 0, 1.0) == [Ask(0, (0,), True)]
    answer(core, 0, {0: 1}, 1.01)
    assert core.due == pytest.approx(1.0 + PATIENCE_S + RESEND_S, abs=0.2)
    assert core.tick(core.due) == [Ask(0, (1,), False)]


def test_early_answers_are_kept_for_their_call() -> None:
    core = ExpertCalls(0, 2)
    core.place(everywhere(1), [True], [0], 0.0)
    core.connected(0, 0.0)
    core.begin(0, {0: 1}, 0, 1.0)
    early = core.number + (1 << 32)
    core.answered(0, early, 0, [(1, 2, "early")], 0.0, 1.1)
    answer(core, 0, {0: 1}, 1.2)
    assert core.begin(0, {1: 2}, 0, 1.3) == []
    assert core.results == {1: "early"}


def test_answers_to_another_routing_are_not_taken() -> None:
    core = ExpertCalls(0, 2)
    core.place(everywhere(1), [True], [0], 0.0)
    core.connected(0, 0.0)
    core.begin(0, {1: 1}, 77, 1.0)
    assert core.answered(0, core.number ^ 1, 0, [(1, 1, "of other rows")], 0.0, 1.1) == []
    assert core.results == {}
    assert core.answered(0, core.number, 0, [(1, 1, "of its rows")], 0.0, 1.2) == []
    assert core.results == {1: "of its rows"}


def test_garbage_ends_it_with_a_host_until_it_is_started_anew() -> None:
    core = one_rank(2)
    core.begin(0, {3: 1}, 0, 1.0)
    dropped, asked = core.answered(0, core.number, 0, [(3, 7, "wrong")], 0.0, 1.1)
    assert isinstance(dropped, Drop)
    assert "other rows than it was sent for layer 0" in dropped.reason
    assert asked == Ask(1, (3,), True)
    answer(core, 1, {3: 1}, 1.2)
    assert core.tick(100.0) == []
    assert core.place(everywhere(2), [True, True], [], 101.0) == []
    assert core.place(everywhere(2), [True, True], [0], 102.0) == [Dial(0)]


def test_who_has_been_given_up_is_not_asked() -> None:
    core = one_rank(2)
    core.begin(0, {3: 1}, 0, 1.0)
    assert core.place(everywhere(2), [False, True], [], 1.1) == [
        Drop(0, "the orchestrator has given it up"),
        Ask(1, (3,), True),
    ]


def test_a_new_placement_feeds_who_starves() -> None:
    core = one_rank(2, {(0, 3): [0]})
    core.begin(0, {3: 1}, 0, 1.0)
    assert core.lost(0, "reset", 1.1) == [Starve(0, 3)]
    assert core.tick(core.due) == [Dial(0)]
    assert core.lost(0, "refused", 2.2) == [], "that has been told"
    assert core.place({(0, 3): [0, 1]}, [False, True], [], 30.0) == [Ask(1, (3,), True)]
    answer(core, 1, {3: 1}, 30.1)
    assert core.hosts[0].stalls_s == [pytest.approx(29.1)]


def test_who_starves_for_long_is_told_what_and_who() -> None:
    core = one_rank(1, {(0, 3): [0]})
    core.begin(0, {3: 1, 5: 1}, 0, 1.0)
    core.lost(0, "it was reset", 2.0)
    while core.due < 1.0 + STARVED_S:
        assert core.tick(core.due) == [Dial(0)]
        core.lost(0, "it refuses", core.due + 0.1)
    with pytest.raises(ExpertsMissing, match=r"layer 0 expert 5 \(no host has it\)"):
        core.tick(1.0 + STARVED_S)
    with pytest.raises(ExpertsMissing, match=r"120 s .* layer 0 expert 3 \(host 0: it refuses\)"):
        core.tick(2.0 + STARVED_S)


def test_who_refuses_is_not_asked_again_until_placements_change() -> None:
    core = one_rank(2)
    core.begin(0, {3: 1}, 0, 1.0)
    assert core.refused(0, core.number, 1.1) == [Ask(1, (3,), True)]
    assert core.refused(1, core.number, 1.2) == [Starve(0, 3)]
    assert core.place(everywhere(2), [True, True], [], 1.3) == [Ask(0, (3,), True)]


def test_every_placement_that_leaves_it_starving_is_told_so() -> None:
    core = one_rank(2, {(0, 3): [0]})
    core.begin(0, {3: 1}, 0, 1.0)
    assert core.refused(0, core.number, 1.1) == [Starve(0, 3)]
    assert core.place({(0, 3): [1]}, [True, True], [], 2.0) == [Ask(1, (3,), True)]
    assert core.refused(1, core.number, 2.1) == [Starve(0, 3)]
    assert core.place({}, [True, True], [], 3.0) == [Starve(0, 3)]
    assert core.tick(3.1) == []


def test_time_waited_and_owed_is_counted() -> None:
    core = one_rank(2, {(0, 3): [0], (0, 4): [1]})
    core.begin(0, {3: 1, 4: 1}, 0, 1.0)
    answer(core, 0, {3: 1}, 1.1)
    answer(core, 1, {4: 1}, 1.4)
    assert [host.owing_s for host in core.hosts] == [pytest.approx(0.1), pytest.approx(0.4)]
    assert [host.waited_s for host in core.hosts] == [pytest.approx(0.05), pytest.approx(0.35)]
    assert core.hosts[1].round_trip_s == pytest.approx(0.399)


def test_a_host_that_comes_back_is_asked_for_what_is_missing() -> None:
    core = one_rank(1)
    core.begin(0, {3: 1}, 0, 1.0)
    assert core.lost(0, "reset", 1.1) == [Starve(0, 3)]
    assert core.tick(core.due) == [Dial(0)]
    assert core.connected(0, 2.2) == [Ask(0, (3,), True)]


def test_hosts_that_come_back_for_ever_and_never_answer_do_not_keep_hope_alive() -> None:
    core = one_rank(1)
    core.begin(0, {3: 1}, 0, 0.0)
    now, returns = 0.0, 0
    while now < STARVED_S:
        core.lost(0, "reset", now)
        now = core.due
        if now >= STARVED_S:
            break
        assert core.tick(now) == [Dial(0)]
        assert core.connected(0, now) == [Ask(0, (3,), True)]
        returns += 1
    assert returns > 5
    with pytest.raises(ExpertsMissing):
        core.tick(now)


def test_nothing_is_asked_for_after_that_time() -> None:
    core = one_rank(1)
    core.begin(0, {3: 1}, 0, 0.0)
    core.lost(0, "reset", 0.0)
    core.tick(core.due)
    assert core.connected(0, STARVED_S - 0.1) == [Ask(0, (3,), True)]
    core.lost(0, "reset", STARVED_S - 0.05)
    assert core.place(everywhere(1), [True], [0], STARVED_S) == [Dial(0)]
    assert core.connected(0, STARVED_S) == []


@pytest.mark.parametrize("number", [1 << 40, 1])
def test_answers_to_calls_that_nobody_made_are_garbage(number: int) -> None:
    core = one_rank(2)
    core.begin(0, {3: 1}, 0, 1.0)
    dropped, asked = core.answered(0, core.number ^ number, 0, [(3, 1, "wrong")], 0.0, 1.1)
    assert isinstance(dropped, Drop)
    assert "which has not been made" in dropped.reason
    assert asked == Ask(1, (3,), True)
