"""What the service of this machine runs: the words of a `motley` command, in a file that only its owner can read.

The token is in no unit file and no command line, which other users of the machine could read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from motley.cli.errors import CliError
from motley.cli.reaching.home import home
from motley.protocol.files import write_private


@dataclass(frozen=True)
class ServiceSettings:
    """What a service runs.

    Attributes:
        arguments: of `motley`: ``up``, or ``join`` with an address, and their options.
        token: a join token; empty: none is needed.
    """

    arguments: Sequence[str]
    token: str = ""


def settings_file() -> Path:
    """Where the settings are kept."""
    return home() / "service.json"


def log_file() -> Path:
    """Where a service says what it does, on systems that keep no such log."""
    return home() / "service.log"


def save(settings: ServiceSettings) -> None:
    """Keep the settings for the next start.

    Raises:
        CliError: they cannot be kept.
    """
    told = {"arguments": list(settings.arguments), "token": settings.token}
    try:
        write_private(settings_file(), json.dumps(told).encode())
    except OSError as error:
        raise CliError(f"the service's settings cannot be kept in {settings_file()}: {error}") from error


def load() -> ServiceSettings:
    """The settings that were kept.

    Raises:
        CliError: there are none, or they cannot be read.
    """
    try:
        told = json.loads(settings_file().read_text("utf-8"))
        return ServiceSettings([str(word) for word in told["arguments"]], str(told["token"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{settings_file()} cannot be read ({type(error).__name__}): run `motley service install` again"
        raise CliError(why) from error
