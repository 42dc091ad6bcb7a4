"""What ranks may use of this machine, as `motley join` was told the last time; a node of another name has its own."""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from motley.cli.reaching.home import home
from motley.cli.typed.options import ALL
from motley.daemon.machine.files import locked
from motley.protocol.files import write_private

LOCK_S = 5.0
"""Whoever has the file's lock has it for no longer than it takes to write a few lines."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What was typed, in the words in which it was.

    Attributes:
        memory, gpu_memory: a size; empty: whatever is there.
        threads: 0: every usable core.
    """

    memory: str = ""
    gpu_memory: str = ""
    threads: int = 0

    def changed(self, memory: str | None, gpu_memory: str | None, threads: int | None) -> Limits:
        """These, with what is typed now in the place of what was; None: nothing is."""
        return Limits(
            self.memory if memory is None else _size(memory),
            self.gpu_memory if gpu_memory is None else _size(gpu_memory),
            self.threads if threads is None else threads,
        )

    def left(self, memory: str | None, gpu_memory: str | None, threads: int | None) -> Limits:
        """Those of these in whose place nothing is typed now."""
        return Limits(
            self.memory if memory is None else "",
            self.gpu_memory if gpu_memory is None else "",
            self.threads if threads is None else 0,
        )

    @property
    def options(self) -> str:
        """The options that say the same, for people: ``--memory 6GB --threads 2``."""
        words = []
        for option, value in (
            ("--memory", self.memory),
            ("--gpu-memory", self.gpu_memory),
            ("--threads", str(self.threads or "")),
        ):
            words += [option, value] if value else []
        return shlex.join(words)


def last_limits(node: str) -> Limits:
    """Those of a node name the last time; none if it never joined, or that cannot be read."""
    match _read().get(node):
        case {"memory": str(memory), "gpu_memory": str(gpu_memory), "threads": int(threads)}:
            return Limits(memory, gpu_memory, threads)
    return Limits()


def keep_limits(node: str, limits: Limits) -> None:
    """Write down those of a node name for the next time; that it cannot be is logged."""
    try:
        with locked(_file().with_suffix(".lock"), LOCK_S):  # another daemon may keep its own at the same time
            write_private(_file(), json.dumps({**_read(), node: asdict(limits)}).encode())
    except OSError as error:
        _log.warning("what ranks may use here is not remembered: %s", error)


def _size(typed: str) -> str:
    return "" if typed == ALL else typed


def _file() -> Path:
    return home() / "limits.json"


def _read() -> dict[str, object]:
    """By node name, what its file says."""
    try:
        told = json.loads(_file().read_bytes())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}
