from __future__ import annotations

import sys

import pytest

from motley.bench.measurements.training.memory import SHAPE, TECHNIQUES, TrainingRow, measure_training, ratio_at


def test_the_ratio_is_that_of_one_context() -> None:
    rows = [
        TrainingRow(context, technique, peak, 1.0)
        for context, peaks in ((64, (90.0, 9.0)), (128, (200.0, 10.0)))
        for technique, peak in zip(("lora", "+ labels"), peaks, strict=True)
    ]
    assert ratio_at(rows, 128) == 20.0
    assert ratio_at(rows, 256) is None


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are measured on Linux only")
def test_every_technique_takes_less_than_plain_lora() -> None:
    for name in ("torch", "transformers", "peft"):
        pytest.importorskip(name)
    shape = SHAPE | {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 16_000}
    told: list[tuple[int, int]] = []
    rows = measure_training([512], shape, 20, lambda done, total: told.append((done, total)))
    assert [row.technique for row in rows] == list(TECHNIQUES)
    assert told[-1] == (len(rows), len(rows))
    assert all(row.step_s > 0 for row in rows)
    ratio = ratio_at(rows, 512)
    assert ratio is not None
    assert ratio > 2
