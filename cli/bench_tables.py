"""How measurements look in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from motley.cli.show import console, table
from motley.cli.timeline import WIDTH, legend, sparkline, stacked_bar

if TYPE_CHECKING:
    from motley.bench.drift import Drift
    from motley.bench.latency import LatencyReport
    from motley.bench.precision import FormatError


def show_latency(report: LatencyReport) -> None:
    """One setting: the figures, where the time of each rank goes, and the tokens one by one."""
    ms, steps = report.ms_per_token, report.timeline.step_ms
    console.print(
        f"[bold]{ms['p50']:.2f} ms/token[/] p50, {ms['p95']:.2f} p95, {ms['p99']:.2f} p99; first token after "
        f"{report.ttft_ms:.0f} ms ({report.prefill_tokens_per_s:.0f} prompt tokens/s)"
    )
    console.print(
        f"{report.ratio:.2f} x the bound of {report.bound_ms:.2f} ms: {report.weights_mb_per_token:.0f} MB of weights "
        f"per token at {report.bandwidth_gb_s:.1f} GB/s"
    )
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


def show_sweep(reports: Sequence[LatencyReport]) -> None:
    """A row per setting, and a bar of its mean token."""
    columns = ["setting", "p50 ms", "p99 ms", "bound", "ratio", "first token", "prompt/s"]
    rows = [
        [
            report.setting,
            *(f"{report.ms_per_token[q]:.2f}" for q in ("p50", "p99")),
            f"{report.bound_ms:.2f}",
            f"{report.ratio:.2f}",
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
    columns = ["format", "activations", "mean error", "max error", "bytes per value"]
    cells = [
        [row.format, row.activations, f"{row.mean_error:.2e}", f"{row.max_error:.2e}", f"{row.bytes_per_value:.3f}"]
        for row in rows
    ]
    console.print(table(columns, cells, title=f"all-reduce over {ranks} ranks, relative to the RMS of the sums"))


def show_drift(drift: Drift) -> None:
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
