"""How far a model that is split over ranks drifts from one process, layer by layer.

Three runs of the same tokens, each over the split model and over one process, meet after every layer:

- *FP32*: by the CPU engine in float32, ranks being threads with a mesh on loopback: what Motley computes.
- *FP16*, simulated: the graph node by node; every operator takes and gives float16 values (weights, activations,
  residual, partial sums) and computes inside in float32, as half-precision kernels do. Sums over ranks are float32 in
  rank order, rounded when they are done. It is what compute in half precision would cost; Motley does that for products
  alone, and where it is asked to (`motley.bench.measurements.accuracy.product_precision`).
- *float64*: the graph node by node on one process, the truth that both are held against.

Weights are the checkpoint's, not quantised any further. A difference is divided by the largest magnitude of the float64
residual at its layer, so it reads as an error of activations of order one, whatever scale the model's weights give
them. The residual's root mean square stands beside it: dividing by that instead gives an error several times larger.

Layers stream: each is a model of its own whose output is the residual, is run in every way, and is dropped.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx.inliner
from onnx import numpy_helper

from motley.bench.meshes.thread_mesh import OnEveryRank, thread_mesh
from motley.daemon.models.cutting.profile import profile
from motley.daemon.models.cutting.share import Share
from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.axes import Axis, Kind, Value, W
from motley.daemon.models.description.model import EMBEDDING, Model
from motley.daemon.models.files import open_model
from motley.daemon.models.graph.rank_graph import Declared, build_rank_graph
from motley.daemon.models.keys import ConfigError
from motley.daemon.rank.loading import share_from_proto
from motley.daemon.rank.peers import Peers
from motley.daemon.weights.cache import default_folder
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import SHARE_FILE, Encoding
from motley.daemon.weights.stored import Source
from motley.orchestrator.planning.cutting.shares import Candidate, plan_shares
from motley.plugins.engine import F32, EngineOptions, RankGraph, Span
from motley.plugins.installed import load_engine
from motley.plugins.nodes import attributes_of, is_collective
from motley.plugins.reference.operators import OPERATORS
from motley.transport import Communicator

ENGINE = "onnxruntime"
"""What runs in FP32."""
POSITIONS = 64
"""Random tokens, in one step; as many as the prompt of `motley bench latency` has."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class LayerDrift:
    """Errors of the split model after a layer, relative to `max_activation`.

    ``fp32_error`` and ``fp16_error`` are mean absolute differences to one process in the same arithmetic,
    ``..._max_error`` the largest ones, ``..._float64_error`` means against float64. An FP16 run that overflowed has
    infinite errors.

    Attributes:
        max_activation: largest magnitude in the float64 residual.
        rms_activation: its root mean square.
    """

    layer: int
    fp32_error: float
    fp32_max_error: float
    fp32_float64_error: float
    fp16_error: float
    fp16_max_error: float
    fp16_float64_error: float
    max_activation: float
    rms_activation: float


@dataclass(frozen=True)
class Drift:
    """How far a model over `ranks` is from one process after each of its layers, in `positions` tokens at once."""

    model: str
    ranks: int
    layers: list[LayerDrift]
    engine: str = ENGINE
    positions: int = POSITIONS

    def as_json(self) -> dict[str, Any]:
        """What `motley bench precision --model --json` ends with; errors that are not finite become null."""
        layers = [
            {key: value if math.isfinite(value) else None for key, value in asdict(layer).items()}
            for layer in self.layers
        ]
        return {
            "layers": layers,
            "final_fp32_error": layers[-1]["fp32_error"],
            "final_fp16_error": layers[-1]["fp16_error"],
        }


@dataclass(frozen=True)
class Arithmetic:
    """In which type operators compute, and what is stored of their results."""

    dtype: type[np.floating[Any]]
    stored: Callable[[Array], Array] = lambda values: values


def _half(values: Array) -> Array:
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


FLOAT64 = Arithmetic(np.float64)
FP16 = Arithmetic(np.float32, _half)


