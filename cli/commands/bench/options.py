"""Options that several measurements have alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from motley.cli.errors import CliError
from motley.cli.typed.options import Choice

if TYPE_CHECKING:
    from motley.bench.meshes.local_mesh import StageSpec

ModelFolder = Annotated[Path, typer.Option(help="Model folder (see `motley bench synth`).")]
Ranks = Annotated[int, typer.Option(min=1, max=16, help="Rank processes to start here.")]
Link = Annotated[str, typer.Option(help="Emulate a network, as `motley bench latency` does.")]
Threads = Annotated[int, typer.Option(min=1, help="Compute threads per rank.")]
EngineName = Annotated[str, typer.Option(help="Engine by name.")]
AsJson = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]
StageLayers = Annotated[
    str,
    typer.Option(
        "--stages",
        metavar="LAYERS[xRANKS],...",
        help="Ranks in stages, in place of --ranks: 12,10 is one rank with 12 layers and one with 10, 12x2,10 has two"
        " ranks share the first 12.",
    ),
]


def parse_stage_layers(text: str) -> list[StageSpec]:
    """Read ``12x2,10``; empty: there are no stages.

    Raises:
        CliError: it is no such list.
    """
    from motley.bench.meshes.local_mesh import StageSpec

    stages = []
    for part in text.split(",") if text else ():
        layers, _, ranks = part.partition("x")
        try:
            stages.append(StageSpec(int(ranks or 1), int(layers)))
        except ValueError:
            stages.append(StageSpec(0, 0))
    if any(min(stage) < 1 for stage in stages) or len(stages) == 1:
        raise CliError(f"--stages wants the layers of two stages or more, like 12,10 or 12x2,10, not {text!r}")
    return stages


def parse_choice(option: str, kind: type[Choice], text: str) -> Choice:
    """Read one of the values of `kind`.

    Raises:
        CliError: it is none of them.
    """
    try:
        return kind(text.strip())
    except ValueError:
        raise CliError(f"{option} knows {', '.join(kind)}, not {text!r}") from None


def check_output(option: str, path: Path | None) -> None:
    """Find out before a measurement whether its result has a place.

    Raises:
        CliError: there is no such folder.
    """
    if path is not None and not path.parent.is_dir():
        raise CliError(f"{option}: there is no folder {path.parent}")


def parse_shape(like: str, config: Path | None) -> dict[str, Any]:
    """Find a model's shape, by its name or from a ``config.json``.

    Raises:
        CliError: not one of both was given, there is no such shape, or the file cannot be read.
    """
    from motley.orchestrator.known_models.shapes import SHAPES

    if bool(like) == (config is not None):
        raise CliError("say which shape: either --like NAME or --config FILE")
    if config is None:
        if like not in SHAPES:
            raise CliError(f"no shape is called {like!r}; known: {', '.join(SHAPES)}")
        return SHAPES[like]
    try:
        shape = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CliError(f"cannot read a model config from {config}: {error}") from error
    if not isinstance(shape, dict):
        raise CliError(f"cannot read a model config from {config}: it is no object")
    return shape
