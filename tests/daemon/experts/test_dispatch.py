"""Experts on hosts, over real links: results are those of one process, whatever happens to the hosts meanwhile.

The file is long: every test has the same trunk dispatch to servers that behave in one more way.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from motley.daemon.experts import asked_host, calls, dispatch
from motley.daemon.experts.calls import ExpertsMissing
from motley.daemon.experts.dispatch import Dispatcher
from motley.daemon.experts.factors import ExpertsAdapter
from motley.daemon.experts.keys import replicas
from motley.daemon.experts.wire import EXPERT_BYTES, HEADER_BYTES, Answer, ExpertWire, Part
from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.model import EMBEDDING
from motley.daemon.models.files import open_model
from motley.daemon.models.graph.rank_graph import build_rank_graph
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import SHARE_FILE
from motley.plugins.engine import F32, EngineFactory, EngineOptions
from motley.plugins.mixture import Compute, Sent, add_mixture, as_terms, deal
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from motley.protocol import mesh_pb2 as pb
from motley.transport import Messenger, PeerLost, Plain, WireFormat, messages
from tests.daemon.experts.expert_server import (
    HIDDEN,
    Server,
    ServerProcess,
    ServerThread,
    expert_of,
    member,
    small_expert,
)
from tests.models.cases import GOLDEN, golden_cases, uneven_shares
from tests.models.local_group import LocalGroup, LocalMember
from tests.plugins.sequences import Sequences

LAYERS, EXPERTS, CHOSEN = 3, 6, 2
STEPS = 4

AnyServer = ServerThread | ServerProcess


def everything(hosts: int) -> list[list[tuple[int, int]]]:
    """Every expert on every host."""
    return [[(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]] * hosts


def placement(
    servers: Sequence[AnyServer],
    held: Sequence[Sequence[tuple[int, int]]],
    version: int = 0,
    alive: Sequence[bool] = (),
) -> pb.Placement:
    def hosted(experts: Sequence[tuple[int, int]]) -> pb.HostedExperts:
        layers = sorted({layer for layer, _ in experts})
        return pb.HostedExperts(
            sets=[
                pb.ExpertSet(layer=layer, indices=[expert for at, expert in experts if at == layer]) for layer in layers
            ]
        )

    return pb.Placement(
        version=version,
        hosts=[hosted(experts) for experts in held],
        addresses=[server.address for server in servers],
        alive=alive or [True] * len(servers),
    )


class Trunk:
    """The ranks of a trunk: threads that meet after every layer, as a sum would have them do.

    Attributes:
        told: by rank, the bodies of what it has emitted.
    """

    def __init__(
        self,
        size: int,
        first: pb.Placement,
        *,
        hidden: int = HIDDEN,
        wire_format: WireFormat = WireFormat.FP32,
        look: Callable[[Trunk, int], None] = lambda trunk, rank: None,
        hosts: int = 0,
        adapters: Mapping[int, ExpertsAdapter] | None = None,
    ) -> None:
        """`hosts`: that there may be, where more than those of the first placement."""
        self.told: list[list[dict[str, Any]]] = [[] for _ in range(size)]
        self.dispatchers = [
            Dispatcher(
                rank,
                size,
                Messenger(member(rank, size + max(hosts, len(first.hosts))), Plain(), listener=None),
                first,
                hidden=hidden,
                wire_format=wire_format,
                look=lambda seconds, rank=rank: look(self, rank),
                tell=lambda rank=rank, **body: self.told[rank].append(body),
                adapters=adapters or {},
            )
            for rank in range(size)
        ]

    def meet(self) -> None:
        self.together(lambda rank: self.dispatchers[rank].meet(lambda: None))

    def close(self) -> None:
        for dispatcher in self.dispatchers:
            dispatcher.close()

    def run(
        self, steps: int = STEPS, rows: int = 1, *, before: Callable[[int, int], None] = lambda step, layer: None
    ) -> list[F32]:
        """What every rank has in the end: f32[rows, D]. `before` is called by rank 0 as it begins a layer."""
        barrier = threading.Barrier(len(self.dispatchers), timeout=60)

        def work(rank: int) -> F32:
            x = start(rows)
            try:
                for step in range(steps):
                    for layer in range(LAYERS):
                        barrier.wait()
                        if rank == 0:
                            before(step, layer)
                        x = forward(x, step, layer, self.dispatchers[rank].experts(layer))
                return x
            except BaseException:
                barrier.abort()
                raise

        return self.together(work)

    def together(self, work: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * len(self.dispatchers)
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.dispatchers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        return results


def start(rows: int) -> F32:
    return np.random.default_rng(5).standard_normal((rows, HIDDEN), np.float32)


def forward(x: F32, step: int, layer: int, compute: Any) -> F32:
    """A layer of nothing but experts, chosen at random."""
    random = np.random.default_rng((step, layer))
    chosen = np.stack([random.permutation(EXPERTS)[:CHOSEN] for _ in x])
    weights = random.uniform(0, 1, chosen.shape).astype(np.float32)
    total = x.copy()
    add_mixture([total], x, weights, deal(chosen), as_terms(compute))
    return np.tanh(total)


def alone(rows: int = 1, steps: int = STEPS) -> F32:
    """What one process computes."""
    x = start(rows)
    for step in range(steps):
        for layer in range(LAYERS):
            here = lambda x, sent, layer=layer: [small_expert(layer, own.expert, x[own.rows]) for own in sent]  # noqa: E731
            x = forward(x, step, layer, here)
    return x


@contextmanager
def trunk(
    size: int, servers: Sequence[AnyServer], first: pb.Placement | None = None, **options: Any
) -> Iterator[Trunk]:
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        ranks = Trunk(size, first or placement(servers, everything(len(servers))), **options)
        stack.callback(ranks.close)
        ranks.meet()
        yield ranks


def threads(size: int, count: int, **options: Any) -> list[ServerThread]:
    return [ServerThread(Server(number, size, count, **options)) for number in range(count)]


def check(ranks: Trunk, results: Sequence[F32], rows: int = 1) -> None:
    for result in results:
        np.testing.assert_array_equal(result, alone(rows))


# ---------------------------------------------------------------- hosts that are well


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody loses patience because this machine is busy: nothing is asked for twice, so that calls can be counted."""
    monkeypatch.setattr(asked_host, "PATIENCE_S", 30.0)
    monkeypatch.setattr(asked_host, "SILENT_S", 30.0)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("size", [1, 2])
