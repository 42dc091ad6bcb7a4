"""Options that several measurements have alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from motley.cli.errors import CliError

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
