"""The commands of `motley`, put together once in a process and not each time that one of them is run."""

from __future__ import annotations

from functools import cache

import typer.main


def keep_command_tree() -> None:
    """Have Typer read the signatures of all commands once: a tenth of a second of a processor."""
    typer.main.get_command = cache(typer.main.get_command)
