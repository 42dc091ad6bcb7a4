"""The GPU engine on a real device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from motley.daemon.models.units import units
from motley.plugins.cuda import CudaEngine
from motley.transport.cuda.driver import CudaDriver
from tests.models.cases import Case, LocalSession, golden_cases, uneven_shares


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("case", golden_cases(), ids=str)
def test_transformers_logits_at_any_split(gpu: CudaDriver, case: Case, ranks: int, tmp_path: Path) -> None:
    shares = uneven_shares(units(case.config, "fp32", 32), ranks)
    with LocalSession(case.folder, CudaEngine, shares, tmp_path) as group:
        group.open_slot()
        for start, stop in ((0, 5), (5, 6), (6, len(case.tokens) - 1)):
            got = group.step(case.tokens[start:stop], start)
            expected = case.logits[start:stop]
            assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