def measure_drift(model: Path, ranks: int, progress: Callable[[int, int], None] = lambda done, total: None) -> Drift:
    """Run random tokens through a model (a folder, or a GGUF file), split evenly over `ranks`.

    Args:
        progress: called with the layers done and all of them.

    Raises:
        ConfigError, CheckpointError, ShareFileError, PlanError: the model cannot be run, or not so split, or has
            experts (which rounding can exchange: that is no drift), or recurrent states, or its layers cannot be apart.
    """
    layers = []
    with open_model(model) as opened, thread_mesh(1) as alone, thread_mesh(ranks) as together:
        described, source = opened.model, opened.source
        if described.experts or any(layer.recurrences for layer in described.layers):
            raise ConfigError(
                f"{model}: drift is measured of models without experts or recurrent states only; this one is"
                f" {described.family}"
            )
        refuse_whole(model, described)
        tokens = np.random.default_rng(0).integers(0, described.vocabulary, POSITIONS).tolist()
        one, split = even_shares(described, 1), even_shares(described, ranks)
        fp32_one = fp32 = fp16_one = fp16 = exact = source.rows(described.embedding.name, tokens)
        for layer in range(len(described.layers)):
            progress(layer, len(described.layers))
            with (
                on_disk(source, [layer_graph(described, one, 0, layer)]) as whole,
                on_disk(source, [layer_graph(described, split, rank, layer) for rank in range(ranks)]) as parts,
            ):
                fp32_one, fp32 = execute(whole, alone, fp32_one), execute(parts, together, fp32)
                fp16_one, fp16 = interpret(whole, fp16_one, FP16), interpret(parts, fp16, FP16)
                exact = interpret(whole, exact, FLOAT64)
            scale = float(np.abs(exact).max())
            fp32_error, fp32_max_error = _error(fp32, fp32_one, scale)
            fp16_error, fp16_max_error = _error(fp16, fp16_one, scale)
            layers.append(
                LayerDrift(
                    layer=layer,
                    fp32_error=fp32_error,
                    fp32_max_error=fp32_max_error,
                    fp32_float64_error=_error(fp32, exact, scale)[0],
                    fp16_error=fp16_error,
                    fp16_max_error=fp16_max_error,
                    fp16_float64_error=_error(fp16, exact, scale)[0],
                    max_activation=scale,
                    rms_activation=float(np.sqrt(np.mean(exact**2))),
                )
            )
        progress(len(described.layers), len(described.layers))
    return Drift(model.name, ranks, layers)


def _error(got: Array, expected: Array, scale: float) -> tuple[float, float]:
    """Mean and largest absolute difference."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(got.astype(np.float64) - expected) / scale
    if not np.isfinite(difference).all():
        return math.inf, math.inf
    return float(difference.mean()), float(difference.max())


def refuse_whole(where: Path, model: Model) -> None:
    """Refuse a model whose layers cannot be computed one by one.

    Raises:
        ConfigError: it is one.
    """
    if model.whole:
        raise ConfigError(
            f"{where}: measured is layer after layer, and layers of this model read more than the residual of those"
            " before (Gemma 4 E2B and E4B do)"
        )


def even_shares(model: Model, ranks: int) -> list[Share]:
    """The shares of equally fast ranks, which hold the model in FP32."""
    plenty = 1 << 60
    candidates = [Candidate(f"rank {rank}", 1.0, plenty) for rank in range(ranks)]
    return [
        share_from_proto(plan.to_share())
        for plan in plan_shares([profile(model, Encoding.FP32, 0)] * ranks, candidates, POSITIONS)
    ]


# -- one layer as a model -------------------------------------------------------------------------------------------


def layer_graph(model: Model, shares: Sequence[Share], rank: int, layer: int, positions: int = POSITIONS) -> Declared:
    """One layer as a model of its own: ``hidden`` is the residual before it, ``logits`` f32[R, D] the one after it.

    Any engine can run it.

    Args:
        shares: of the whole model.
        positions: the longest sequence, tokens.
    """
    residual = Axis(Kind.PLAIN, model.hidden, "hidden_size")
    rows = Value("logits", residual)
    alone = replace(
        model,
        layers=(model.layers[layer],),
        head=(),
        head_x=rows,
        logits=rows,
        embedding=W(EMBEDDING, residual, residual),  # whose words are the logits: every rank has all of them
        embedding_scale=model.embedding_scale if layer == 0 else 1.0,
    )
    cut = units(model, Encoding.FP32, 0)
    return build_rank_graph(alone, shares, rank, Encoding.FP32, 0, positions, cut=cut)


@contextmanager
def on_disk(source: Source, ranks: Sequence[Declared]) -> Iterator[list[RankGraph]]:
    """Every rank's graph with its weights in a file, for as long as the context lasts."""
    default_folder().mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="drift-", dir=default_folder()))
    try:
        bound = []
        for rank, declared in enumerate(ranks):
            (folder / str(rank)).mkdir()
            share_file = folder / str(rank) / SHARE_FILE
            write_share(source, declared.weights, declared.share_bytes, share_file)
            bound.append(declared.bind(share_file))
        yield bound
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- running it -----------------------------------------------------------------------------------------------------


