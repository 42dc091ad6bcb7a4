"""Long texts of several sequences at once over a real mesh, and what the reference says to them."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.model import EMBEDDING
from motley.daemon.models.files import open_model
from motley.daemon.models.graph.rank_graph import build_rank_graph
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import SHARE_FILE
from motley.plugins.engine import F32, CacheBlocks, EngineFactory, EngineOptions
from motley.plugins.reference.engine import ReferenceEngine
from motley.transport import Communicator
from tests.models.cases import LocalSession, uneven_shares
from tests.plugins.sequences import Sequences

Texts = npt.NDArray[np.int64]
"""i64[sequences, tokens]."""
CHUNK = 256


def write_texts(
    communicator: Communicator,
    model: Path,
    folder: Path,
    factory: EngineFactory,
    options: EngineOptions,
    sequences: int,
    tokens: int,
) -> Texts:
    """A rank's part in writing texts that begin with unlike tokens, a wave at a time; they are sampled (`_noise`)."""
    rank, size = communicator.rank, communicator.size
    with open_model(model) as opened:
        config = opened.model
        shares = uneven_shares(units(config, "fp32", 32), size)
        declared = [
            build_rank_graph(config, shares, each, "fp32", 32, config.context, opened.stored, False)
            for each in range(size)
        ]
        share_file = folder / f"rank{rank}" / SHARE_FILE
        share_file.parent.mkdir(parents=True)
        write_share(opened.source, declared[rank].weights, declared[rank].share_bytes, share_file)
        collectives: Any = communicator
        graph = replace(declared[rank].bind(share_file), blocks=CacheBlocks(sequences * ceil(tokens / 32), 32))
        engine = factory(graph, collectives, options)
        try:
            together = Sequences(engine, graph)
            texts = np.zeros((sequences, tokens), np.int64)
            texts[:, 0] = np.arange(sequences)
            slices = [np.empty((sequences, len(each.words)), np.float32) for each in declared]
            for at in range(tokens - 1):
                hidden = opened.source.rows(EMBEDDING, texts[:, at].tolist())
                slices[rank][:] = together.decode(range(sequences), hidden, [at] * sequences)
                communicator.all_gather(slices[rank], slices)
                logits = np.concatenate(slices, axis=1)
                texts[:, at + 1] = (logits + _noise(at, logits.shape)).argmax(axis=1)
            return texts
        finally:
            engine.close()


def regret(model: Path, folder: Path, texts: Texts) -> float:
    """By how much the reference would rather have had another token, where that is most: of the largest logit."""
    worst = 0.0
    with open_model(model) as opened:
        config = opened.model
    noise = np.stack([_noise(at, (len(texts), config.vocabulary)) for at in range(texts.shape[1] - 1)], axis=1)
    alone = uneven_shares(units(config, "fp32", 32), 1)
    options, blocks = EngineOptions(max_rows=CHUNK), CacheBlocks(ceil(texts.shape[1] / 32), 32)
    with LocalSession(model, ReferenceEngine, alone, folder, options=options, blocks=blocks) as group:
        for slot, text in enumerate(texts):
            for start in range(0, len(text) - 1, CHUNK):
                rows = slice(start, min(start + CHUNK, len(text) - 1))
                logits = group.step(text[rows].tolist(), start, sequence=slot)
                noisy, largest = logits + noise[slot, rows], np.abs(logits).max()
                chosen = np.take_along_axis(noisy, text[1:][rows, None], axis=1)[:, 0]
                worst = max(worst, float((noisy.max(axis=1) - chosen).max() / largest))
            group.sequences.close(slot)
    return worst


def _noise(at: int, shape: tuple[int, ...]) -> F32:
    """Gumbel noise, by which the largest sum is a sample; the same for a token of a sequence whoever asks."""
    return np.random.default_rng(at).gumbel(size=shape).astype(np.float32)
