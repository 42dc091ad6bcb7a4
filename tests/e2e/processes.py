"""Real `motley` processes for tests: started as a user would, read by what they print, ended with the test."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, ClassVar, Self

import psutil
import pytest

import motley.cli
from motley.cli.main import main
from motley.cli.reaching.client import Client
from motley.cli.shown import show
from motley.daemon.node.workers.worker import ENTRY
from tests.e2e import forks
from tests.e2e.command_tree import keep_command_tree

READ_AT_LOADING = {"COLUMNS": "200", "VK_DRIVER_FILES": os.environ.get("VK_DRIVER_FILES"), "PYTHONPATH": None}
"""What modules read while they load, as it is where commands are forked from; None: commands have none."""

if sys.platform == "linux":
    from motley.daemon.node.workers.forked import ForkedWorker, ForkServer, fork_worker

    _forks = ForkServer("tests.e2e.forks", {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(forks.ROOT)})
    atexit.register(_forks.end)

keep_command_tree()  # for `command`

ROOT = forks.ROOT
BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"
FORK_SERVER = "motley.daemon.worker.fork_server"
START_S = 120.0
END_S = 120.0
COMMAND_S = 240.0


class ForkedProcess:
    """A command that is forked from a process which has imported it; used as an `asyncio.subprocess.Process` is."""

    def __init__(self, worker: ForkedWorker, stdout: asyncio.StreamReader | None, stderr: asyncio.StreamReader) -> None:
        self._worker = worker
        self.stdout, self.stderr = stdout, stderr
        self.pid, self.wait, self.kill = worker.pid, worker.wait, worker.kill

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: dict[str, str], stdin: str = "", *, reads_output: bool
    ) -> Self:
        """
        Args:
            command: one of `forks.MODULES`, and arguments.
            stdin: all that it can read there; a few lines.
        """
        stderr, errors = await _pipe()
        stdout, output = await _pipe() if reads_output else (None, os.open(os.devnull, os.O_WRONLY))
        try:
            environment = {**environment, forks.COMMAND: json.dumps(command)}
            worker = await fork_worker(environment, _forks, output, errors)
        finally:
            os.close(output)
            os.close(errors)
        assert worker is not None, "nothing can be forked"
        worker.write(stdin.encode())
        worker.end_input()
        return cls(worker, stdout, stderr)

    @staticmethod
    def can_be(module: str, environment: Mapping[str, str]) -> bool:
        """Whether a command may be such a process: not if its modules would read something else while they load."""
        alike = all(environment.get(name) == value for name, value in READ_AT_LOADING.items())
        return sys.platform == "linux" and module in forks.MODULES and alike

    @property
    def returncode(self) -> int | None:
        return self._worker.returncode

    def send_signal(self, signal: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and nobody has been told yet
                os.kill(self.pid, signal)

    async def communicate(self) -> tuple[bytes, bytes]:
        assert self.stdout is not None
        out, err, _ = await asyncio.gather(self.stdout.read(), self.stderr.read(), self.wait())
        return out, err


async def _pipe() -> tuple[asyncio.StreamReader, int]:
    """A pipe: what reads from it, and the file that is written to."""
    reads, writes = os.pipe()
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reads, "rb", buffering=0))
    return reader, writes


class MotleyProcess:
    """One `motley` command under way; its stderr is kept line by line."""

    started: ClassVar[list[MotleyProcess]] = []
    """By tests and by what they share; what a test has started and left is killed at its end."""

    def __init__(self, process: asyncio.subprocess.Process | ForkedProcess, environment: dict[str, str]) -> None:
        self.started.append(self)
        self.environment = environment
        self.process = process
        self.lines: list[str] = []
        self._grown = asyncio.Condition()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        *arguments: str,
        entry: str = "motley.cli.main",
        own_group: bool = False,
        on: Sequence[str] = (),
        **environment: str,
    ) -> Self:
        """
        Args:
            entry: the module that is run.
            own_group: it leads a process group, as a shell's command does.
            on: a command that becomes the one given to it, on another machine (`House.on`).
        """
        # A home of its own: what one mesh leaves there, no command of another test should find.
        home = tempfile.mkdtemp(dir=os.environ["MOTLEY_HOME"])
        surroundings = {**os.environ, "COLUMNS": "200", "MOTLEY_HOME": home, **environment}
        if not (own_group or on) and ForkedProcess.can_be(entry, surroundings):
            forked = await ForkedProcess.start([entry, *arguments], surroundings, reads_output=False)
            return cls(forked, surroundings)
        process = await asyncio.create_subprocess_exec(
            *(*on, sys.executable, "-m", entry, *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env=surroundings,
            process_group=0 if own_group else None,
        )
        return cls(process, surroundings)

    async def line(self, pattern: str) -> re.Match[str]:
        """The first line, past or to come, in which `pattern` is found."""
        async with asyncio.timeout(START_S), self._grown:
            while True:
                for line in self.lines:
                    if found := re.search(pattern, line):
                        return found
                if self._reader.done():
                    raise AssertionError(f"{pattern!r} was never printed:\n" + "\n".join(self.lines))
                await self._grown.wait()

    def family(self) -> list[psutil.Process]:
        """This process and all it has started."""
        itself = psutil.Process(self.process.pid)
        return [itself, *itself.children(recursive=True)]

    def workers(self) -> list[psutil.Process]:
        """The worker processes of it and of all it has started."""
        members = {member.pid: member for member in self.family()}
        forking = {pid for pid, member in members.items() if FORK_SERVER in member.cmdline()}
        forking |= {pid for pid, member in members.items() if member.name() == forks.FORKS}
        forked = [each for each in members.values() if each.ppid() in forking and each.name() != forks.NO_WORKER]
        return forked + [each for each in members.values() if ENTRY[0] in each.cmdline()]

    async def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and wait for its end."""
        if self.process.returncode is None:
            self.process.send_signal(how)
        return await self.wait()

    async def wait(self) -> int:
        """Wait for its end, which something else has brought about."""
        async with asyncio.timeout(END_S):
            status = await self.process.wait()
            await self._reader
        return status

    async def kill(self) -> None:
        """End it and all it has started, whatever they do."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for member in self.family():
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        await self.process.wait()
        await self._reader

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            async with self._grown:
                self.lines.append(line.decode().rstrip())
                self._grown.notify_all()
        async with self._grown:
            self._grown.notify_all()


def chatting_model(folder: Path) -> Path:
    """The bundled model, copied to a folder, with a chat template."""
    model = folder / "chatting"
    shutil.copytree(BUNDLED, model)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    return model


async def motley(*arguments: str, stdin: str = "", **environment: str) -> tuple[int, str, str]:
    """Run a command to its end: status, stdout, stderr."""
    surroundings = {**os.environ, "COLUMNS": "200", "TERM": "dumb", **environment}
    process: asyncio.subprocess.Process | ForkedProcess
    if ForkedProcess.can_be("motley.cli.main", surroundings):
        process = await ForkedProcess.start(["motley.cli.main", *arguments], surroundings, stdin, reads_output=True)
        said = process.communicate()
    else:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "motley.cli.main", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=surroundings,
        )
        said = process.communicate(stdin.encode())
    try:
        async with asyncio.timeout(COMMAND_S):
            out, err = await said
    except BaseException:
        process.kill()
        await process.wait()
        raise
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def command(*arguments: str, stdin: str = "", **environment: str) -> tuple[int, str, str]:
    """Run a command to its end in this process, where its modules are loaded already: status, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    status: object = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("COLUMNS", "200")
        patch.setenv("TERM", "dumb")
        for console in (show.console, show.results):  # whose width is that of whoever loaded them
            patch.setattr(console, "width", 200)
        patch.setattr(sys, "argv", ["motley", *arguments])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
    assert isinstance(status, int)
    return status, out.getvalue(), err.getvalue()


