"""The standard set of measurements that tells how fast Motley is on a machine.

One run, one machine: latency at one and two ranks in int4 and int8, a short and a long context, what exact mode costs,
collectives, precision. The model is called by its shape: where its files lie is nobody's business.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from motley.bench.measurements.accuracy.drift import Drift, measure_drift
from motley.bench.measurements.speed.collectives import Row, Setup, measure
from motley.bench.measurements.speed.latency import LatencyReport, measure_latency
from motley.bench.meshes.local_mesh import MeshError, MeshSpec
from motley.daemon.machine.processor import cpu_name, usable_cores
from motley.daemon.models.description.axes import Heads, Kind
from motley.daemon.models.description.model import Model, parameters, products
from motley.daemon.models.files import open_model
from motley.orchestrator.known_models.shapes import SHAPES
from motley.protocol.release import release

SHAPE = "tinyllama-1.1b"
"""Synthesised where no model is given."""
PUBLISHED = (
    "TinyLlama-1.1B",
    "Llama-3.2-1B",
    "Llama-3.2-3B",
    "Llama-3.1-8B",
    "Mistral-7B",
    "Qwen2.5-0.5B",
    "Qwen2.5-7B",
    "Qwen3-0.6B",
    "Qwen3-4B",
    "Qwen3-8B",
    "Qwen3-14B",
    "Qwen3-32B",
    "SmolLM3-3B",
    "Seed-OSS-36B",
    "Ministral-3-8B",
    "Hunyuan-7B",
    "GLM-4-9B-0414",
    "Gemma-3-4B",
    "OLMo-3-7B",
    "Phi-3-mini-4k",
    "IQuest-Coder-40B",
)
"""What the models without experts are called whose shapes are `motley.orchestrator.known_models.shapes.SHAPES`."""
PACKAGES = ("numpy", "onnxruntime")


class ReportError(Exception):
    """The report cannot be written; the message says where and why."""


@dataclass(frozen=True)
class Standard:
    """Which settings the standard set measures.

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
    """What the measurements ran on; `versions` by name of the package."""

    cpu: str
    cores: int
    system: str
    python: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Results:
    """The figures of one run of the standard set, and what it ran on.

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
        """The report whose tokens are drawn: of the first quantisation, over the most ranks."""
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
        """The seconds from a rank's order to load until it is ready, its share and what the reference answers about it
        being in the cache: the slowest rank."""
        return max(self.exact[::2][-1].load_s)  # the latest of those that are planned alike

    @property
    def name(self) -> str:
        """What the files of these results are called, without ending: ``2026-11-20-amd-epyc-2-cores``."""
        cpu = re.sub(r"[^a-z0-9]+", "-", self.machine.cpu.lower()).strip("-")
        return f"{self.day}-{cpu}-{self.machine.cores}-cores"

    def as_json(self) -> dict[str, Any]:
        """What `motley bench report --json` ends with, and its file of numbers holds."""
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
    """This machine, with the cores that this process may use, and what is installed."""
    return Machine(
        cpu=cpu_name(),
        cores=usable_cores(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        versions={"motley": release(), **{package: version(package) for package in PACKAGES}},
    )


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
