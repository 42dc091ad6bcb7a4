"""What products in FP16 do to the distributions of the next token, as `motley bench precision` states it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import motley.cli
from motley.bench.measurements.accuracy.product_precision import measure_products
from tests.plugins.onnxruntime_gpu.processes import said_in_fp16

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"


def measured() -> dict[str, float]:
    return asdict(measure_products(BUNDLED))


def test_what_they_do_is_no_more_than_caches_in_int8_do() -> None:
    moved = said_in_fp16(__name__, "measured")
    assert 1e-6 < moved["mean_kl"] < 1e-4
    assert moved["max_kl"] < 2e-3
    assert moved["same_greedy"] > 0.97
