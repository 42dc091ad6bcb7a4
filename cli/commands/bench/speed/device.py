"""`motley bench device`: what a device is and how fast it computes, to attach to a report."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.shown.show import results, table, what_goes_on
from motley.cli.typed.options import ENGINES_ON, ActivationsOption, Device, Quantisation, on_device, one_of
from motley.protocol.wording import short_bytes

DEVICE_EXAMPLE = "Example: motley bench device --device webgpu --json > report.json"
SHAPE = "llama-7m"
"""Small enough for a driver that computes on the processor."""
QUANTISATIONS = Quantisation.FP32, Quantisation.INT8, Quantisation.INT4


def device(
    device: Annotated[
        Device | None,
        typer.Option(
            parser=one_of(Device),
            metavar="|".join(Device),
            help="What is measured.",
            show_default="a GPU if one can be used, else cpu",
        ),
    ] = None,
    activations: ActivationsOption = None,
    like: Annotated[
        str, typer.Option(help="Shape of the random model that it computes, see `motley bench synth`.")
    ] = SHAPE,
    model: Annotated[Path | None, typer.Option(help="Model folder or file that it computes instead.")] = None,
    quant: Annotated[
        list[Quantisation] | None,
        typer.Option(
            parser=one_of(Quantisation),
            metavar="|".join(Quantisation),
            help="How weights are held; may be repeated.",
            show_default=", ".join(QUANTISATIONS),
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=200, help="Tokens to time.")] = 32,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON, to attach to a report.")] = False,
) -> None:
    """A device of this machine, its driver, and its time per token of a small model."""
    from motley.bench.measurements.speed.device import measure_device
    from motley.bench.random_models.writing import temporary_model
    from motley.daemon.node.survey.capabilities import measure
    from motley.daemon.node.survey.devices import devices_of, lacking
    from motley.daemon.node.survey.engines import installed_engines
    from motley.orchestrator.known_models.shapes import SHAPES

    if like not in SHAPES:
        raise CliError(f"--like: no shape is called {like!r}; there are: {', '.join(SHAPES)}")
    if model is not None and not model.exists():
        raise CliError(f"--model: there is no {model}")
    _, settings = on_device(None, device, activations)
    with what_goes_on() as tell:
        tell("asking drivers and engines, and measuring")
        machine = measure(run(installed_engines()))
        devices = devices_of(machine)
        for one in [device] if device else (Device.CUDA, Device.WEBGPU, Device.CPU):
            engine = ENGINES_ON[one][0]
            if found := next((each for each in devices if engine in each.engines), None):
                break
        else:
            why = machine.no_gpu or lacking(machine).get(engine) or f"engine {engine!r} is not installed"
            raise CliError(f"--device {one}: {why}")
        with nullcontext(model) if model else temporary_model(SHAPES[like], like) as folder:
            measured = measure_device(
                found, engine, folder, list(quant or QUANTISATIONS), tokens, threads, settings, tell
            )
            report = run(measured)
    if as_json:
        print(json.dumps(asdict(report)))
        return
    about = f"{found.name}, {found.kind}, {short_bytes(found.memory_bytes)}, {found.driver or report.system}"
    speed = f"{found.memory_bandwidth / 1e9:.3g} GB/s"
    rows = [[how, f"{times['p50']:.2f}", f"{times['p99']:.2f}"] for how, times in report.ms_per_token.items()]
    results.print(table(["weights", "ms/token p50", "p99"], rows, title=f"{about}: {speed}, {report.model}"))
    for how, why in report.failures.items():
        results.print(f"{how}: {escape(why)}", soft_wrap=True)
