"""`motley models`: what there is on the hub, on this machine's disk, and what fits on the mesh."""

from __future__ import annotations

import typer

from motley.cli.commands.models.disk import ls, rm
from motley.cli.commands.models.fit import fit
from motley.cli.commands.models.hub import pull, search
from motley.cli.typed.command_group import CommandGroup

models = CommandGroup(
    "Models: find them, fetch them, and see which fit on the mesh.",
    "Examples: motley models fit   motley models search qwen3   motley models pull qwen3-8b",
)


def register(app: typer.Typer) -> None:
    models.command(epilog="Example: motley models search qwen3 8b awq")(search)
    models.command(epilog="Examples: motley models pull qwen3-8b   motley models pull owner/name:model-Q4_K_M.gguf")(
        pull
    )
    models.command(epilog="Example: motley models ls")(ls)
    models.command(epilog="Example: motley models rm Qwen/Qwen3-8B-AWQ")(rm)
    models.command(epilog='Examples: motley models fit   motley models fit --what-if "RTX 4070 12GB, 1Gbit"')(fit)
    app.add_typer(models, name="models")