def test_experts_elsewhere_compute_what_one_process_does(size: int, rows: int) -> None:
    with trunk(size, threads(size, 3)) as ranks:
        check(ranks, ranks.run(rows=rows), rows)
        assert not any(ranks.told)
        reports = [dispatcher.report() for dispatcher in ranks.dispatchers]
    loads = sum(sum(load.rows) for report in reports for load in report.loads)
    assert loads == STEPS * LAYERS * CHOSEN * rows
    assert sum(host.rows for report in reports for host in report.hosts) == loads
    assert not any(host.lost or host.stalls_s for report in reports for host in report.hosts)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("rows", [1, 7])
def test_traffic_is_its_formula(rows: int) -> None:
    """Rows x hidden x 4 each way per chosen expert, layer and step, and headers, which are counted."""
    servers = threads(1, 2)
    with trunk(1, servers) as ranks:
        ranks.run(rows=rows)
        report = ranks.dispatchers[0].report()
    calls = [call for server in servers for call in server.server.calls]
    payload = STEPS * LAYERS * CHOSEN * rows * HIDDEN * 4
    headers = len(calls) * HEADER_BYTES + sum(len(call.parts) for call in calls) * EXPERT_BYTES
    assert report.bytes_out == report.bytes_in == payload + headers
    assert all(len({part.expert for part in call.parts}) == len(call.parts) for call in calls)
    assert len(calls) <= STEPS * LAYERS * 2, "a host gets one message per layer and step"


