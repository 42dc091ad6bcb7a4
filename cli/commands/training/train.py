"""`motley train`: an adapter for a model, from examples that stay on this machine."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from motley.cli.bundled import bundled
from motley.cli.errors import CliError
from motley.cli.interrupt import run as run_job
from motley.cli.reaching.client import ApiKey, Url
from motley.cli.shown.show import LINE_S, console, results
from motley.cli.shown.timeline import sparkline
from motley.cli.training_job import MeshTraining, Mode, offer_data, train_on_mesh
from motley.cli.typed.given import refuse, typed
from motley.cli.typed.options import duration, one_of
from motley.protocol.wording import counted
from motley.training.settings import How

if TYPE_CHECKING:
    from motley.training.files import Point

CURVE = 32
"""Characters of the curve beside the bar."""
OF_AN_OFFER = {"model", "data", "out", "template", "offer", "as_json"}
"""Parameters of `train` that say what an offer is; all else says whoever begins the training."""
ON_THE_MESH = ("nodes", "serve", "owner", "patience", "detach", "url", "api_key", "how", "beside", "turn", "last")
"""Parameters that are for ``--mode`` alone."""
NOT_OF_A_MODE = {
    Mode.MERGE: ("beside", "turn", "last", "plot"),
    Mode.CHAIN: ("how", "memory", "near", "half", "top", "plot"),
}
"""Parameters that have no effect in a mode."""


class TooLong(StrEnum):
    """What becomes of examples that are longer than the context."""

    CUT = "cut"
    REFUSE = "refuse"


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: motley train ./Llama-3.2-1B-Instruct letters.jsonl --out ./letters --plot loss.png")(
        train
    )


def train(
    command: typer.Context,
    model: Annotated[str, typer.Argument(help="Model folder or hub id, of any causal model that transformers knows.")],
    data: Annotated[
        Path,
        typer.Argument(
            help='JSONL: {"messages": [...]}, {"prompt": ..., "completion": ...} or {"text": ...} on each line.'
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the adapter; one that was begun there goes on.")],
    held_out: Annotated[
        Path | None, typer.Option(help="JSONL to evaluate with.", show_default="a share of DATA")
    ] = None,
    held_out_share: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Of DATA, not learnt but evaluated with.")
    ] = 0.05,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimiser.")] = 100,
    batch: Annotated[int, typer.Option(min=1, help="Examples computed at a time.")] = 4,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches to a step.")] = 1,
    rate: Annotated[float, typer.Option(min=0.0, help="Learning rate after the warm-up.")] = 2e-4,
    warm_up: Annotated[int, typer.Option(min=0, help="Steps in which the rate rises.")] = 10,
    weight_decay: Annotated[float, typer.Option(min=0.0, help="Of AdamW.")] = 0.0,
    clip: Annotated[float, typer.Option(min=0.0, help="Largest norm of a step's gradient.")] = 1.0,
    rank: Annotated[int, typer.Option(min=1, help="Of LoRA's matrices.")] = 8,
    alpha: Annotated[float, typer.Option(min=0.0, help="LoRA's update is weighed by alpha / rank.")] = 16.0,
    dropout: Annotated[float, typer.Option(min=0.0, max=0.9, help="Of what LoRA's matrices read.")] = 0.0,
    targets: Annotated[
        str,
        typer.Option(
            help="Modules that get adapters, such as q_proj,v_proj; or tensors of a layer's experts.",
            show_default="all linear ones",
        ),
    ] = "",
    context: Annotated[int, typer.Option(min=0, help="Tokens of an example at most.", show_default="the model's")] = 0,
    too_long: Annotated[
        TooLong,
        typer.Option(parser=one_of(TooLong), metavar="|".join(TooLong), help="Examples beyond the context."),
    ] = TooLong.CUT,
    template: Annotated[Path | None, typer.Option(help="A file with a chat template to use instead.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Equal seeds make equal adapters.")] = 0,
    keep_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints: what a death costs at most.")] = 20,
    evaluate_every: Annotated[
        int, typer.Option(min=0, help="Steps between evaluations.", show_default="before and after")
    ] = 0,
    memory: Annotated[
        str,
        typer.Option(
            help="Spare memory: tight, or some of int4,layers,near,labels: the base in int4, a layer at a time, a"
            " softmax over near tokens, logits where labels are.",
            show_default="plain float32",
        ),
    ] = "",
    half: Annotated[
        bool, typer.Option("--half", help="Hold the model in float16; what is trained is in float32 all the same.")
    ] = False,
    top: Annotated[
        int,
        typer.Option(
            min=0,
            help="Train so many of the last layers: gradients stop below them. What they miss by that is told.",
            show_default="all",
        ),
    ] = 0,
    near: Annotated[int, typer.Option(min=1, help="Tokens near to each that is learnt, for --memory near.")] = 1000,
    mode: Annotated[
        Mode | None,
        typer.Option(
            parser=one_of(Mode),
            metavar="|".join(Mode),
            help="Train on machines of the mesh, as a job. merge: each of --nodes trains alone on a part of DATA, and"
            " their adapters are merged once.",
            show_default="on this machine alone",
        ),
    ] = None,
    nodes: Annotated[
        str, typer.Option(help="Who trains, such as desktop,laptop: with --mode. DATA goes to these, and nowhere else.")
    ] = "",
    how: Annotated[
        How, typer.Option(parser=one_of(How), metavar="|".join(How), help="To merge adapters, with --mode merge.")
    ] = How.LINEAR,
    serve: Annotated[
        str, typer.Option(help="A name: the running session of MODEL serves the adapter then, as MODEL:NAME.")
    ] = "",
    offer: Annotated[
        bool,
        typer.Option(
            "--offer",
            help="Offer DATA to a chain that somebody at another machine begins, and say how (--with), until that is"
            " over or Ctrl-C. OUT gets the adapter, too.",
        ),
    ] = False,
    beside: Annotated[
        str,
        typer.Option(
            "--with",
            metavar="NODE:OFFER,...",
            help="Others who have data, with --mode chain. It stays on their machines.",
            show_default="nobody",
        ),
    ] = "",
    turn: Annotated[
        int,
        typer.Option(
            min=0,
            help="Those who have data lead in turn, so many steps each.",
            show_default="each step learns from everybody's",
        ),
    ] = 0,
    last: Annotated[
        int, typer.Option(min=0, help="Of a chain: so many of the last layers are on this machine, too.")
    ] = 0,
    owner: Annotated[str, typer.Option(help="This machine's node.", show_default="the one that runs here")] = "",
    patience: Annotated[str, typer.Option(help="A node that is away for so long is left out.")] = "5m",
    detach: Annotated[bool, typer.Option("--detach", help="Begin the job, and do not follow it.")] = False,
    url: Url = "",
    api_key: ApiKey = "",
    plot: Annotated[Path | None, typer.Option(help="Draw the losses to this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Train a LoRA adapter, here or (--mode) on several machines. Only answers are learnt.

    Killed here, it goes on when the command is repeated.

    Needs the extra `train`, and says how to install that. The adapter is OUT/adapter, in PEFT's format.
    """
    from motley.bench.reports.plots import plot_losses, require_plotting
    from motley.daemon.weights.hub import resolve
    from motley.training.errors import require_extra
    from motley.training.memory.switches import NEAR, parse_switches
    from motley.training.mesh.ticket import Ticket
    from motley.training.settings import Settings

    spared = parse_switches(memory)
    _refuse_what_has_no_effect(command, mode, offer=offer, near=NEAR in spared)
    if plot:
        require_plotting()
    settings = Settings(
        steps=steps,
        batch=batch,
        accumulate=accumulate,
        rate=rate,
        warm_up=warm_up,
        weight_decay=weight_decay,
        clip=clip,
        rank=rank,
        alpha=alpha,
        dropout=dropout,
        targets=_listed(targets),
        seed=seed,
        context=context,
        cut=too_long is TooLong.CUT,
        held_out=held_out_share,
        evaluate_every=evaluate_every,
        memory=spared,
        near=near,
        half=half,
        top=top,
    )
    model = model if Path(model).is_dir() else bundled(model)
    if half and settings.memory:
        raise CliError("--half and --memory are two ways to hold a model: give one of them")
    if offer or mode is not None:
        ticket = Ticket(
            data=data.absolute(),
            held_out=held_out.absolute() if held_out else None,
            template=template.absolute() if template else None,
            out=out.absolute(),
            settings=settings,
            keep_every=keep_every,
            how=how,
            patience_s=duration("--patience", patience),
            turn=turn,
            last=last,
            offered=offer,
        )
        if mode is None:
            run_job(offer_data(ticket, as_json=as_json))
            return
        source = str(Path(model).absolute()) if Path(model).is_dir() else model
        asked = MeshTraining(mode, source, _listed(nodes), serve, owner, _offers(beside), url, api_key)
        run_job(train_on_mesh(asked, ticket, follow=not detach, as_json=as_json))
        return
    require_extra("torch", "transformers", "peft")
    folder = resolve(model, None)
    if not folder.is_dir():
        raise CliError(f"{folder}: a GGUF file cannot be trained; give the model's folder with safetensors")
    with console.status("loading torch and the model"):  # which takes seconds
        from motley.training.training import train as run
    with _alone_in(out), _curve(steps) as told:
        trained = run(
            folder, data, out, settings, held_out=held_out, template=template, keep_every=keep_every, told=told
        )
    losses = [point.loss for point in trained.points if point.loss is not None]
    if plot:
        plot_losses(trained.points, plot)
    told_of = {
        name: getattr(trained, name) for name in ("learnt", "held_out", "cut", "unanswered", "began_at", "missed")
    }
    if as_json:
        report = {"adapter": str(out / "adapter"), "steps": steps, "losses": losses, **told_of}
        print(json.dumps(report | {"perplexity": trained.perplexity}))
        return
    results.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}  {sparkline(losses)}")
    if trained.perplexity:
        before, after = trained.perplexity
        results.print(f"perplexity of {counted(trained.held_out, 'held-out example')}: {before:.2f} to {after:.2f}")
    if top:
        results.print(f"the last {counted(top, 'layer')} trained; at first the gradient misses {trained.missed:.0%}")
    if trained.cut or trained.unanswered:
        cut = counted(trained.cut, "example")
        results.print(f"cut to the context: {cut}; left out, without an answer in it: {trained.unanswered}")
    results.print(f"the adapter is {escape(str(out / 'adapter'))}", soft_wrap=True)


