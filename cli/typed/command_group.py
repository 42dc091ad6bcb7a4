"""How commands are grouped, and how their ``--help`` looks.

It is plain text in two columns. The boxes that Typer draws otherwise leave a terminal of 80 columns some 20 for what an
option means, as names, types and ranges stand beside each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperGroup

Function = TypeVar("Function", bound=Callable[..., Any])

HELP_WIDTH = 100
"""Columns that help takes at most; longer lines are hard to read."""
AS_IT_IS = "\b\n"
"""Before a paragraph of help: its lines are not joined."""

_ALSO = {"list": "ls", "remove": "rm"}
"""What else commands may be called by those who have not looked it up."""


class _Listed(TyperGroup):
    """A group whose help has the whole first sentence of each command's, in as many lines as that takes, and which says
    what other commands have an option that a command lacks."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            _point_to_others(error, self, ctx)
            raise

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, _ALSO.get(cmd_name, cmd_name))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, _first_sentence(each.help or "")) for name, each in commands if each and not each.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class CommandGroup(typer.Typer):
    """A group of commands, which shows its help if it is given none of them."""

    def __init__(self, about: str, examples: str = "", name: str | None = None) -> None:
        """
        Args:
            about: what the commands are for, in a line.
            examples: ``Examples: ...``, with three spaces between two of them.
        """
        super().__init__(
            name=name,
            cls=_Listed,
            help=about,
            epilog=_a_line_each(examples),
            no_args_is_help=True,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
            context_settings={"max_content_width": HELP_WIDTH},
        )

    def command(
        self, name: str | None = None, *, epilog: str | None = None, **settings: Any
    ) -> Callable[[Function], Function]:
        """As Typer has it; `epilog` as the examples above."""
        return super().command(name, epilog=_a_line_each(epilog or ""), **settings)


def _point_to_others(error: Any, group: Any, ctx: Any) -> None:
    """Have an error tell what commands have the option that one lacks, if it is about one."""
    unknown = hasattr(error, "possibilities")  # as Click's `NoSuchOption` has, of which newer Typers bring a copy
    if ctx.parent is None and unknown and (others := _commands_with(error.option_name, group, ctx.info_name)):
        error.message += f" (it is one of: {', '.join(others)})"
        error.possibilities = None  # which only sound alike


def _commands_with(option: str, group: Any, name: str) -> list[str]:
    """The commands of a group, as typed, that have an option; measurements have many, and are left out."""
    return [
        f"`{name} {word}`"
        for word, command in group.commands.items()
        if word != "bench" and any(option in parameter.opts for parameter in command.params)
    ]


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s|\n\n", text.strip(), maxsplit=1)[0].replace("\n", " ")


def _a_line_each(examples: str) -> str | None:
    if not examples:
        return None
    head, _, rest = examples.partition(": ")
    return "\n  ".join([f"{AS_IT_IS}{head}:", *re.split(" {3,}", rest)])
