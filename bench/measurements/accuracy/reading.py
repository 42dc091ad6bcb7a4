"""The text that a model reads where its formats are measured, and how far what it foresees is from what it should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from motley.daemon.models.cutting.share import Share
from motley.daemon.models.description.model import Model
from motley.daemon.models.graph.rank_graph import Declared, build_rank_graph
from motley.daemon.weights.spec import Encoding
from motley.plugins.engine import F32

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


def divergences(right: F64, got: F64) -> F64:
    """f64[T]: the Kullback-Leibler divergence from the right distributions of tokens, in nats.

    Args:
        right, got: logarithms of probabilities, f64[T, V].
    """
    divergence: F64 = np.maximum(0.0, (np.exp(right) * (right - got)).sum(axis=1))
    return divergence
