"""What quantised weights cost, as `motley bench quantisation` states it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import motley.cli
from motley.bench.measurements.accuracy.quantisation import NEAREST, measure_foresight, measure_weight_errors, rounded
from motley.daemon.weights.spec import Encoding

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"


def test_int4_is_nearer_than_the_nearest_code_of_the_peaks_scale() -> None:
    errors = {(row.format, row.block, row.weights): row.percent for row in measure_weight_errors()}
    assert len(errors) == 12
    for (form, block, weights), percent in errors.items():
        if form == Encoding.INT4:
            assert percent < 0.97 * errors[NEAREST, block, weights]
        assert (percent < 1) is (form == Encoding.INT8)
    assert errors[NEAREST, 32, "gaussian"] == pytest.approx(8.6, abs=0.1)


def test_rounding_to_nearest_follows_the_rule() -> None:
    values = np.array([[8, -3.4, 1, 0] + [0] * 28], np.float32)
    assert rounded(values, NEAREST, 32)[0, :4].tolist() == [8, -3, 1, 0]


def test_a_model_foresees_a_text_worse_in_int4() -> None:
    rows = {(row.format, row.block): row for row in measure_foresight(BUNDLED)}
    fp32, int8, int4 = rows["fp32", 0], rows[Encoding.INT8, 32], rows[Encoding.INT4, 32]
    assert fp32.mean_kl == 0
    assert fp32.perplexity == pytest.approx(42.8, abs=0.1)
    assert int8.mean_kl < 2e-4
    assert int8.perplexity == pytest.approx(fp32.perplexity, rel=2e-3)
    assert int4.mean_kl < 0.9 * rows[NEAREST, 32].mean_kl < 0.03
