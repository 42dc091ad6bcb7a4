"""`motley devices`: what this machine can compute on, and what is in the way of the rest."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from motley.cli.interrupt import run
from motley.cli.shown.show import console, results, table
from motley.cli.typed.options import AsJson
from motley.protocol.wording import short_bytes

if TYPE_CHECKING:
    from motley.daemon.node.survey.devices import Device


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: motley devices --json")(devices)


def devices(as_json: AsJson = False) -> None:
    """Show this machine's processor and GPUs, which engines compute on them, and what the other engines lack."""
    from motley.cli.typed.devices import cannot_run
    from motley.daemon.node.survey.capabilities import measure
    from motley.daemon.node.survey.devices import devices_of, lacking
    from motley.daemon.node.survey.engines import installed_engines

    with console.status("asking drivers and engines, and measuring"):
        machine = measure(run(installed_engines()))
    found = devices_of(machine)
    if as_json:
        all_lacking, no_gpu = lacking(machine), machine.no_gpu or None
        told = {"devices": [asdict(device) for device in found], "lacking": all_lacking, "no_gpu": no_gpu}
        print(json.dumps(told))
        return
    columns = ["device", "kind", "memory", "free", "bandwidth", "driver", "engines"]
    results.print(table(columns, [_row(device) for device in found]))
    if machine.no_gpu:
        results.print(f"No GPU: {escape(machine.no_gpu)}", soft_wrap=True)
    for line in cannot_run(machine):
        results.print(escape(line[0].upper() + line[1:]), soft_wrap=True)


def _row(device: Device) -> list[str]:
    speed = f"{device.memory_bandwidth / 1e9:.3g} GB/s{'' if device.measured else ' (not measured)'}"
    return [
        device.name,
        device.kind or "-",
        short_bytes(device.memory_bytes),
        short_bytes(device.free_bytes),
        speed if device.memory_bandwidth else "-",
        device.driver or "-",
        ", ".join(device.engines) or "none",
    ]
