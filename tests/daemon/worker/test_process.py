"""How worker processes and others end, as their exit status tells, also when their daemon is killed."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from motley.daemon.node.workers.worker import RankWorker
from motley.daemon.pipe import worker_end
from motley.daemon.pipe.framing import LENGTH, TOKEN_BYTES
from motley.daemon.pipe.settings import WorkerSettings
from motley.daemon.weights.cache import ShareCache
from motley.daemon.worker import process
from motley.daemon.worker.process import main

TOKEN = bytes(range(TOKEN_BYTES))
ROOT = Path(__file__).parents[3]
END_S = 30.0


@pytest.mark.parametrize(("said", "status"), [(b"", 0), (LENGTH.pack(100) + b"half of a command", 1)])
def test_a_daemon_that_is_gone_is_an_end_and_one_that_hangs_an_error(
    said: bytes,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(worker_end, "STALL_S", 0.2)
    monkeypatch.setattr(process, "end_with_owner", lambda: None)  # this process's is the test's
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


async def test_a_worker_that_looks_at_nothing_ends_with_its_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    worker = await RankWorker.start(cache=ShareCache(tmp_path), entry=("tests.daemon.worker.stuck_worker",))
    try:
        async with asyncio.timeout(END_S):
            assert (await anext(worker.events())).listening == 1
            assert isinstance(worker._process, asyncio.subprocess.Process)
            assert worker._process.stdin is not None
            worker._process.stdin.close()  # as when the daemon is killed
            assert await worker.exit_status() == 1
    finally:
        await worker.stop()


FETCHES_FOR_EVER = """
import sys, threading
from motley.daemon.node import borrowing

class Borrower:
    def __init__(self, *given):
        print("begun", flush=True)
        threading.Event().wait()

borrowing.Borrower = Borrower
sys.exit(borrowing.main())
"""


def test_what_borrows_a_model_ends_with_its_daemon_before_all_has_come(tmp_path: Path) -> None:
    told = {"loan": "", "shares": str(tmp_path), "limit": 0}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", FETCHES_FOR_EVER], stdin=pipe, stdout=pipe) as borrowing:
        assert borrowing.stdin is not None
        assert borrowing.stdout is not None
        try:
            borrowing.stdin.write(json.dumps(told).encode() + b"\n")
            borrowing.stdin.flush()
            assert borrowing.stdout.readline() == b"begun\n"
            borrowing.stdin.close()
            assert borrowing.wait(END_S) == 1
        finally:
            borrowing.kill()
