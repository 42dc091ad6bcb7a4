"""A service as a system knows it: a file that describes it, and the commands that begin and end it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from motley.cli.errors import CliError

COMMAND_S = 60.0
"""A command of the system's has so many seconds."""
Command = Sequence[str]


@dataclass(frozen=True)
class Manager:
    """How a system runs the service.

    Attributes:
        file: that describes it; `content` is what it says.
        known: succeeds if the system knows the service; None: its file tells that.
        end: end what runs of it now, before it is begun anew or stopped.
        start: begin it, now and whenever this user, or the machine, starts.
        stop: end it for good, before its file is removed.
        stopped: tell the system that the file is gone.
        state: says how it stands; its exit status counts for nothing.
        logs: says what it has said, so many lines; None: that is in a file of its own.
        hint: what a person may want to do besides.
    """

    file: Path
    content: bytes
    known: Command | None
    end: Sequence[Command]
    start: Sequence[Command]
    stop: Sequence[Command]
    stopped: Sequence[Command]
    state: Command
    logs: Command | None
    hint: str

    def install(self) -> None:
        """Begin the service, in the place of one that is there.

        Raises:
            CliError: the system refuses.
        """
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_bytes(self.content)
        except OSError as error:
            raise CliError(f"{self.file} cannot be written: {error}") from error
        ending = self.end if self._is_known() else ()
        for command in (*ending, *self.start):
            run(command)

    def uninstall(self) -> None:
        """End the service for good.

        Raises:
            CliError: there is none, or the system refuses.
        """
        if not self.file.exists():
            raise CliError(f"there is no service: {self.file} does not exist")
        stopping = (*self.end, *self.stop) if self._is_known() else ()  # somebody may have removed it by hand
        for command in stopping:
            run(command)
        self.file.unlink()
        for command in self.stopped:
            run(command)

    def _is_known(self) -> bool:
        if self.known is None:
            return True
        try:
            run(self.known)
        except CliError:
            return False
        return True


def run(command: Command) -> None:
    """Run a command of the system's, whose words come through if it fails.

    Raises:
        CliError: it fails.
    """
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_S, text=True, errors="replace")
    except FileNotFoundError:
        raise CliError(f"there is no {command[0]} on this machine, which services are run by") from None
    except subprocess.TimeoutExpired:
        raise CliError(f"`{' '.join(command)}` did not end within {COMMAND_S:.0f} s") from None
    except subprocess.CalledProcessError as error:
        why = (error.stderr or error.stdout or f"exit status {error.returncode}").strip()
        raise CliError(f"`{' '.join(command)}` failed: {why}") from error


def show(command: Command) -> None:
    """Run a command of the system's, which talks to whoever reads this one's output; errors as `run`."""
    try:
        subprocess.run(command, check=False)
    except FileNotFoundError:
        raise CliError(f"there is no {command[0]} on this machine, which services are run by") from None