async def in_thread(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """As `command`, for a test whose event loop the command wants an answer of; one at a time.

    Signals, which only a main thread can wait for, it does not see.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.SelectorEventLoop, "add_signal_handler", lambda *_: None)
        async with asyncio.timeout(COMMAND_S):
            return await asyncio.to_thread(command, *arguments, **environment)


def said_json(*arguments: str, **environment: str) -> dict[str, Any]:
    """The JSON that a command ends with, which is run in this process."""
    status, out, err = command(*arguments, "--json", **environment)
    assert status == 0, err
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer


async def last_json(*arguments: str, **environment: str) -> dict[str, Any]:
    """The JSON that a command ends with, which is a process of its own."""
    status, out, err = await motley(*arguments, "--json", **environment)
    assert status == 0, err
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer


class Mesh:
    """An orchestrator and its nodes, all on loopback."""

    def __init__(self, orchestrator: MotleyProcess, url: str, target: str, token: str, cache: Path) -> None:
        self.orchestrator = orchestrator
        self.url = url
        self.target = target
        self.token = token
        self.nodes: dict[str, MotleyProcess] = {}
        self.cache = cache

    async def join(
        self,
        name: str,
        memory: str = "2GB",
        cache: Path | None = None,
        on: Sequence[str] = (),
        models: Path | None = None,
        **environment: str,
    ) -> MotleyProcess:
        arguments = ("join", self.target, "--name", name, "--memory", memory, "--threads", "1")
        where = ("--cache", str(cache or self.cache), *(("--models", str(models)) if models else ()))
        environment["MOTLEY_TOKEN"] = self.token
        node = await MotleyProcess.start(*arguments, *where, entry="tests.e2e.node", on=on, **environment)
        self.nodes[name] = node
        await node.line("joined as")
        return node

    async def session(self, **wanted: Any) -> dict[str, Any]:
        """A ready session of the bundled model, in fp32 unless said otherwise."""
        body = {"model": str(BUNDLED), "quantisation": "fp32", **wanted}
        async with Client(self.url) as client:
            return await client.call("POST", "/api/sessions?wait=ready", body)


@asynccontextmanager
async def mesh(
    folder: Path,
    *names: str,
    host: str = "127.0.0.1",
    entry: str = "motley.cli.main",
    rebalance_at: str = "0",
    **environment: str,
) -> AsyncIterator[Mesh]:
    """A mesh with these nodes; whatever still runs at the end is ended.

    Args:
        host: where nodes reach the orchestrator.
        entry: the module that is run as the orchestrator, with this environment.
        rebalance_at: what idle sessions must save to be planned anew by themselves.
    """
    where = ("--host", host, "--port", "0", "--http-port", "0", "--state", str(folder / "state"))
    where += ("--rebalance-at", rebalance_at, "--no-announce")  # else whoever looks for a mesh finds this one, too
    orchestrator = await MotleyProcess.start("up", "--no-node", *where, entry=entry, **environment)
    made: Mesh | None = None
    try:
        url = (await orchestrator.line(r"API: (http://\S+)/v1"))[1]
        join = await orchestrator.line(r"motley join (\S+) --token (\S+)")
        made = Mesh(orchestrator, url, join[1], join[2], folder / "cache")
        await asyncio.gather(*(made.join(name) for name in names))
        yield made
    finally:
        for process in [*(made.nodes.values() if made else ()), orchestrator]:
            await process.end()
