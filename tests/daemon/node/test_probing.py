"""Two nodes measure their link over the data plane's TLS, or say why they cannot."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from queue import Queue
from typing import Any, cast

import pytest

from motley.daemon.node.network.probing import Unreachable, probe_link
from motley.daemon.pipe.settings import WorkerSettings
from motley.daemon.worker.worker import Worker
from motley.orchestrator.trust.certificates import issue_credentials
from motley.protocol import mesh_pb2 as pb
from motley.transport import Listener

SECRET = bytes(range(32))


def probes(seconds: float = 5.0) -> list[pb.Probe]:
    """Of the one that listens, and of the other, to be told an address."""
    return [pb.Probe(id="probe-1", secret=SECRET, tls=tls, seconds=seconds) for tls in issue_credentials("probe-1", 2)]


def test_both_measure_the_same() -> None:
    listens, dials = probes()
    said: Queue[str] = Queue()
    with ThreadPoolExecutor(1) as other:
        there = other.submit(probe_link, listens, "127.0.0.1", said.put)
        dials.address = said.get(timeout=5)
        here = probe_link(dials, "127.0.0.1", pytest.fail)
        assert there.result(timeout=10) == here
    assert 0 <= here.latency_s < 5e-3
    assert here.bandwidth > 1e7


def test_who_is_dialled_listens_on_the_ports_that_it_may() -> None:
    with closing(Listener("127.0.0.1")) as taken:
        ports = taken.port, min(taken.port + 50, 65535)
        listens, dials = probes()
        said: Queue[str] = Queue()
        with ThreadPoolExecutor(1) as other:
            other.submit(probe_link, listens, "127.0.0.1", said.put, ports)
            dials.address = said.get(timeout=5)
            assert ports[0] < int(dials.address.rpartition(":")[2]) <= ports[1]
            probe_link(dials, "127.0.0.1", pytest.fail, (taken.port, taken.port))  # takes any, as nobody dials it


def test_a_worker_listens_on_the_ports_that_it_may(tmp_path: Path) -> None:
    with closing(Listener("127.0.0.1")) as taken:
        ports = taken.port, min(taken.port + 50, 65535)
        settings = WorkerSettings(1, "", str(tmp_path), 0, None, "127.0.0.1", threads=1, core=None, ports=ports)
        told = WorkerSettings.from_line(settings.to_line().decode())
        assert told == settings
        with closing(Worker(cast(Any, None), told).listen()) as own:
            assert ports[0] < own.port <= ports[1]


def test_who_does_not_answer_is_named_with_its_address() -> None:
    """A firewall that drops everything: here, a listener that accepts nobody."""
    _, dials = probes(seconds=0.5)
    listener = Listener("127.0.0.1")
    dials.address = f"127.0.0.1:{listener.port}"
    with pytest.raises(Unreachable, match=rf"nothing answers at 127.0.0.1:{listener.port} within 0.5 s"):
        probe_link(dials, "127.0.0.1", pytest.fail)
    listener.close()


def test_a_stranger_is_refused() -> None:
    """A node with certificates of another attempt."""
    listens, _ = probes(seconds=2.0)
    _, stranger = (
        pb.Probe(id="probe-1", secret=SECRET, tls=tls, seconds=1.5) for tls in issue_credentials("probe-1", 2)
    )
    said: Queue[str] = Queue()
    failures: list[str] = []

    def listen() -> None:
        try:
            probe_link(listens, "127.0.0.1", said.put)
        except Unreachable as error:
            failures.append(str(error))

    thread = threading.Thread(target=listen)
    thread.start()
    stranger.address = said.get(timeout=5)
    with pytest.raises(Unreachable, match=r"certificate|TLS|answers"):
        probe_link(stranger, "127.0.0.1", pytest.fail)
    thread.join(timeout=10)
    assert failures == ["it has not been reached within 2 s"]