def execute(
    graphs: Sequence[RankGraph],
    on_every_rank: OnEveryRank,
    hidden: F32,
    engine: str = ENGINE,
    options: Mapping[str, str] | None = None,
) -> F32:
    """The result of a `layer_graph` as rank 0 has it, computed by an engine with these settings in one step."""
    open_engine = load_engine(engine)
    rows = len(hidden)

    def work(communicator: Communicator) -> F32:
        graph = graphs[communicator.rank]
        span = Span(np.arange(graph.blocks.count, dtype=np.int32), position=0, rows=rows, wanted=rows, prompt=rows)
        engine = open_engine(graph, Peers(communicator), EngineOptions(max_rows=rows, extra=options or {}))
        try:
            return engine.step(hidden.copy(), [span]).copy()
        finally:
            engine.close()

    return on_every_rank(work)[0]


def interpret(graphs: Sequence[RankGraph], hidden: Array, arithmetic: Arithmetic) -> Array:
    """The residual after the layer: all ranks in step, node by node, their partial sums added in rank order."""
    ranks = [_rank(graph, hidden, arithmetic) for graph in graphs]
    residual, total = hidden, None
    while True:
        partials = []
        for rank in ranks:
            try:
                partials.append(rank.send(total))
            except StopIteration as end:
                residual = end.value
        if not partials:
            return residual
        total = reduce(np.add, partials)


def _rank(graph: RankGraph, hidden: Array, arithmetic: Arithmetic) -> Generator[Array, Array | None, Array]:
    """Run a rank's graph node by node; yields each of its partial sums, and is sent the sum over all ranks."""
    inlined = [(each.domain, each.name) for each in graph.proto.functions if each.name not in OPERATORS]
    proto = onnx.inliner.inline_selected_functions(graph.proto, inlined).graph
    weights = {tensor.name: tensor for tensor in proto.initializer}

    def stored(value: Array) -> Array:
        return arithmetic.stored(value.astype(arithmetic.dtype)) if value.dtype.kind == "f" else value

    values: dict[str, Array] = {
        "position": np.zeros(1, np.int64),
        "rows": np.arange(len(hidden)),
        "hidden": stored(hidden),
        **{name: stored(table) for name, table in graph.constants(len(hidden)).items()},
    }
    for spec in graph.caches:
        for name in spec.names:
            values[name] = np.zeros((1, spec.heads, len(hidden), spec.head_dim), arithmetic.dtype)
    for node in proto.node:
        inputs = [
            values[name]
            if name in values
            else stored(numpy_helper.to_array(weights[name], str(graph.share_file.parent)))
            for name in node.input
        ]
        if is_collective(node):
            total = yield inputs[0]
            assert total is not None
            results = [total]
        elif node.op_type == "Cast":  # always of whole numbers, to floats
            results = [inputs[0].astype(arithmetic.dtype)]
        else:
            attributes = attributes_of(node)
            result = OPERATORS[node.op_type](np, *inputs, **attributes)
            results = result if len(node.output) > 1 else [result]
        values.update((name, stored(value)) for name, value in zip(node.output, results, strict=True))
    return values["logits"]
