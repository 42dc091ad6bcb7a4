"""The standard set of measurements, and README's performance section made of them.

One run, one machine: latency at one and two ranks in int4 and int8, a short and a long context, what exact mode costs,
collectives, precision. The model is called by its shape: where its files lie is nobody's business.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from motley.bench.collectives import Row, Setup, measure
from motley.bench.drift import Drift, measure_drift
from motley.bench.latency import LatencyReport, measure_latency
from motley.bench.local_mesh import MeshError, MeshSpec
from motley.bench.synth import SHAPES, synthesise
from motley.daemon.machine.processor import cpu_name, usable_cores
from motley.daemon.models.description.axes import Heads, Kind
from motley.daemon.models.description.model import Model, parameters, products
from motley.daemon.models.files import open_model
from motley.daemon.weights.cache import default_folder

SHAPE = "tinyllama-1.1b"
"""Synthesised where no model is given."""
PUBLISHED = (
    "TinyLlama-1.1B",
    "Llama-3.2-1B",
    "Llama-3.1-8B",
    "Mistral-7B",
    "Qwen2.5-0.5B",
    "Qwen2.5-7B",
    "Qwen3-0.6B",
    "Qwen3-8B",
)
"""What the models without experts are called whose shapes are `motley.bench.synth.SHAPES`."""
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
PACKAGES = ("motley", "numpy", "onnxruntime")


class ReportError(Exception):
    """The report cannot be written; the message says where and why."""


@dataclass(frozen=True)
class Standard:
    """What is measured.

    Attributes:
        prompt: tokens of it in every setting.
        contexts: lengths of two more prompts for the first quantisation over the most ranks; the second as far as the
            model goes.
        pairs: of runs without and with exact mode, in the quantisation and over the ranks of `contexts`.
        sizes: bytes, of all-reduces over the most ranks.
    """

    quantisations: Sequence[str] = ("int4", "int8")
    ranks: Sequence[int] = (1, 2)
    prompt: int = 64
    contexts: tuple[int, int] = (100, 1950)
    tokens: int = 64
    pairs: int = 3
    sizes: Sequence[int] = (8192, 16384, 65536, 1 << 20)


@dataclass(frozen=True)
class Machine:
    cpu: str
    cores: int
    system: str
    python: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Results:
    """What was measured.

    Attributes:
        model: its shape, as `shape_name` has it; so in all reports.
        latency: by quantisation and ranks at the standard prompt.
        contexts: one setting at two lengths.
        exact: that setting at the standard prompt, without and with exact mode in turn, shares in the cache; the first
            alone where exact mode is refused.
    """

    day: str
    machine: Machine
    model: str
    latency: list[LatencyReport]
    contexts: list[LatencyReport]
    exact: list[LatencyReport]
    collectives: list[Row]
    drift: Drift

    @property
    def shown(self) -> LatencyReport:
        """The one whose tokens are drawn: the first quantisation over the most ranks."""
        quantisation = self.latency[0].quant
        return [report for report in self.latency if report.quant == quantisation][-1]

    @property
    def exact_ratio(self) -> float | None:
        """What a token takes with exact mode over what it takes without: the median of the pairs; None: refused."""
        pairs = zip(self.exact[::2], self.exact[1::2], strict=False)
        ratios = [exact.ms_per_token["p50"] / plain.ms_per_token["p50"] for plain, exact in pairs]
        return median(ratios) if ratios else None

    @property
    def warm_start_s(self) -> float:
        """From a rank's order to load until it is ready, its share being in the cache: the slowest rank."""
        return max(self.exact[0].load_s)

    @property
    def name(self) -> str:
        """Of the files: ``2026-11-20-amd-epyc-2-cores``."""
        cpu = re.sub(r"[^a-z0-9]+", "-", self.machine.cpu.lower()).strip("-")
        return f"{self.day}-{cpu}-{self.machine.cores}-cores"

    def as_json(self) -> dict[str, Any]:
        return {
            "day": self.day,
            "machine": asdict(self.machine),
            "model": self.model,
            "latency": [report.as_json() for report in self.latency],
            "contexts": [report.as_json() for report in self.contexts],
            "exact": [report.as_json() for report in self.exact],
            "collectives": [asdict(row) for row in self.collectives],
            "precision": self.drift.as_json(),
        }


