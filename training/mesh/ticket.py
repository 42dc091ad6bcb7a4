"""What somebody wants trained, as a file on his own machine: its daemon leads the job for whoever knows the name.

So an orchestrator cannot have a machine read what nobody there has named, and never learns what that is.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from motley.protocol.files import write_private
from motley.training.errors import TrainingError
from motley.training.settings import How, Settings


@dataclass(frozen=True)
class Ticket:
    """
    Attributes:
        data: a file of examples, see `motley.training.lines`.
        held_out: a file to evaluate with; None: a share of `data`.
        template: a chat template to use instead of the model's.
        out: the folder for the adapter.
        settings: of the training.
        keep_every: steps between two checkpoints.
        how: adapters are merged, where they are.
        patience_s: a node that cannot be reached for so long is left out.
        turn: where several have data for a chain, each leads for so many steps; 0: all at once.
        last: of a chain, so many of the last layers are at whoever has the data, too.
        offered: it is for the chain of somebody else, who leads; the data stays here. Else this machine leads.
    """

    data: Path
    held_out: Path | None
    template: Path | None
    out: Path
    settings: Settings
    keep_every: int
    how: How
    patience_s: float
    turn: int = 0
    last: int = 0
    offered: bool = False

    @classmethod
    def read(cls, told: dict[str, Any]) -> Ticket:
        """
        Raises:
            TrainingError: it is none.
        """
        try:
            names = ("data", "held_out", "template", "out")
            places = {name: Path(told[name]) if told[name] else None for name in names}
            return cls(**told | places | {"settings": read_settings(told["settings"]), "how": How(told["how"])})
        except (KeyError, TypeError, ValueError) as error:
            raise TrainingError(f"the ticket is none: {type(error).__name__}: {error}") from error

    def leave(self, folder: Path) -> str:
        """Write it down in the folder that the daemon knows; returns its name.

        Raises:
            TrainingError: it cannot be written.
        """
        name = secrets.token_hex(16)
        told = asdict(self) | {key: str(value) for key, value in vars(self).items() if isinstance(value, Path)}
        try:
            write_private(folder / f"{name}.json", json.dumps(told).encode())
        except OSError as error:
            raise TrainingError(f"{folder}: cannot be written: {error.strerror or error}") from error
        return name


def read_settings(told: dict[str, Any]) -> Settings:
    """Settings as JSON has them.

    Raises:
        TypeError, ValueError: they are none.
    """
    lists = {field.name for field in fields(Settings) if isinstance(getattr(Settings, field.name), tuple)}
    read: dict[str, Any] = {name: tuple(value) if name in lists else value for name, value in told.items()}
    return Settings(**read)
