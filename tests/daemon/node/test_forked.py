"""Workers that are forked from a process which has imported all: as if each had been started by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

if sys.platform != "linux":
    pytest.skip("nothing is forked here", allow_module_level=True)

from motley.daemon.node.workers import forked
from motley.daemon.node.workers.forked import ForkedWorker, ForkServer, end_fork_server, fork_worker
from motley.daemon.node.workers.worker import RankWorker
from motley.daemon.weights.cache import ShareCache

ROOT = Path(__file__).parents[3]
END_S = 30.0


async def forked_worker() -> ForkedWorker:
    worker = await fork_worker(dict(os.environ))
    assert worker is not None
    return worker


async def status_of(worker: ForkedWorker) -> int:
    async with asyncio.timeout(END_S):
        return await worker.wait()


async def test_a_worker_is_forked_and_ends_as_one_that_was_started(tmp_path: Path) -> None:
    worker = await RankWorker.start(cache=ShareCache(tmp_path))
    process = psutil.Process(worker.pid)
    assert "motley.daemon.worker.fork_server" in process.cmdline()
    assert process.name() == "motley-worker"
    assert os.getsid(worker.pid) == worker.pid, "out of the terminal's reach"
    await worker.stop()
    assert await worker.exit_status() == 0
    assert not process.is_running()


async def test_its_status_is_that_of_its_end() -> None:
    killed, unread = await forked_worker(), await forked_worker()
    killed.kill()
    unread.write(b"no settings\n")
    assert await status_of(killed) == killed.returncode == -signal.SIGKILL
    assert await status_of(unread) == 1
    killed.kill()  # of no effect, as it is gone


async def test_it_has_the_environment_and_the_files_of_whoever_wants_it(capfd: pytest.CaptureFixture[str]) -> None:
    server = ForkServer("tests.daemon.node.telling_worker")
    for told in ("first", "second"):  # who forks has the environment and the files of the first
        worker = await fork_worker({**os.environ, "PYTHONPATH": str(ROOT), "TOLD": told}, server)
        assert worker is not None
        worker.write(b"a line\n")
        assert await status_of(worker) == 7
        assert capfd.readouterr() == (f"{told} a line\n", "to stderr\n")
    server.end()


async def test_it_can_write_to_a_pipe_where_the_process_that_forks_has_a_file(
    capfd: pytest.CaptureFixture[str],
) -> None:
    server = ForkServer("tests.daemon.node.telling_worker")  # whose output is the file that is captured
    read, write = os.pipe()
    worker = await fork_worker({**os.environ, "PYTHONPATH": str(ROOT), "TOLD": "told"}, server, write)
    os.close(write)
    assert worker is not None
    worker.write(b"a line\n")
    assert await status_of(worker) == 7, capfd.readouterr().err
    assert os.read(read, 100) == b"told a line\n"
    os.close(read)
    server.end()


async def test_it_has_nothing_open_of_other_workers() -> None:
    first, second = await forked_worker(), await forked_worker()
    os.close(first._stdin)
    first._stdin = os.open(os.devnull, os.O_WRONLY)
    assert await status_of(first) == 1, "its standard input has ended, though another was forked since"
    second.kill()
    await status_of(second)


async def test_no_worker_outlives_the_process_that_forks() -> None:
    """Nobody would learn of its end any more. Others can begin."""
    worker = await forked_worker()
    process = psutil.Process(worker.pid)
    server = forked._server._process
    assert server is not None
    server.kill()
    assert await status_of(worker) == -signal.SIGKILL
    await asyncio.to_thread(process.wait, END_S)
    server.wait()
    again = await forked_worker()
    process = psutil.Process(again.pid)
    end_fork_server()
    assert await status_of(again) == -signal.SIGKILL
    await asyncio.to_thread(process.wait, END_S)


async def test_a_process_that_does_not_fork_in_time_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServer("tests.daemon.node.sleeping_server")
    monkeypatch.setattr(forked, "BEGIN_S", 0.2)
    assert await fork_worker({**os.environ, "PYTHONPATH": str(ROOT)}, server) is None
    assert server._process is not None
    assert server._process.returncode is not None


async def test_a_worker_that_nobody_waits_for_any_more_ends() -> None:
    worker = await forked_worker()  # so that the next one begins at once
    wanted = asyncio.create_task(fork_worker(dict(os.environ)))
    await asyncio.sleep(0)
    wanted.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wanted
    server = forked._server._process
    assert server is not None
    children = [child for child in psutil.Process(server.pid).children() if child.pid != worker.pid]
    await asyncio.to_thread(psutil.wait_procs, children, END_S)
    assert not [child for child in children if child.is_running()]
    worker.kill()
    await status_of(worker)