@pytest.mark.usefixtures("unhurried")
def test_rows_too_many_for_one_message_travel_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 7
    limit = ExpertWire(HIDDEN, WireFormat.FP32).message_bytes(1, rows)
    monkeypatch.setattr(messages, "MAX_MESSAGE", limit)
    monkeypatch.setattr(dispatch, "MAX_MESSAGE", limit, raising=False)
    servers = threads(2, 1)
    with trunk(2, servers) as ranks:
        check(ranks, ranks.run(rows=rows), rows)
        assert not any(ranks.told)
        reports = [dispatcher.report() for dispatcher in ranks.dispatchers]
    assert len(servers[0].server.calls) > 2 * STEPS * LAYERS
    assert sum(host.rows for report in reports for host in report.hosts) == STEPS * LAYERS * CHOSEN * rows


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("size", [1, 2])
def test_one_experts_rows_too_many_for_one_message_travel_in_several(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 9
    limit = ExpertWire(HIDDEN, WireFormat.FP32).message_bytes(1, 3)
    monkeypatch.setattr(messages, "MAX_MESSAGE", limit)
    monkeypatch.setattr(dispatch, "MAX_MESSAGE", limit)
    servers = threads(size, 2)
    with trunk(size, servers) as ranks:
        check(ranks, ranks.run(rows=rows), rows)
        assert not any(ranks.told)
        reports = [dispatcher.report() for dispatcher in ranks.dispatchers]
    calls = [call for server in servers for call in server.server.calls]
    assert {len(call.rows) for call in calls} == {1, 2}, "an even number but for the last"
    assert max(part.piece for call in calls for part in call.parts) > 1
    assert sum(host.rows for report in reports for host in report.hosts) == STEPS * LAYERS * CHOSEN * rows
    assert sum(sum(load.rows) for report in reports for load in report.loads) == STEPS * LAYERS * CHOSEN * rows


@pytest.mark.parametrize(("wire_format", "error"), [(WireFormat.BF16, 0.02), (WireFormat.INT8, 0.02)])
def test_rows_travel_in_the_sessions_format(wire_format: WireFormat, error: float) -> None:
    with trunk(1, threads(1, 2, wire_format=wire_format), wire_format=wire_format) as ranks:
        (result,) = ranks.run(rows=7)
    difference = np.linalg.norm(result - alone(7)) / np.linalg.norm(alone(7))
    assert 0 < difference < error


def test_hosts_may_answer_in_pieces() -> None:
    def in_pieces(wire: ExpertWire, answer: Answer) -> Sequence[Any]:
        stops = np.cumsum([part.rows for part in answer.parts])[:-1]
        return [
            wire.write_answer(Answer(answer.number, answer.layer, 0.0, [part], rows))
            for part, rows in zip(answer.parts, np.split(answer.rows, stops), strict=True)
        ]

    with trunk(2, threads(2, 2, habit=in_pieces)) as ranks:
        check(ranks, ranks.run(rows=3), 3)


# ---------------------------------------------------------------- hosts that are not


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("size", [1, 2])
def test_a_host_that_dies_in_the_middle_of_a_step_changes_nothing(size: int) -> None:
    """It has the rows and has not answered; nobody waits until it would be late."""
    victim = ServerProcess(0, size, 2, dies_at=2)
    with trunk(size, [victim, ServerThread(Server(1, size, 2, pause_s=0.02))]) as ranks:
        check(ranks, ranks.run())
        losses = [body["experts"] for told in ranks.told for body in told]
        assert len(losses) == size
        assert all(report.hosts[0].lost and not report.hosts[1].lost for report in losses)
        reports = [dispatcher.report() for dispatcher in ranks.dispatchers]
    stalls = [stall for report in reports for stall in report.hosts[0].stalls_s]
    assert stalls
    assert max(stalls) < asked_host.PATIENCE_S


@pytest.mark.parametrize("size", [1, 2])
def test_a_host_that_hangs_is_done_without(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked_host, "PATIENCE_S", 2.0)
    victim = ServerProcess(0, size, 2)
    frozen = psutil.Process(victim.process.pid)
    asked: list[int] = []
    send = Dispatcher._send

    def noted(self: Dispatcher, host: int, *what: Any) -> None:
        asked.append(host)
        send(self, host, *what)

    monkeypatch.setattr(Dispatcher, "_send", noted)

    def before(step: int, layer: int) -> None:
        if (step, layer) == (1, 1):
            frozen.suspend()
            asked.clear()

    with trunk(size, [victim, ServerThread(Server(1, size, 2, pause_s=0.02))]) as ranks:
        check(ranks, ranks.run(before=before))
        frozen.resume()
    # Of eight layers: once for its own experts, and once for those that another rank asks for.
    assert asked.count(0) <= 2 * size, "once it was late nobody asks it any more"


def nan(wire: ExpertWire, answer: Answer) -> Sequence[Any]:
    return [wire.write_answer(Answer(answer.number, answer.layer, 0.0, answer.parts, answer.rows * np.float32("nan")))]


def nan_of_others(wire: ExpertWire, answer: Answer) -> Sequence[Any]:
    parts = [Part(part.expert + EXPERTS, part.rows) for part in answer.parts]
    rows = np.full_like(answer.rows, np.inf)
    return [wire.write_answer(Answer(answer.number, answer.layer, 0.0, parts, rows))]


def other_rows(wire: ExpertWire, answer: Answer) -> Sequence[Any]:
    parts = [Part(part.expert, part.rows + 1) for part in answer.parts]
    rows = np.zeros((sum(part.rows for part in parts), HIDDEN), np.float32)
    return [wire.write_answer(Answer(answer.number, answer.layer, 0.0, parts, rows))]


def other_experts(wire: ExpertWire, answer: Answer) -> Sequence[Any]:
    parts = [Part(part.expert + EXPERTS, part.rows) for part in answer.parts]
    return [wire.write_answer(Answer(answer.number, answer.layer, 0.0, parts, answer.rows))]


def another_call(wire: ExpertWire, answer: Answer) -> Sequence[Any]:
    return [wire.write_answer(Answer(answer.number + (1 << 40), answer.layer, 0.0, answer.parts, answer.rows))]


def noise(wire: ExpertWire, answer: Answer) -> Sequence[Any]:
    return [[b"these are no rows"]]


def silence(wire: ExpertWire, answer: Answer) -> Sequence[Any]:
    return [[]]


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("habit", "why"),
    [
        (nan, "not finite for layer"),
        (nan_of_others, "not finite for layer"),
        (other_rows, "other rows than it was sent"),
        (other_experts, "other rows than it was sent"),
        (another_call, "which has not been made"),
        (noise, "17 bytes"),
        (silence, "0 bytes"),
    ],
)
def test_a_host_that_talks_nonsense_is_dropped_and_named(habit: Any, why: str, size: int) -> None:
    liar = ServerThread(Server(0, size, 2, habit=habit))
    with trunk(size, [liar, ServerThread(Server(1, size, 2))]) as ranks:
        check(ranks, ranks.run())
        assert all(why in dispatcher.report().hosts[0].lost for dispatcher in ranks.dispatchers)
        assert all(any("experts" in body for body in told) for told in ranks.told)
    assert len(liar.server.calls) <= size * EXPERTS, "nobody asks it again"


