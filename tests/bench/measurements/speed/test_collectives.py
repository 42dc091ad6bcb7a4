from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pytest

from motley.bench.measurements.speed.collectives import Row, Setup, measure
from motley.bench.meshes.emulator import LinkSpec, Nic
from motley.transport import Listener, Membership, Plain, WireFormat, connect_mesh, mesh
from motley.transport.schedules.forecast import Crowd, Network
from motley.transport.schedules.schedule import ALGORITHMS, Operation


def check(rows: list[Row], setup: Setup) -> None:
    assert [(row.op, row.bytes, row.ranks) for row in rows] == [
        (operation, size, setup.ranks) for operation in setup.operations for size in setup.sizes
    ]
    for row in rows:
        assert 0 < row.p50_us <= row.p99_us
        assert row.predicted_us > 0
        assert row.algorithm in ALGORITHMS[Operation(row.op)]
        compared = setup.link is None and importlib.util.find_spec("torch") is not None
        assert (row.gloo_p50_us is not None) == compared


@pytest.mark.parametrize("tls", [False, True])
def test_every_operation_is_measured_between_real_processes(tls: bool) -> None:
    setup = Setup(ranks=3, sizes=[0, 4100], operations=tuple(Operation), rounds=20, tls=tls)
    seen: list[Row] = []
    rows = measure(setup, seen.append)
    assert rows == seen
    check(rows, setup)


def test_an_emulated_network_costs_what_the_model_says() -> None:
    """5 ms one way, and 8 ms for 100 kB at 100 Mbit/s; and what a busy machine adds."""
    setup = Setup(ranks=2, sizes=[100_000], rounds=20, link=LinkSpec.parse("5ms,100Mbit"))
    (row,) = rows = measure(setup)
    check(rows, setup)
    assert 12_000 < row.p50_us < 80_000
    assert 10_000 < row.predicted_us < 80_000


def test_a_crowd_on_a_wide_network_is_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pairs measure one after the other, which takes longer than the ranks wait for one that is silent."""
    monkeypatch.setattr(mesh, "_usable_cores", lambda: {0})
    link = LinkSpec.parse("50ms,100Mbit")
    with ExitStack() as stack:
        listeners = [stack.enter_context(closing(Listener("127.0.0.1"))) for _ in range(5)]
        addresses = [f"127.0.0.1:{listener.port}" for listener in listeners]

        def connect(rank: int) -> Network:
            member = Membership("test", 1, rank, 5, bytes(32), bytes(32))
            wrap = Nic(link, seed=rank).wrap
            with connect_mesh(listeners[rank], member, addresses, 1.0, security=Plain(), wrap=wrap) as communicator:
                return communicator.network

        pool = stack.enter_context(ThreadPoolExecutor(5))
        networks = list(pool.map(connect, range(5)))
    assert networks == [networks[0]] * 5
    assert networks[0].crowds == [Crowd([0, 1, 2, 3, 4], 1)]
    assert networks[0].byte_s == 0.0  # no rehearsal: processors do not count here
    apart = ~np.eye(5, dtype=bool)
    assert 49e-3 < np.median(np.array(networks[0].latency)[apart]) < 90e-3
    assert 1e6 < np.median(np.array(networks[0].bandwidth)[apart]) < 20e6


def test_a_narrow_wire_format_saves_what_it_should() -> None:
    link = LinkSpec.parse("0.1ms,40Mbit")
    took = {
        wire: measure(Setup(ranks=2, sizes=[1 << 17], rounds=20, link=link, wire_format=wire))[0]
        for wire in (WireFormat.FP32, WireFormat.INT8)
    }
    assert took[WireFormat.INT8].p50_us < 0.8 * took[WireFormat.FP32].p50_us
    assert took[WireFormat.INT8].predicted_us < 0.8 * took[WireFormat.FP32].predicted_us


def test_a_rank_that_fails_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="the process of rank 0 ended"):
        measure(Setup(ranks=2, sizes=[4], operations=["no operation"], rounds=1))  # type: ignore[list-item]
    assert "no operation" in capfd.readouterr().err
