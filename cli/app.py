"""All commands in one app, a file per group of them; `commands/` has a room for each concern."""

from __future__ import annotations

from typing import Annotated

import typer

from motley.cli.commands.answering import adapters, chat, run
from motley.cli.commands.bench import group as bench
from motley.cli.commands.demo import group as demo
from motley.cli.commands.machine import cache, devices, doctor, join, lease, service, up
from motley.cli.commands.mesh import access, budget, experts, plan, rearrange, status, update
from motley.cli.commands.models import group as models
from motley.cli.commands.training import jobs, train
from motley.cli.typed.command_group import CommandGroup

app = CommandGroup("Your mismatched machines as one: run a language model that none of them can hold.", name="motley")


def _version(wanted: bool) -> None:
    if wanted:
        from motley.protocol.release import release

        print(release())
        raise typer.Exit


@app.callback()
def motley(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Your mismatched machines as one: run a language model that none of them can hold."""


GROUPS = (
    *(up, join, service, plan, run, chat, status, rearrange, lease, budget, access, doctor, update, devices, experts),
    *(models, cache, train, jobs, adapters, demo, bench),
)
for group in GROUPS:
    group.register(app)
