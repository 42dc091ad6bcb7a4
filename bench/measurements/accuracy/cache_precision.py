"""What narrow caches cost: how far the next-token distributions of a model move when its KV caches are fp16 or int8.

The model reads a text in one step, layer by layer, by the CPU engine with the checkpoint's weights in FP32. Each token
attends to keys and values as they are kept, so its distribution is that of a session which has come that far. It is
held against the one with caches in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from motley.bench.measurements.accuracy.drift import even_shares, execute, layer_graph, on_disk, refuse_whole
from motley.bench.measurements.accuracy.reading import F64, POSITIONS, TEXT, divergences, log_softmax, with_head
from motley.bench.meshes.thread_mesh import thread_mesh
from motley.daemon.models.cutting.profile import profile
from motley.daemon.models.files import load_tokenizer, open_model
from motley.daemon.weights.spec import Encoding
from motley.orchestrator.planning.cutting.shares import cached_bytes
from motley.plugins.engine import CACHE_FORMATS, F32


@dataclass(frozen=True)
class CacheError:
    """What caches in a format do to the distributions of the tokens after each of `positions`.

    Attributes:
        bytes_per_token: that keys and values take, over all layers.
        mean_kl, max_kl: the Kullback-Leibler divergence from the distribution with fp32 caches, in nats.
        same_greedy: the share of positions after which the likeliest token is the same.
    """

    format: str
    bytes_per_token: int
    positions: int
    mean_kl: float
    max_kl: float
    same_greedy: float


def measure_cache_formats(
    folder: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[CacheError]:
    """Have a model (a folder, or a GGUF file) read a text with caches of every format.

    Args:
        progress: called with the layers done and all of them.

    Raises:
        ConfigError, CheckpointError, TokenizerError, ShareFileError: the model cannot be run.
    """
    with open_model(folder) as opened, thread_mesh(1) as alone:
        model, source = opened.model, opened.source
        refuse_whole(folder, model)
        tokens = load_tokenizer(folder).encode(TEXT)[: min(POSITIONS, model.context)]
        share, layers = even_shares(model, 1), len(model.layers)
        states: dict[str, F32] = dict.fromkeys(CACHE_FORMATS, source.rows(model.embedding.name, tokens))
        for layer in range(layers):
            progress(layer, layers)
            part = with_head if layer == layers - 1 else layer_graph
            with on_disk(source, [part(model, share, 0, layer, len(tokens))]) as (graph,):
                for kept, state in states.items():
                    states[kept] = execute([replace(graph, blocks=replace(graph.blocks, format=kept))], alone, state)
        progress(layers, layers)
        takes = {kept: profile(model, Encoding.FP32, 0, cache_format=kept) for kept in CACHE_FORMATS}
    right = log_softmax(states[CACHE_FORMATS[0]])
    return [
        _error(kept, cached_bytes(takes[kept], range(takes[kept].kv_groups), 1), right, log_softmax(logits))
        for kept, logits in states.items()
    ]


def _error(kept: str, bytes_per_token: int, right: F64, got: F64) -> CacheError:
    """The error of log-probabilities f64[T, V]."""
    divergence = divergences(right, got)
    return CacheError(
        format=kept,
        bytes_per_token=bytes_per_token,
        positions=len(right),
        mean_kl=float(divergence.mean()),
        max_kl=float(divergence.max()),
        same_greedy=float((right.argmax(axis=1) == got.argmax(axis=1)).mean()),
    )