def _refuse_what_has_no_effect(command: typer.Context, mode: Mode | None, *, offer: bool, near: bool) -> None:
    """
    Args:
        near: whether memory is spared by a softmax over near tokens.

    Raises:
        CliError: an option was given that has no effect beside the others; it is named.
    """
    given = typed(command)
    if offer:
        why = "not beside --offer: whoever begins the training says how it goes, and evaluates"
        refuse(given, given.keys() - OF_AN_OFFER, why)
    elif mode is None:
        refuse(given, ON_THE_MESH, "for a training on machines of the mesh: give --mode, too")
    else:
        refuse(given, NOT_OF_A_MODE[mode], f"not for --mode {mode}")
    if not near:
        refuse(given, {"near"}, "for a softmax over near tokens: give --memory near, or tight, too")
    if "beside" not in given:
        refuse(given, {"turn"}, "for several who have data: name the others (--with)")
    if "held_out" in given:
        refuse(given, {"held_out_share"}, "of DATA nothing is held out beside --held-out")


def _offers(words: str) -> dict[str, str]:
    """By node, what its offer is called, of words such as ``laptop:0f1e...,desktop:...``.

    Raises:
        CliError: they are others.
    """
    pairs = [word.rpartition(":") for word in _listed(words)]
    if not all(node and re.fullmatch("[0-9a-f]{32}", name) for node, _, name in pairs):
        raise CliError("--with: NODE:OFFER of each, as `motley train --offer` says it there")
    return {node: name for node, _, name in pairs}


