"""Which of a command's options somebody has typed, and which have their defaults."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import typer

from motley.cli.errors import CliError


def typed(command: typer.Context) -> dict[str, str]:
    """By parameter, the option as people type it, of those that the command line has; an argument by its name."""
    options = {each.name or "": each.opts[0] for each in command.command.params}
    return {name: option for name, option in options.items() if _source(command, name) == "COMMANDLINE"}


def left_alone(command: typer.Context, name: str) -> bool:
    """Whether nothing says what a parameter is, the command line as little as the environment."""
    return _source(command, name) == "DEFAULT"


def refuse(given: Mapping[str, str], names: Collection[str], why: str) -> None:
    """
    Args:
        given: what `typed` found.

    Raises:
        CliError: one of these parameters is given, and has no effect; it is named.
    """
    if found := [option for name, option in given.items() if name in names]:
        raise CliError(f"{', '.join(found)}: {why}")


def _source(command: typer.Context, name: str) -> str:
    return getattr(command.get_parameter_source(name), "name", "")
