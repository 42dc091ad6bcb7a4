"""A model reads the text in several ways, layer by layer, and how far apart what it foresees then is.

Weights are the checkpoint's in FP32. Each token attends to keys and values as they are kept, so its distribution is
that of a session which has come that far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from motley.bench.measurements.accuracy.drift import ENGINE, even_shares, execute, layer_graph, on_disk, refuse_whole
from motley.bench.measurements.accuracy.reading import F64, POSITIONS, TEXT, divergences, log_softmax, with_head
from motley.bench.meshes.thread_mesh import thread_mesh
from motley.daemon.models.files import OpenModel, load_tokenizer
from motley.plugins.engine import CACHE_FORMATS, F32


@dataclass(frozen=True)
class Way:
    """How a model is computed.

    Attributes:
        caches: what keys and values are kept as.
        engine: what computes.
        options: settings of that, by name.
    """

    caches: str = CACHE_FORMATS[0]
    engine: str = ENGINE
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Moved:
    """How far the distributions of the tokens after each of `positions` are from the right ones.

    Attributes:
        mean_kl, max_kl: the Kullback-Leibler divergence, in nats.
        same_greedy: the share of positions after which the likeliest token is the same.
    """

    positions: int
    mean_kl: float
    max_kl: float
    same_greedy: float

    @classmethod
    def between(cls, right: F64, got: F64) -> Moved:
        """That of log-probabilities f64[T, V]."""
        divergence = divergences(right, got)
        same = (right.argmax(axis=1) == got.argmax(axis=1)).mean()
        return cls(len(right), float(divergence.mean()), float(divergence.max()), float(same))


def foreseen(
    folder: Path, opened: OpenModel, ways: Mapping[str, Way], progress: Callable[[int, int], None]
) -> dict[str, F64]:
    """The log-probabilities f64[T, V] of each token of the text's next ones, by the names of the ways.

    Args:
        folder: the model's.
        progress: called with the layers done and all of them.

    Raises:
        ConfigError, CheckpointError, TokenizerError, ShareFileError: the model cannot be run.
        EngineError: an engine cannot compute in that way here.
    """
    model, source = opened.model, opened.source
    refuse_whole(folder, model)
    tokens = load_tokenizer(folder).encode(TEXT)[: min(POSITIONS, model.context)]
    share, layers = even_shares(model, 1), len(model.layers)
    states: dict[str, F32] = dict.fromkeys(ways, source.rows(model.embedding.name, tokens))
    with thread_mesh(1) as alone:
        for layer in range(layers):
            progress(layer, layers)
            part = with_head if layer == layers - 1 else layer_graph
            with on_disk(source, [part(model, share, 0, layer, len(tokens))]) as (graph,):
                for name, way in ways.items():
                    own = [replace(graph, blocks=replace(graph.blocks, format=way.caches))]
                    states[name] = execute(own, alone, states[name], way.engine, way.options)
    progress(layers, layers)
    return {name: log_softmax(logits) for name, logits in states.items()}