def test_every_answer_twice_and_late_is_no_answer_too_many() -> None:
    answers: list[Any] = []

    def again(wire: ExpertWire, answer: Answer) -> Sequence[Any]:
        answers.append([b"".join(map(bytes, wire.write_answer(answer)))])
        return [*answers[-3:], answers[-1]]

    with trunk(2, threads(2, 2, habit=again)) as ranks:
        check(ranks, ranks.run())
        assert not any(ranks.told)


def test_a_host_that_has_lost_an_expert_is_passed_over() -> None:
    poor = ServerThread(Server(0, 1, 2, holds={(0, expert) for expert in range(EXPERTS)}))
    with trunk(1, [poor, ServerThread(Server(1, 1, 2))]) as ranks:
        check(ranks, ranks.run())
        assert not ranks.dispatchers[0].report().hosts[0].lost


def test_rows_that_are_not_finite_are_nobodys_fault() -> None:
    with trunk(1, threads(1, 1)) as ranks:
        x = np.full((1, HIDDEN), np.nan, np.float32)
        assert np.isnan(forward(x, 0, 0, ranks.dispatchers[0].experts(0))).all()
        assert not ranks.told[0]


# ---------------------------------------------------------------- placements


@pytest.mark.parametrize("size", [1, 2])
def test_who_starves_is_fed_by_a_new_placement(size: int) -> None:
    """The only host of half of the experts dies; a moment later another has them."""
    mine = [(layer, expert) for layer in range(LAYERS) for expert in range(0, EXPERTS, 2)]
    others = [(layer, expert) for layer in range(LAYERS) for expert in range(1, EXPERTS, 2)]
    victim = ServerProcess(0, size, 2)
    spare = ServerThread(Server(1, size, 2))
    looks = [0] * size

    def look(ranks: Trunk, rank: int) -> None:
        looks[rank] += 1
        if any("starved" in body for body in ranks.told[rank]):
            second = placement([victim, spare], everything(2), version=3, alive=[False, True])
            ranks.dispatchers[rank].place(second)

    def before(step: int, layer: int) -> None:
        if (step, layer) == (1, 1):
            victim.process.kill()
            victim.process.wait()

    with trunk(size, [victim, spare], placement([victim, spare], [mine, others]), look=look) as ranks:
        check(ranks, ranks.run(before=before))
    starved = [body["starved"] for told in ranks.told for body in told if "starved" in body]
    assert starved
    assert all((each.layer, each.index) in mine for each in starved)
    assert all(looks)


