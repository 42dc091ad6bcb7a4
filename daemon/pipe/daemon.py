"""What a worker has to do with its daemon: commands that come from it, and events that it is told."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

from motley.daemon.pipe.worker_end import WorkerPipe
from motley.protocol import mesh_pb2 as pb
from motley.protocol.worker_pb2 import WorkerCommand, WorkerEvent

Commands: TypeAlias = Callable[[float], Iterable[WorkerCommand]]
"""Gives the daemon's commands that are there, waiting for the first of them up to so many seconds."""
Tell: TypeAlias = Callable[..., None]
"""Tells the daemon an event as `Daemon.tell` does: ``tell(ready=Ready(...))``."""
Together: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Has the daemon told in one piece what is told meanwhile, as `Daemon.together` does."""


class Released(Exception):
    """The daemon wants this worker to end."""


class OrderError(Exception):
    """What this worker needs to start has not come; the message says what."""


class Daemon:
    """The daemon of a worker, at the other end of its pipe. One thread at a time uses it.

    Attributes:
        placement: the newest one that has come; one without hosts, of version 0, before that.
        on_placement: called with every placement that comes, as commands are taken; they are no business of whoever
            takes the commands.
    """

    def __init__(self, pipe: WorkerPipe) -> None:
        """`pipe` stays the caller's to close."""
        self.placement = pb.Placement()
        self.on_placement: Callable[[pb.Placement], None] = lambda placement: None
        self._pipe = pipe
        self._kept: deque[WorkerCommand] = deque()
        """Commands that came while a step waited for experts."""
        self._together: list[WorkerEvent] | None = None
        """Events that are told together; None: each is told at once."""

    def fileno(self) -> int:
        """What to wait for, beside others: it can be read when a command is there."""
        return self._pipe.fileno()

    def tell(self, **event: Any) -> None:
        """Send an event: a field of `WorkerEvent`, by name.

        Raises:
            PipeClosed: the daemon is gone.
            PipeStalled: it has not read for `motley.daemon.pipe.worker_end.STALL_S`.
        """
        told = WorkerEvent(**event)
        if self._together is None:
            self._pipe.send(told)
        else:
            self._together.append(told)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Send what is told meanwhile in one piece, at the end: tokens of many requests come at a time, and each piece
        wakes the daemon. Errors as `tell`."""
        assert self._together is None, "events are told together already"
        self._together = []
        try:
            yield
        finally:
            told, self._together = self._together, None
            if told:
                self._pipe.send(*told)

    def commands(self, timeout_s: float) -> Iterator[WorkerCommand]:
        """Take the commands that are there, in order, waiting up to `timeout_s` for the first.

        Raises:
            Released: one of them is a release.
            PipeClosed: the daemon is gone.
        """
        while self._kept:
            yield self._kept.popleft()
            timeout_s = 0.0
        yield from self._received(timeout_s)

    def keep_commands(self, timeout_s: float) -> None:
        """Look for commands, waiting up to `timeout_s`, but leave them for the next call of `commands`. Placements are
        adopted at once; errors as `commands`."""
        self._kept.extend(self._received(timeout_s))

    def wait_for(self, body: str, timeout_s: float) -> WorkerCommand:
        """Wait for a command of one kind, a field of `WorkerCommand` by name; others that come meanwhile are dropped.

        Raises:
            OrderError: it has not come within `timeout_s`.
            Exception: what `commands` raises.
        """
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            for command in self.commands(left):
                if command.WhichOneof("body") == body:
                    return command
        raise OrderError(f"the orchestrator has not sent {body!r} within {timeout_s:.0f} s")

    def _received(self, timeout_s: float) -> Iterator[WorkerCommand]:
        while self._pipe.poll(timeout_s):
            command = self._pipe.receive()
            match command.WhichOneof("body"):
                case "release":
                    raise Released
                case "placement":
                    self.placement = max(self.placement, command.placement, key=lambda placement: placement.version)
                    self.on_placement(self.placement)
                case _:
                    yield command
            timeout_s = 0.0
