"""`motley adapters`: adapters that were trained apart made one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motley.cli.errors import CliError
from motley.cli.options import one_of
from motley.cli.show import console, counting_bar
from motley.training.merging import How

adapters = typer.Typer(help="Adapters that were trained apart.", no_args_is_help=True, rich_markup_mode="rich")


def register(app: typer.Typer) -> None:
    app.add_typer(adapters, name="adapters")


@adapters.callback()
def _adapters() -> None:
    """Adapters that were trained apart."""


@adapters.command(epilog="Example: motley adapters merge ./letters/adapter ./notes/adapter --how ties -o ./both")
def merge(
    folders: Annotated[list[Path], typer.Argument(help="PEFT folders of adapters of one model.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; must be new.")],
    how: Annotated[
        How,
        typer.Option(
            parser=one_of(How),
            metavar="|".join(How),
            help="The exact mean; the mean weighed by 1 / perplexity; TIES; DARE.",
        ),
    ] = How.LINEAR,
    weights: Annotated[str, typer.Option(help="One for each adapter, such as 3,1.", show_default="equal")] = "",
    density: Annotated[float, typer.Option(min=0.001, max=1.0, help="Share of values TIES and DARE keep.")] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="Of what DARE drops.")] = 0,
    rank: Annotated[
        int, typer.Option(min=0, help="Of an adapter by TIES or DARE.", show_default="that of all together")
    ] = 0,
    into: Annotated[
        Path | None, typer.Option(help="A model's folder: OUT becomes a copy of it with changed weights.")
    ] = None,
) -> None:
    """Merge adapters into one, or into the weights of their model. Needs no torch."""
    from motley.training.adapters import merge as run

    try:
        shares = [float(each) for each in weights.split(",") if each.strip()]
    except ValueError:
        raise CliError(f"--weights wants numbers such as 3,1, and not {weights!r}") from None
    with counting_bar("merged modules") as told:
        missed = run(folders, how, out, weights=shares, density=density, seed=seed, rank=rank, into=into, progress=told)
    if missed > 0.01:
        console.print(
            f"the rank holds a module's change up to {missed:.0%}; --into a model, or a larger --rank, is exact"
        )
    console.print(f"wrote {out}", highlight=False)
