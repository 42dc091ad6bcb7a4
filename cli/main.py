"""The `motley` command: one app, a file per group of commands, errors turned into one line and an exit status."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from motley.cli import bench, cache, demo, join, run, status, up
from motley.cli.errors import EXIT_INTERRUPTED, explain

app = typer.Typer(
    name="motley",
    help="Your mismatched machines as one: run a language model that none of them can hold.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("motley"))
        raise typer.Exit


@app.callback()
def motley(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Your mismatched machines as one: run a language model that none of them can hold."""


for group in (up, join, run, status, cache, demo, bench):
    group.register(app)


def main() -> None:
    """The console script."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what it notes of broken connections we say ourselves
    for stream in (sys.stdin, sys.stdout, sys.stderr):  # Windows would use the code page of the day
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        print(f"motley: {message}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
