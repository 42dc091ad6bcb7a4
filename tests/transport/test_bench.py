from __future__ import annotations

from motley.bench.collectives import measure


def test_the_bench_measures_real_processes() -> None:
    rows = measure(2, [0, 8192], rounds=20)
    assert [(row.ranks, row.size_bytes, row.rounds) for row in rows] == [(2, 0, 20), (2, 8192, 20)]
    assert all(0 < row.p50_us <= row.p99_us for row in rows)