@pytest.mark.parametrize("size", [1, 2])
def test_a_host_that_joins_takes_over_from_the_one_there_was(size: int) -> None:
    """Rank 0 is told of it in time, the others only when they have to wait; then the first host leaves."""
    old, new = threads(size, 2)
    both = placement([old, new], everything(2), version=2)

    def look(ranks: Trunk, rank: int) -> None:
        ranks.dispatchers[rank].place(both)

    def before(step: int, layer: int) -> None:
        first = ranks.dispatchers[0]
        match step, layer:
            case 0, 1:  # it is being started, and something else has changed
                first.place(placement([old, new], [everything(1)[0], []], version=1, alive=[True, False]))
            case 1, 0:
                first.place(both)
            case 2, 1:
                old.__exit__()

    with ExitStack() as stack:
        stack.enter_context(new)
        ranks = stack.enter_context(trunk(size, [old], look=look, hosts=2))
        check(ranks, ranks.run(before=before))
    assert old.server.calls
    assert new.server.calls


def test_a_host_that_comes_back_is_found_again() -> None:
    """At its old address, without a word from the orchestrator: the network was away."""
    first = ServerThread(Server(0, 1, 1))
    port = first.server.listener.port
    with ExitStack() as stack, trunk(1, [first]) as ranks:

        def before(step: int, layer: int) -> None:
            if (step, layer) == (1, 0):
                first.__exit__()
                stack.enter_context(ServerThread(Server(0, 1, 1, port=port)))

        check(ranks, ranks.run(before=before))


def test_an_older_placement_is_not_adopted() -> None:
    servers = threads(1, 2)
    with trunk(1, servers) as ranks:
        (dispatcher,) = ranks.dispatchers
        dispatcher.place(placement(servers, everything(2), version=5))
        dispatcher.place(placement(servers, [[], []], version=4))
        check(ranks, ranks.run())


def test_a_host_started_anew_elsewhere_is_dialled_there() -> None:
    servers = threads(1, 1)
    successor = ServerThread(Server(0, 1, 1))
    with successor, trunk(1, servers) as ranks:
        ranks.dispatchers[0].place(placement([successor], everything(1), version=1))
        check(ranks, ranks.run())
    assert successor.server.calls
    assert not servers[0].server.calls


def test_who_starves_too_long_is_told_what_and_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "STARVED_S", 0.3)
    victim = ServerProcess(0, 1, 1)
    with trunk(1, [victim]) as ranks:
        victim.process.kill()
        victim.process.wait()
        with pytest.raises(ExpertsMissing, match=r"layer 0 expert \d \(host 0: .*127\.0\.0\.1"):
            ranks.run()


def test_a_host_that_refuses_the_link_is_named_at_once() -> None:
    server = ServerThread(Server(0, 1, 1))
    with server:
        ranks = Trunk(1, placement([server], everything(1)))
        stranger = Dispatcher(
            0,
            1,
            Messenger(member(0, 7), Plain(), listener=None),
            placement([server], everything(1)),
            hidden=HIDDEN,
            wire_format=WireFormat.FP32,
            look=lambda seconds: None,
            tell=lambda **body: None,
        )
        with pytest.raises(PeerLost, match=r"rank 1 is lost: expert host 0 cannot be reached: .*a mesh of 7 ranks"):
            stranger.meet(lambda: None)
        stranger.close()
        ranks.close()