async def measure_standard(model: Path, standard: Standard, say: Callable[[str], None]) -> Results:
    """Take about five minutes to measure `standard`. `say` is told what comes next.

    Raises:
        what `open_model`, `measure_latency`, `measure` and `measure_drift` raise.
    """
    with open_model(model) as opened:
        described = opened.model
    shape = shape_name(described)
    longest = min(standard.contexts[1], described.context - standard.tokens - 1)
    latency: list[LatencyReport] = []
    contexts: list[LatencyReport] = []

    async def timed(spec: MeshSpec, lengths: Sequence[int]) -> list[LatencyReport]:
        spec = replace(spec, context=max(lengths) + standard.tokens + 1)
        reports = await measure_latency(spec, lengths, standard.tokens, described.vocabulary)
        return [replace(report, model=shape) for report in reports]

    for quantisation in standard.quantisations:
        for ranks in standard.ranks:
            say(f"latency: {quantisation}, ranks: {ranks}")
            both = quantisation == standard.quantisations[0] and ranks == standard.ranks[-1]
            lengths = [standard.prompt, *((standard.contexts[0], longest) if both else ())]
            spec = MeshSpec(model=model, weights=[1.0] * ranks, quantisation=quantisation, pin=True)
            first, *others = await timed(spec, lengths)
            latency.append(first)
            contexts += others
    exact: list[LatencyReport] = []
    spec = MeshSpec(model=model, weights=[1.0] * standard.ranks[-1], quantisation=standard.quantisations[0], pin=True)
    try:
        for pair in range(standard.pairs):
            say(f"exact mode: pair {pair + 1} of {standard.pairs}")
            for mode in (False, True):
                exact += await timed(replace(spec, exact=mode), [standard.prompt])
    except MeshError as error:
        if "exact=true" not in str(error):
            raise
        say(str(error))  # this machine cannot, or not this model: all else can be measured
    say("collectives")
    collectives = measure(Setup(ranks=standard.ranks[-1], sizes=standard.sizes))
    say("precision")
    drift = measure_drift(model, standard.ranks[-1])
    return Results(date.today().isoformat(), this_machine(), shape, latency, contexts, exact, collectives, drift)


def shape_name(model: Model) -> str:
    """What a model is called by its sizes: ``TinyLlama-1.1B shape``, or ``6 layers x 192 (2.6 M parameters)``."""
    heads = {layer.attention.heads for layer in model.layers if layer.attention}
    columns = {product.ws[0].out.size for product, _ in products(model) if product.ws[0].out.kind is Kind.MLP}
    for name in PUBLISHED if model.experts is None else ():
        known = SHAPES[name.lower()]
        queries = known["num_attention_heads"]
        size = known.get("head_dim", known["hidden_size"] // queries)
        if (
            (model.hidden, len(model.layers)) == (known["hidden_size"], known["num_hidden_layers"])
            and (model.vocabulary, model.tied) == (known["vocab_size"], known["tie_word_embeddings"])
            and heads == {Heads(queries, known["num_key_value_heads"], size)}
            and columns == {known["intermediate_size"]}
        ):
            return f"{name} shape"
    elements = parameters(model)
    count = f"{elements / 1e9:.1f} B" if elements >= 1e9 else f"{elements / 1e6:.1f} M"
    return f"{len(model.layers)} layers x {model.hidden} ({count} parameters)"


def this_machine() -> Machine:
    return Machine(
        cpu=cpu_name(),
        cores=usable_cores(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        versions={package: version(package) for package in PACKAGES},
    )


@contextmanager
def standard_model(say: Callable[[str], None]) -> Iterator[Path]:
    """A folder with a model of shape `SHAPE` and random weights, for as long as the context lasts.

    Raises:
        motley.bench.synth.SynthError: there is no room for it.
    """
    default_folder().mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="report-", dir=default_folder()) as place:
        say(f"writing a model of shape {SHAPE}")
        synthesise(SHAPES[SHAPE], Path(place) / SHAPE)
        yield Path(place) / SHAPE


def write_json(results: Results, folder: Path) -> Path:
    """Write the numbers to a file in `folder`, which is made if need be; returns its path.

    Raises:
        ReportError: it cannot be written.
    """
    path = folder / f"{results.name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results.as_json(), indent=1) + "\n", "utf-8")
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


# -- README ---------------------------------------------------------------------------------------------------------


def check_markers(readme: Path) -> None:
    """Find out before a long measurement whether its section can be written.

    Raises:
        ReportError: `readme` cannot be read, or does not have one `BEGIN` before one `END`.
    """
    _cut(_read(readme), readme)


def rewrite_section(readme: Path, results: Results, image: Path) -> None:
    """Put `section` between the markers.

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
            "The bound is what reading a token's weights takes at the memory bandwidth that as many cores had in the "
            f"same minute ({_span([report.bandwidth_gb_s for report in results.latency])} GB/s).",
            "",
            *(f"- {finding}" for finding in findings(results)),
            "",
            f"![Where the milliseconds of a token go, and how far ranks drift from one process]({image})",
        ]
    )


def findings(results: Results) -> list[str]:
    """What was measured besides the settings, a sentence each."""
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
