"""What narrow caches do to the distributions of the next token, as `motley bench precision --model` states it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import motley.cli
from motley.bench.measurements.accuracy.cache_precision import _error, measure_cache_formats
from motley.bench.measurements.accuracy.reading import POSITIONS, TEXT, log_softmax
from motley.daemon.models.cutting.units import units
from motley.daemon.models.files import load_tokenizer, read_model
from motley.plugins.engine import CacheBlocks, EngineOptions
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from tests.models.cases import LocalSession, whole_share

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"


def test_layer_by_layer_it_is_what_a_session_computes(tmp_path: Path) -> None:
    """A whole model that reads the text in chunks, over caches of each format, is as far from itself."""
    model, tokens = read_model(BUNDLED), load_tokenizer(BUNDLED).encode(TEXT)[:POSITIONS]
    assert len(tokens) == POSITIONS
    share, blocks, spoken = [whole_share(units(model, "fp32", 128))], CacheBlocks(count=13, tokens=32), {}
    for kept in ("fp32", "fp16", "int8"):
        own = replace(blocks, format=kept)
        options = EngineOptions(max_rows=128)
        with LocalSession(BUNDLED, OnnxRuntimeEngine, share, tmp_path / kept, blocks=own, options=options) as ranks:
            logits = [ranks.step(tokens[start : start + 128], start) for start in range(0, POSITIONS, 128)]
            spoken[kept] = log_softmax(np.concatenate(logits))
    rows = measure_cache_formats(BUNDLED)
    assert [row.format for row in rows] == [*spoken]
    assert [row.bytes_per_token for row in rows] == [4608, 2304, 1296]
    fp32, fp16, int8 = rows
    assert (fp32.mean_kl, fp32.max_kl, fp32.same_greedy) == (0, 0, 1)
    for row in (fp16, int8):
        alone = _error(row.format, 0, spoken["fp32"], spoken[row.format])
        assert row.mean_kl == pytest.approx(alone.mean_kl, rel=0.1)
        assert row.same_greedy == pytest.approx(alone.same_greedy, abs=0.005)
    assert 0 < fp16.mean_kl < 1e-6 < int8.mean_kl < 1e-3
    assert int8.max_kl < 0.02
    assert int8.same_greedy > 0.97


def test_the_divergence_is_kullbacks_and_leiblers() -> None:
    right = np.log([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])
    got = np.log([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]])
    row = _error("int8", 1, right, got)
    assert row.max_kl == pytest.approx(0.25 * np.log(2))
    assert row.mean_kl == pytest.approx(row.max_kl / 2)
    assert row.same_greedy == 0.5
    np.testing.assert_allclose(np.exp(log_softmax(np.array([[0, 1, 1000]], np.float32))), [[0, 0, 1]], atol=1e-12)