def _listed(words: str) -> tuple[str, ...]:
    """Words with commas between them."""
    return tuple(word.strip() for word in words.split(",") if word.strip())


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Keep others from training in the same folder while the context lasts.

    Raises:
        CliError: another one does already, or the folder cannot be made.
    """
    from motley.daemon.machine.files import own_file

    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / "lock").open("wb")
    except OSError as error:
        raise CliError(f"--out: {out} cannot be written: {error.strerror or error}") from None
    with lock:
        if not own_file(lock):
            raise CliError(f"--out: another `motley train` is at work in {out}")
        yield


@contextmanager
def _curve(steps: int) -> Iterator[Callable[[Point], None]]:
    """A bar on stderr with the latest loss and the curve; where stderr is no terminal, a line now and then."""
    losses: list[float] = []
    if not console.is_terminal:
        said = time.monotonic()

        def say(point: Point) -> None:
            nonlocal said
            if point.held_out is not None or time.monotonic() - said >= LINE_S:
                said = time.monotonic()
                console.print(_words(point, steps))

        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("training", total=steps)

        def draw(point: Point) -> None:
            if point.loss is not None:
                losses.append(point.loss)
                shown = f"loss {point.loss:.3f} {sparkline(losses, CURVE)}"
                progress.update(task, completed=point.step, description=shown)

        yield draw


def _words(point: Point, steps: int) -> str:
    losses = {"loss": point.loss, "held-out loss": point.held_out}
    words = [f"{name} {loss:.4f}" for name, loss in losses.items() if loss is not None]
    return f"step {point.step} of {steps}: {', '.join(words)}"
