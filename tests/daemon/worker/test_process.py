"""How a worker process ends, as its exit status tells."""

from __future__ import annotations

import io
import socket
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from motley.daemon.pipe import worker_end
from motley.daemon.pipe.framing import LENGTH, TOKEN_BYTES
from motley.daemon.pipe.settings import WorkerSettings
from motley.daemon.worker.process import main

TOKEN = bytes(range(TOKEN_BYTES))


@pytest.mark.parametrize(("said", "status"), [(b"", 0), (LENGTH.pack(100) + b"half of a command", 1)])
def test_a_daemon_that_is_gone_is_an_end_and_one_that_hangs_an_error(
    said: bytes,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(worker_end, "STALL_S", 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        settings = WorkerSettings(
            server.getsockname()[1], TOKEN.hex(), str(tmp_path), 0, None, "127.0.0.1", threads=1, core=None
        )
        monkeypatch.setattr(sys, "stdin", io.StringIO(settings.to_line().decode()))
        ended = threading.Event()

        def accept() -> None:
            other, _ = server.accept()
            with closing(other):
                assert other.recv(TOKEN_BYTES, socket.MSG_WAITALL) == TOKEN
                other.sendall(said)
                if said:
                    assert ended.wait(20.0)

        daemon = threading.Thread(target=accept)
        daemon.start()
        assert main() == status
        ended.set()
        daemon.join()
    assert ("has not gone on with a command" in caplog.text) == bool(said)
