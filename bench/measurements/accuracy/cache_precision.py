"""What narrow caches cost: how far the next-token distributions of a model move when its KV caches are fp16 or int8.

The model reads a text in one step, layer by layer, by the CPU engine with the checkpoint's weights in FP32. Each token
attends to keys and values as they are kept, so its distribution is that of a session which has come that far. It is
held against the one with caches in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from motley.bench.measurements.accuracy.drift import even_shares, execute, layer_graph, on_disk, refuse_whole
from motley.bench.meshes.thread_mesh import thread_mesh
from motley.daemon.models.cutting.profile import profile
from motley.daemon.models.cutting.share import Share
from motley.daemon.models.description.model import EMBEDDING, Model
from motley.daemon.models.files import load_tokenizer, open_model
from motley.daemon.models.graph.rank_graph import Declared, build_rank_graph
from motley.daemon.weights.spec import Encoding
from motley.orchestrator.planning.cutting.shares import cached_bytes
from motley.plugins.engine import CACHE_FORMATS, F32

POSITIONS = 384
"""Tokens of the text that are read, if the model's context is as long."""
TEXT = """\
Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date:
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
And every fair from fair sometime declines,
By chance, or nature's changing course, untrimm'd;
But thy eternal summer shall not fade
Nor lose possession of that fair thou owest;
Nor shall Death brag thou wander'st in his shade,
When in eternal lines to time thou growest:
So long as men can breathe or eyes can see,
So long lives this, and this gives life to thee.

When, in disgrace with fortune and men's eyes,
I all alone beweep my outcast state
And trouble deaf heaven with my bootless cries
And look upon myself and curse my fate,
Wishing me like to one more rich in hope,
Featured like him, like him with friends possess'd,
Desiring this man's art and that man's scope,
With what I most enjoy contented least;
Yet in these thoughts myself almost despising,
Haply I think on thee, and then my state,
Like to the lark at break of day arising
From sullen earth, sings hymns at heaven's gate;
For thy sweet love remember'd such wealth brings
That then I scorn to change my state with kings.

When to the sessions of sweet silent thought
I summon up remembrance of things past,
I sigh the lack of many a thing I sought,
And with old woes new wail my dear time's waste.
"""

F64 = npt.NDArray[np.float64]


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
        states: dict[str, F32] = dict.fromkeys(CACHE_FORMATS, source.rows(EMBEDDING, tokens))
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


def with_head(model: Model, shares: Sequence[Share], rank: int, layer: int, positions: int) -> Declared:
    """Make the graph of `layer_graph` with the head after its layer, the last one: ``logits`` are f32[T, V]."""
    scale = model.embedding_scale if layer == 0 else 1.0
    last = replace(model, layers=(model.layers[layer],), embedding_scale=scale)
    return build_rank_graph(last, shares, rank, Encoding.FP32, 0, positions)


def log_softmax(logits: F32) -> F64:
    """f64[T, V] of f32[T, V]."""
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return scores


def _error(kept: str, bytes_per_token: int, right: F64, got: F64) -> CacheError:
    """The error of log-probabilities f64[T, V]."""
    divergence = np.maximum(0.0, (np.exp(right) * (right - got)).sum(axis=1))
    return CacheError(
        format=kept,
        bytes_per_token=bytes_per_token,
        positions=len(right),
        mean_kl=float(divergence.mean()),
        max_kl=float(divergence.max()),
        same_greedy=float((right.argmax(axis=1) == got.argmax(axis=1)).mean()),
    )
