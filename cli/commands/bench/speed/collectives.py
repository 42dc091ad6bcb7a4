"""`motley bench collectives`: how long sums and other exchanges between ranks take."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from motley.cli.commands.bench.options import AsJson, parse_choice
from motley.cli.errors import CliError
from motley.cli.shown.show import console, table

COLLECTIVES_EXAMPLE = "Example: motley bench collectives --ranks 4 --sizes 8192,65536 --link 0.1ms,1Gbit --json"


def collectives(
    ranks: Annotated[int, typer.Option(min=2, max=16, help="Rank processes to start here.")] = 2,
    sizes: Annotated[str, typer.Option(help="Payloads in bytes, multiples of 4.")] = "8192,16384,65536,1048576",
    op: Annotated[
        str, typer.Option(help="all_reduce, reduce_scatter, all_gather, broadcast, all_to_all.")
    ] = "all_reduce",
    wire: Annotated[str, typer.Option(help="How values travel: fp32, bf16 or int8.")] = "fp32",
    tls: Annotated[bool, typer.Option("--tls", help="Encrypt the links.")] = False,
    link: Annotated[
        str, typer.Option(help="Emulate a network: 0.1ms,1Gbit or 20ms,100Mbit,jitter=2ms,loss=0.1%.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Calls to time for each row; fewer where they are slow.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """Time of collectives between rank processes on this machine: measured, predicted, and gloo's (where torch is)."""
    from motley.bench.measurements.speed.collectives import Setup, measure
    from motley.bench.meshes.emulator import LinkSpec
    from motley.transport import WireFormat
    from motley.transport.schedules.schedule import Operation

    try:
        spec = LinkSpec.parse(link) if link else None
    except ValueError as error:
        raise CliError(f"--link: {error}") from None
    setup = Setup(
        ranks=ranks,
        sizes=parse_sizes(sizes),
        operations=[parse_choice("--op", Operation, name) for name in op.split(",")],
        rounds=rounds,
        tls=tls,
        link=spec,
        wire_format=parse_choice("--wire", WireFormat, wire),
    )
    rows = measure(setup)
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
        return
    network = f", {link}" if link else ""
    for operation in setup.operations:
        cells = [
            [
                *(str(row.bytes), row.algorithm, f"{row.p50_us:.1f}", f"{row.p99_us:.1f}", f"{row.predicted_us:.1f}"),
                f"{row.p50_us / row.predicted_us:.2f}",
                "-" if row.gloo_p50_us is None else f"{row.gloo_p50_us:.1f}",
            ]
            for row in rows
            if row.op == operation
        ]
        columns = ["bytes", "algorithm", "p50 us", "p99 us", "predicted", "ratio", "gloo p50"]
        title = f"{operation}, {ranks} ranks, {wire}, {'TLS' if tls else 'plain'}{network}"
        console.print(table(columns, cells, title=title))


def parse_sizes(text: str) -> list[int]:
    """Read ``8192,65536``.

    Raises:
        CliError: these are no multiples of the size of a float32.
    """
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        raise CliError(f"--sizes wants numbers of bytes like 8192,65536, not {text!r}") from None
    if any(size < 0 or size % 4 for size in sizes):
        raise CliError(f"--sizes wants multiples of 4, the size of a float32, not {text!r}")
    return sizes