def test_hosts_that_are_gone_already_are_not_waited_for() -> None:
    servers = threads(1, 2)
    first = placement(servers, everything(2), version=2, alive=[False, True])
    with trunk(1, servers, first) as ranks:
        check(ranks, ranks.run())
    assert not servers[0].server.calls


def test_what_waits_can_be_interrupted() -> None:
    class Interrupted(Exception):
        pass

    def look(ranks: Trunk, rank: int) -> None:
        raise Interrupted

    with trunk(1, threads(1, 1, pause_s=0.5), look=look) as ranks, pytest.raises(Interrupted):
        ranks.run()


def test_replicas_are_told_by_host() -> None:
    hosts = placement([], [[(0, 1), (2, 3)], [(0, 1)]], alive=[True]).hosts
    assert replicas(hosts) == {(0, 1): [0, 1], (2, 3): [0]}


# ---------------------------------------------------------------- a model


@pytest.mark.parametrize("build", [ReferenceEngine, OnnxRuntimeEngine])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe"])
def test_a_model_with_experts_elsewhere_computes_its_golden_logits(
    name: str, size: int, build: EngineFactory, tmp_path: Path
) -> None:
    """By an engine on every rank of the trunk; two hosts read experts from the checkpoint."""
    case = next(case for case in golden_cases() if case.folder == GOLDEN / name)
    model, experts = case.model, case.model.experts
    assert experts is not None
    shares = uneven_shares(units(model, "fp32", 32), size)
    every = [(layer, expert) for layer in range(len(model.layers)) for expert in range(experts.count)]
    tokens = case.tokens[:-1]
    chunks = [slice(0, 40), slice(40, len(tokens) - 1), slice(len(tokens) - 1, len(tokens))]
    group = LocalGroup(size)
    with ExitStack() as stack:
        source = stack.enter_context(open_model(case.folder)).source
        embedded = source.rows(EMBEDDING, tokens)
        servers = threads(size, 2, hidden=model.hidden, compute=partial(expert_of, source))
        ranks = stack.enter_context(trunk(size, servers, placement(servers, [every] * 2), hidden=model.hidden))

        def work(rank: int) -> F32:
            declared = build_rank_graph(model, shares, rank, "fp32", 32, model.context, experts_elsewhere=True)
            share_file = tmp_path / str(rank) / SHARE_FILE
            share_file.parent.mkdir()
            with open_model(case.folder) as own:
                write_share(own.source, declared.weights, declared.share_bytes, share_file)
            peers = Member(group, rank, ranks.dispatchers[rank])
            graph = declared.bind(share_file)
            alone = Sequences(build(graph, peers, EngineOptions()), graph)
            return np.concatenate(
                [
                    alone.step(0, embedded[chunk].copy(), chunk.start, chunk.stop - chunk.start, halved=True).copy()
                    for chunk in chunks
                ]
            )

        logits = np.concatenate(ranks.together(work), axis=1)
        reports = [dispatcher.report() for dispatcher in ranks.dispatchers]
    np.testing.assert_allclose(logits, case.logits, atol=1e-4)
    loads = Counter[int]()
    for report in reports:
        loads.update({load.layer: sum(load.rows) for load in report.loads})
    rows = len(tokens) * experts.chosen.axis.size
    assert loads == dict.fromkeys(model.expert_layers, rows)


class Member(LocalMember):
    """A rank whose sums are taken here, and whose experts are elsewhere."""

    def __init__(self, group: LocalGroup, rank: int, dispatcher: Dispatcher) -> None:
        super().__init__(group, rank)
        self._dispatcher = dispatcher

    def experts(self, layer: int) -> Compute:
        compute = self._dispatcher.experts(layer)

        def asked(x: F32, sent: Sequence[Sent]) -> Iterable[F32]:
            assert not self._pending, "a sum is under way, while all ranks ask together"
            return compute(x, sent)

        return asked
