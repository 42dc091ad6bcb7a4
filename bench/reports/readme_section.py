"""README's section on performance, made of what was measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from motley.bench.measurements.accuracy.drift import Drift
from motley.bench.measurements.speed.collectives import Row
from motley.bench.measurements.speed.latency import LatencyReport
from motley.bench.reports.standard import ReportError, Results

BEGIN, END = "<!-- performance:begin -->", "<!-- performance:end -->"
COLUMNS = (
    "weights",
    "ranks",
    "ms per token (p50)",
    "bound",
    "ratio",
    "compute, wire, wait",
    "prompt tokens/s",
    "peak RSS per rank",
)
RSS_PER_SHARE, RSS_BESIDE_MB = 1.15, 250
"""What a rank may take at its peak: so much of its share, and so much beside it."""


def check_markers(readme: Path) -> None:
    """Find out before a long measurement whether its section can be written.

    Raises:
        ReportError: `readme` cannot be read, or does not have one `BEGIN` before one `END`.
    """
    _cut(_read(readme), readme)


def rewrite_section(readme: Path, results: Results, image: Path) -> None:
    """Write the performance section of `readme` anew, between its two markers; all else in it stays.

    Raises:
        ReportError: as `check_markers`; or it cannot be written.
    """
    before, after = _cut(_read(readme), readme)
    link = Path(os.path.relpath(image, readme.parent)).as_posix()
    text = f"{before}{BEGIN}\n{section(results, link)}\n{END}{after}"
    try:
        readme.write_text(text, "utf-8", newline="\n")
    except OSError as error:
        raise ReportError(f"{readme} cannot be written: {error.strerror or error}") from error


def section(results: Results, image: str) -> str:
    """The performance section in Markdown, with a link to the picture `image`."""
    machine = results.machine
    versions = ", ".join(f"{package} {number}" for package, number in machine.versions.items())
    return "\n".join(
        [
            f"Measured on {results.day} by `motley bench report`: {results.model}, one thread per rank, on "
            f"{machine.cpu} with {machine.cores} cores, {machine.system}; Python {machine.python}, {versions}.",
            "",
            f"| {' | '.join(COLUMNS)} |",
            f"|{len(COLUMNS) * '---|'}",
            *(_row(report) for report in results.latency),
            "",
            "The bound is what reading a token's weights and caches takes at the memory bandwidth that as many cores "
            f"had in the same minute ({_span([report.bandwidth_gb_s for report in results.latency])} GB/s).",
            "",
            *(f"- {finding}" for finding in findings(results)),
            "",
            f"![Where the milliseconds of a token go, and how far ranks drift from one process]({image})",
        ]
    )


def findings(results: Results) -> list[str]:
    """What was found beside the time per token, a sentence each: contexts, start, exact mode, sums, precision."""
    return [
        *_contexts(results.contexts),
        _start_and_memory(results),
        _exact(results),
        f"All-reduce: {', '.join(map(_collective, results.collectives))}.",
        f"Precision: {_precision(results.drift)}.",
    ]


def _row(report: LatencyReport) -> str:
    cells = [
        f"{report.quant}, {report.weights_mb_per_token:.0f} MB",
        str(report.ranks),
        f"{report.ms_per_token['p50']:.1f}",
        f"{report.bound_ms:.1f}",
        f"{report.ratio:.2f}",
        f"{report.compute_ms:.1f}, {report.wire_ms:.1f}, {report.wait_ms:.1f}",
        f"{report.prefill_tokens_per_s:.0f}",
        f"{max(report.peak_rss_mb):.0f} MB",
    ]
    return f"| {' | '.join(cells)} |"


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.0f}" if f"{low:.0f}" == f"{high:.0f}" else f"{low:.0f} to {high:.0f}"


def _contexts(contexts: Sequence[LatencyReport]) -> list[str]:
    if len(contexts) < 2:
        return []
    short, long = contexts
    ratio = long.ms_per_token["p50"] / short.ms_per_token["p50"]
    return [
        f"Context ({short.quant}, {short.ranks} ranks): {short.ms_per_token['p50']:.1f} ms per token after "
        f"{short.prompt_tokens} tokens, {long.ms_per_token['p50']:.1f} after {long.prompt_tokens} ({ratio:.2f} x)."
    ]


def _start_and_memory(results: Results) -> str:
    """The peak is of the rank that comes closest to the limit."""
    peak, limit = max(
        (
            (peak, RSS_PER_SHARE * share + RSS_BESIDE_MB)
            for report in results.latency
            for peak, share in zip(report.peak_rss_mb, report.shard_mb, strict=True)
        ),
        key=lambda pair: pair[0] / pair[1],
    )
    return (
        f"Warm start: {results.warm_start_s:.1f} s. Peak RSS: {peak:.0f} MB where {limit:.0f} are the limit "
        f"({RSS_PER_SHARE} x share + {RSS_BESIDE_MB} MB)."
    )


def _exact(results: Results) -> str:
    ratio = results.exact_ratio
    return f"Exact sessions: {'refused here' if ratio is None else f'{100 * (ratio - 1):+.0f} % per token'}."


def _collective(row: Row) -> str:
    gloo = "" if row.gloo_p50_us is None else f" (gloo: {row.gloo_p50_us:.0f})"
    size = f"{row.bytes >> 20} MiB" if row.bytes >= 1 << 20 else f"{row.bytes >> 10} KiB"
    return f"{row.p50_us:.0f} us at {size}{gloo}"


def _precision(drift: Drift) -> str:
    last = drift.layers[-1]
    return (
        f"after {len(drift.layers)} layers {drift.ranks} ranks differ from one process by {last.fp32_error:.1e} of the "
        f"largest activation (mean, FP32); compute in FP16 would make it {last.fp16_error:.1e}"
    )


def _read(readme: Path) -> str:
    try:
        return readme.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{readme} cannot be read: {error}") from error


def _cut(text: str, readme: Path) -> tuple[str, str]:
    """What stands before the first marker and after the second."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ReportError(
            f"{readme}: the performance section stands between one {BEGIN} and one {END} after it; they are not there"
        )
    return before, after
