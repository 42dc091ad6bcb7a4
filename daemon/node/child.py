"""Child processes that run a module of ours.

They are out of the terminal's reach: Ctrl-C is for their owner, who ends them in order. Their standard input is a pipe,
which ends when the owner does, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

GONE_S = 10.0
"""A process that was killed is waited for so long."""

_log = logging.getLogger(__name__)


async def start_child(
    *entry: str,
    env: Mapping[str, str] | None = None,
    stdout: int | None = None,
    stderr: int | IO[bytes] | None = None,
) -> asyncio.subprocess.Process:
    """Start ``python -m`` with a module and its arguments.

    Args:
        env, stdout, stderr: this process's unless they are given.
    """
    command, pipe = _command(entry), subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, env=env, stdin=pipe, stdout=stdout, stderr=stderr, **_apart())


def start_blocking_child(*entry: str) -> subprocess.Popen[bytes]:
    """Start a child like `start_child`, for a thread that writes to its input and waits for its output."""
    return subprocess.Popen(_command(entry), stdin=subprocess.PIPE, stdout=subprocess.PIPE, **_apart())


def _command(entry: Sequence[str]) -> list[str]:
    return [sys.executable, "-P", "-m", *entry]


def _apart() -> dict[str, Any]:
    """What takes a child out of the terminal's reach."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    else:  # a session, not only a group: a terminal may stop groups in its background that write to it
        return {"start_new_session": True}


class Child(Protocol):
    """A child process, as `asyncio.subprocess.Process` has it."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def kill(self) -> None: ...

    async def wait(self) -> int: ...


async def ask_child(process: asyncio.subprocess.Process, order: Mapping[str, Any]) -> Any:
    """Give a child an order, a line of JSON, and hear its answer, which is one, too; None: it ended without any."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(order).encode() + b"\n")
    return json.loads(await process.stdout.readline() or "null")


async def kill_child(process: Child) -> None:
    """End a child that may still run at once, and wait until it is gone; not for ever, as one that waits for a driver
    or a disk which hangs stays until that answers."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        try:
            async with asyncio.timeout(GONE_S):
                await process.wait()
        except TimeoutError:
            _log.warning("process %d was killed, and is there: a driver or a disk of this machine hangs", process.pid)
