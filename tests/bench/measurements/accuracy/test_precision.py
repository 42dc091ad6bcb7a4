from __future__ import annotations

import pytest

from motley.bench.measurements.accuracy.precision import measure_wire_formats


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_format_errs_as_its_bits_say(ranks: int) -> None:
    rows = {(row.format, row.activations): row for row in measure_wire_formats(ranks)}
    assert len(rows) == 6
    for row in rows.values():
        assert 0 < row.mean_error < row.max_error
    for activations in ("gaussian", "heavy-tailed"):
        fp32, bf16, int8 = (rows[name, activations] for name in ("fp32", "bf16", "int8"))
        assert fp32.bytes_per_value == 4
        assert bf16.bytes_per_value == 2
        assert 1 < int8.bytes_per_value < 1.1
        assert fp32.mean_error < 1e-7  # float32 itself, half a unit of the last place of 24 bits and a little more
        assert 5e-4 < bf16.mean_error < 4e-3  # 8 bits
        assert 1e-3 < int8.mean_error < 3e-2  # 127 steps to the largest of a block
    # Of a block's values the largest sets the step for all.
    assert rows["int8", "heavy-tailed"].mean_error > rows["int8", "gaussian"].mean_error
