"""Prompts beyond 4096, 8192 and 32768 tokens, or beyond where dynamic scaling begins, against transformers."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.daemon.models.cutting.units import units
from motley.daemon.models.reading import read_model
from motley.plugins.engine import CacheBlocks, EngineOptions
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from tests.models.cases import LocalSession, uneven_shares

LONG = Path(__file__).parent / "long"
TOLERANCE = 1e-4
"""Of the largest logit."""
CHUNK = 70


@pytest.mark.parametrize("folder", sorted(LONG.iterdir()), ids=lambda folder: folder.name)
def test_rows_at_the_borders_and_the_end(folder: Path, tmp_path: Path) -> None:
    config = read_model(folder)
    with np.load(folder / "expected.npz") as golden:
        tokens, rows, logits = golden["tokens"].tolist(), golden["rows"].tolist(), golden["logits"]
        prompt = int(golden["prompt"])
    shares = uneven_shares(units(config, "fp32", 32), 2)
    options = EngineOptions(max_rows=CHUNK)
    got = []
    given: dict[str, Any] = {
        "context": len(tokens),
        "prompt": prompt,
        "blocks": CacheBlocks(ceil(len(tokens) / 32), 32),
    }
    with LocalSession(folder, OnnxRuntimeEngine, shares, tmp_path, options=options, **given) as ranks:
        for start in [*range(0, prompt, CHUNK), *range(prompt, len(tokens))]:
            chunk = tokens[start : min(prompt, start + CHUNK) if start < prompt else start + 1]
            wanted = [row - start for row in rows if start <= row < start + len(chunk)]
            logits_of_chunk = ranks.step(chunk, start, len(chunk) if wanted else 0)
            got.append(logits_of_chunk[wanted])
    error = np.abs(np.concatenate(got) - logits).max(axis=1) / np.abs(logits).max()
    assert error.max() < TOLERANCE, dict(zip(rows, error.tolist(), strict=True))
