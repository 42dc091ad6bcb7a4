"""Live parity: whatever the installed transformers computes now, where it is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from motley.daemon.models.config import read_config
from motley.daemon.models.units import units
from motley.plugins.cupy import ReferenceEngine
from tests.models.cases import GOLDEN, LocalSession, uneven_shares

pytest.importorskip("torch")
pytest.importorskip("transformers")

BUNDLED = Path(__file__).parents[2] / "cli" / "models" / "shakespeare-2.6m"


@pytest.mark.parametrize("model", [*sorted(GOLDEN.iterdir()), BUNDLED], ids=lambda folder: folder.name)
def test_logits_of_a_fresh_prompt(model: Path, tmp_path: Path) -> None:
    from tests.models.make_golden import transformers_logits

    config = read_config(model)
    tokens = np.random.default_rng(2026).integers(0, config.vocabulary, 50).tolist()
    expected = transformers_logits(model, tokens)
    with LocalSession(model, ReferenceEngine, uneven_shares(units(config, "fp32", 32), 3), tmp_path) as ranks:
        ranks.open_slot()
        got = ranks.step(tokens, 0)
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
