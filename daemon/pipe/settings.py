"""What a worker process is told on its standard input when it starts: a line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class WorkerSettings:
    """How a worker process reaches its daemon, and what it may use on this machine.

    Attributes:
        port: of the daemon's end of the pipe, on loopback.
        token: hex digits that prove to the daemon that this is its worker.
        cache: the folder where shares are kept.
        cache_limit: bytes that they may take there.
        models: the folder in which model names are looked up; None: there is none.
        host: the address that the worker's data plane listens on.
        ports: the first and the last that it may listen on; (0, 0): any.
        threads: compute threads, where the assignment does not say.
        core: the usable core to stay on, by number; None: wherever the system likes.
    """

    port: int
    token: str
    cache: str
    cache_limit: int
    models: str | None
    host: str
    threads: int
    core: int | None
    ports: tuple[int, int] = (0, 0)

    def to_line(self) -> bytes:
        """Write the settings as a line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: str) -> WorkerSettings:
        """Read what `to_line` has written."""
        told = json.loads(line)
        first, last = told.pop("ports")
        return cls(**told, ports=(first, last))
