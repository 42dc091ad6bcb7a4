"""`motley bench`: measurements that a user can run. The last line of `--json` output is one JSON object."""

from __future__ import annotations

import typer

from motley.cli.commands.bench.accuracy.precision import PRECISION_EXAMPLE, precision
from motley.cli.commands.bench.accuracy.quantisation import QUANTISATION_EXAMPLE, quantisation
from motley.cli.commands.bench.report import REPORT_EXAMPLE, report
from motley.cli.commands.bench.serving.chaos import CHAOS_EXAMPLE, chaos
from motley.cli.commands.bench.serving.serve import SERVE_EXAMPLE, serve
from motley.cli.commands.bench.speed.adapters import ADAPTERS_EXAMPLE, adapters
from motley.cli.commands.bench.speed.caches import CACHES_EXAMPLE, caches
from motley.cli.commands.bench.speed.collectives import COLLECTIVES_EXAMPLE, collectives
from motley.cli.commands.bench.speed.device import DEVICE_EXAMPLE, device
from motley.cli.commands.bench.speed.drafts import DRAFTS_EXAMPLE, drafts
from motley.cli.commands.bench.speed.families import FAMILIES_EXAMPLE, families
from motley.cli.commands.bench.speed.forecast import FORECAST_EXAMPLE, forecast
from motley.cli.commands.bench.speed.latency import LATENCY_EXAMPLE, latency
from motley.cli.commands.bench.speed.moe import MOE_EXAMPLE, moe
from motley.cli.commands.bench.speed.reading import READING_EXAMPLE, reading
from motley.cli.commands.bench.speed.throughput import THROUGHPUT_EXAMPLE, throughput
from motley.cli.commands.bench.synth import SYNTH_EXAMPLE, synth
from motley.cli.commands.bench.training.parts import PARTS_EXAMPLE, parts
from motley.cli.commands.bench.training.train import TRAIN_EXAMPLE, train
from motley.cli.typed.command_group import CommandGroup

bench = CommandGroup(
    "Measure this machine and its ranks.",
    "Examples: motley bench synth --like tinyllama-1.1b --out ./tinyllama   "
    "motley bench latency --model ./tinyllama --ranks 1,2",
)


def register(app: typer.Typer) -> None:
    app.add_typer(bench, name="bench")


# In the order in which `motley bench --help` shows them: models, speed, serving, accuracy, training, all at once.
bench.command(epilog=SYNTH_EXAMPLE)(synth)
bench.command(epilog=LATENCY_EXAMPLE)(latency)
bench.command(epilog=THROUGHPUT_EXAMPLE)(throughput)
bench.command(epilog=READING_EXAMPLE)(reading)
bench.command(epilog=CACHES_EXAMPLE)(caches)
bench.command(epilog=DRAFTS_EXAMPLE)(drafts)
bench.command(epilog=ADAPTERS_EXAMPLE)(adapters)
bench.command(epilog=MOE_EXAMPLE)(moe)
bench.command(epilog=FAMILIES_EXAMPLE)(families)
bench.command(epilog=FORECAST_EXAMPLE)(forecast)
bench.command(epilog=COLLECTIVES_EXAMPLE)(collectives)
bench.command(epilog=DEVICE_EXAMPLE)(device)
bench.command(epilog=SERVE_EXAMPLE)(serve)
bench.command(epilog=CHAOS_EXAMPLE)(chaos)
bench.command(epilog=PRECISION_EXAMPLE)(precision)
bench.command(epilog=QUANTISATION_EXAMPLE)(quantisation)
bench.command(epilog=TRAIN_EXAMPLE)(train)
bench.command(epilog=PARTS_EXAMPLE)(parts)
bench.command(epilog=REPORT_EXAMPLE)(report)
