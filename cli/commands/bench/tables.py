"""How measurements look in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from motley.cli.shown.show import console, table
from motley.cli.shown.timeline import WIDTH, legend, sparkline, stacked_bar
from motley.protocol.wording import counted

if TYPE_CHECKING:
    from motley.bench.measurements.accuracy.cache_precision import CacheError
    from motley.bench.measurements.accuracy.drift import Drift
    from motley.bench.measurements.accuracy.precision import FormatError
    from motley.bench.measurements.accuracy.quantisation import Foresight, WeightError
    from motley.bench.measurements.accuracy.ways import Moved
    from motley.bench.measurements.serving.serve import Served
    from motley.bench.measurements.speed.adapters import Adapted
    from motley.bench.measurements.speed.latency import LatencyReport
    from motley.bench.measurements.speed.moe import MoeReport
    from motley.bench.measurements.speed.throughput import Throughput


def show_latency(report: LatencyReport) -> None:
    """One setting: the figures, where the time of each rank goes, and the tokens one by one."""
    from motley.bench.measurements.speed.latency import BOUNDED_MB

    ms, steps = report.ms_per_token, report.timeline.step_ms
    console.print(
        f"[bold]{ms['p50']:.2f} ms/token[/] p50, {ms['p95']:.2f} p95, {ms['p99']:.2f} p99; first token after "
        f"{report.ttft_ms:.0f} ms ({report.prefill_tokens_per_s:.0f} prompt tokens/s)"
    )
    weights = f"{report.weights_mb_per_token:.0f} MB of weights per token"
    if report.bounded:
        console.print(
            f"{report.ratio:.2f} x the bound of {report.bound_ms:.2f} ms: {weights} and "
            f"{report.caches_mb_per_token:.0f} of caches at {report.bandwidth_gb_s:.1f} GB/s"
        )
    else:
        console.print(f"{weights}: too few (below {BOUNDED_MB} MB) for the memory's speed to be what bounds a token")
    parts = ("attention", "mlp", "vocabulary")
    times = ("compute_ms", "wire_ms", "wait_ms")
    console.print(
        table(
            ["rank", *parts, "compute ms", "wire ms", "wait ms", "share MB", "peak RSS MB"],
            [
                [
                    str(rank),
                    *(str(report.shares[rank][part]) for part in parts),
                    *(f"{report.per_rank[rank][part]:.2f}" for part in times),
                    f"{report.shard_mb[rank]:.0f}",
                    f"{report.peak_rss_mb[rank]:.0f}",
                ]
                for rank in range(report.ranks)
            ],
        )
    )
    show_bars({f"rank {rank}": report.mean_parts(rank) for rank in range(report.ranks)})
    console.print(f"tokens  {sparkline(steps, 48)} {min(steps):.1f} to {max(steps):.1f} ms")


def show_throughput(rows: Sequence[Throughput]) -> None:
    """A row for each number of requests that were answered at once."""
    cells = [
        [
            *(str(row.requests), f"{row.tokens_per_s:.1f}", f"{row.x_one:.2f}", f"{row.ms_per_token:.1f}"),
            " + ".join(f"{each:.1f}" for each in row.step_ms.values()),
        ]
        for row in rows
    ]
    parts = f"a step's ms: {' + '.join(rows[0].step_ms)}"
    console.print(table(["requests", "tokens/s", "x one", "ms per token of each", parts], cells))


def show_adapters(rows: Sequence[Adapted]) -> None:
    """A row for each number of adapters of each rank."""
    cells = [
        [str(row.adapters), str(row.rank), f"{row.tokens_per_s:.1f}", f"{row.x_none:.2f}", f"{row.load_ms:.1f}"]
        for row in rows
    ]
    console.print(table(["adapters", "rank", "tokens/s", "x none", "load ms"], cells))


def show_served(rows: Sequence[Served]) -> None:
    """A row for each rate at which requests came."""
    cells = [
        [
            f"{row.rate:g}",
            str(row.requests),
            f"{row.output_tokens_per_s:.1f}",
            *(f"{row.ttft_ms[q]:.0f}" for q in ("p50", "p99")),
            *(f"{row.gap_ms[q]:.1f}" if row.gap_ms else "-" for q in ("p50", "p99")),
            str(row.refused),
        ]
        for row in rows
    ]
    columns = ["requests/s", "requests", "tokens/s", "first token p50 ms", "p99", "gap p50 ms", "p99", "refused"]
    console.print(table(columns, cells))


def show_moe(report: MoeReport) -> None:
    """Both layouts side by side, what travels, and what a death costs."""
    counts = [row.requests for row in report.layouts[0].throughput]
    console.print(
        table(
            ["layout", "ms/token", "p99", "idle by node", *(f"tok/s of {count}" for count in counts), "x one"],
            [
                [
                    layout.layout,
                    *(f"{layout.ms_per_token[q]:.1f}" for q in ("p50", "p99")),
                    " ".join(f"{100 * idle:.0f}" for idle in layout.idle) + " %",
                    *(f"{row.tokens_per_s:.1f}" for row in layout.throughput),
                    f"{layout.throughput[-1].x_one:.2f}",
                ]
                for layout in report.layouts
            ],
            title=f"{report.scale}, {report.quant}: {report.nodes} nodes, {counted(report.replicas, 'replica')}, "
            f"{report.link or 'this machine only'}",
        )
    )
    traffic = report.traffic
    console.print(
        f"{report.layers} layers with {report.experts} experts of {report.expert_mb:.1f} MB, "
        f"{report.experts_per_token} per token, width {report.hidden}"
    )
    console.print(
        f"parallel: {traffic.bytes / 1e3:.1f} kB per token in {traffic.messages:.1f} messages "
        f"({traffic.rows_bytes / 1e3:.1f} kB of rows + {traffic.headers_bytes / 1e3:.1f} kB of headers), of which "
        f"{traffic.local_bytes / 1e3:.1f} kB in {traffic.local_messages:.1f} messages stay on the trunk's node"
    )
    for death in report.deaths:
        text = "did not change" if death.unchanged else "[red]changed[/]"
        console.print(
            f"host {death.host} {death.how} in the middle of an answer: a token was {death.stall_ms:.0f} ms late "
            f"(usually one takes {death.usual_ms:.0f} ms); the text {text}"
        )


def show_sweep(reports: Sequence[LatencyReport]) -> None:
    """A row per setting, and a bar of its mean token."""
    columns = ["setting", "p50 ms", "p99 ms", "bound", "ratio", "first token", "prompt/s"]
    rows = [
        [
            report.setting,
            *(f"{report.ms_per_token[q]:.2f}" for q in ("p50", "p99")),
            *([f"{report.bound_ms:.2f}", f"{report.ratio:.2f}"] if report.bounded else ["-", "-"]),
            f"{report.ttft_ms:.0f}",
            f"{report.prefill_tokens_per_s:.0f}",
        ]
        for report in reports
    ]
    console.print(table(columns, rows))
    show_bars({report.setting: report.mean_parts() for report in reports})


def show_bars(parts: Mapping[str, Mapping[str, float]]) -> None:
    """Where the milliseconds of mean tokens go, by label."""
    labels = max(map(len, parts))
    longest = max(sum(each.values()) for each in parts.values())
    numbers = {label: " + ".join(f"{value:.1f}" for value in each.values()) for label, each in parts.items()}
    width = max(10, min(WIDTH, console.width - labels - max(map(len, numbers.values())) - 3))
    for label, each in parts.items():
        bar = stacked_bar(each, longest, width)
        bar.pad_right(width - len(bar))
        console.print(Text(f"{label:<{labels}}  ") + bar + Text(f" {numbers[label]}"))
    console.print(Text(" " * (labels + 2)) + legend() + Text(", mean ms"))


def show_wire_formats(rows: Sequence[FormatError], ranks: int) -> None:
    """How far sums over so many ranks are off in each wire format."""
    columns = ["format", "activations", "mean error", "max error", "bytes per value"]
    cells = [
        [row.format, row.activations, f"{row.mean_error:.2e}", f"{row.max_error:.2e}", f"{row.bytes_per_value:.3f}"]
        for row in rows
    ]
    console.print(table(columns, cells, title=f"all-reduce over {ranks} ranks, relative to the RMS of the sums"))


def show_drift(drift: Drift) -> None:
    """How far ranks are off from one process, layer by layer."""
    columns = ["layer", "fp32", "to float64", "fp16", "to float64", "largest", "RMS"]
    cells = [
        [
            str(layer.layer),
            *(
                f"{error:.1e}"
                for error in (
                    *(layer.fp32_error, layer.fp32_float64_error),
                    *(layer.fp16_error, layer.fp16_float64_error),
                )
            ),
            f"{layer.max_activation:.3g}",
            f"{layer.rms_activation:.3g}",
        ]
        for layer in drift.layers
    ]
    title = (
        f"{drift.model}: {drift.ranks} ranks against one process, {drift.positions} tokens, mean errors relative to "
        f"the largest activation; fp32 by {drift.engine}, fp16 simulated"
    )
    console.print(table(columns, cells, title=title))


def show_cache_formats(rows: Sequence[CacheError]) -> None:
    """A row for each format of the caches."""
    cells = [
        [
            row.format,
            str(row.bytes_per_token),
            f"{row.mean_kl:.1e}",
            f"{row.max_kl:.1e}",
            f"{100 * row.same_greedy:.1f} %",
        ]
        for row in rows
    ]
    title = f"caches against fp32 ones, {rows[0].positions} tokens of a text: distributions of the next token"
    columns = ["caches", "bytes per token", "mean KL, nats", "largest", "same likeliest token"]
    console.print(table(columns, cells, title=title))


def show_products(moved: Moved) -> None:
    """What products in FP16 do."""
    cells = [[f"{moved.mean_kl:.1e}", f"{moved.max_kl:.1e}", f"{100 * moved.same_greedy:.1f} %"]]
    title = f"products in fp16 against fp32, {moved.positions} tokens of a text: distributions of the next token"
    console.print(table(["mean KL, nats", "largest", "same likeliest token"], cells, title=title))


def show_weight_errors(errors: list[WeightError]) -> None:
    """The error of weights by format, in percent of their root mean square."""
    cells = [[row.format, str(row.block), row.weights, f"{row.percent:.2f}"] for row in errors]
    console.print(table(["format", "block", "weights", "error, % of RMS"], cells))


def show_foresight(found: list[Foresight]) -> None:
    """How well a model foresees a text by the format of its weights."""
    cells = [[row.format, str(row.block or "-"), f"{row.perplexity:.3f}", f"{1000 * row.mean_kl:.2f}"] for row in found]
    title = f"{found[0].positions} tokens of a text"
    console.print(table(["format", "block", "perplexity", "divergence, 1e-3 nats"], cells, title=title))
