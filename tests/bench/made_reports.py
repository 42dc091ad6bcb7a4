"""Made-up measurements, for what is drawn and written from them."""

from __future__ import annotations

from dataclasses import replace

from motley.bench.measurements.accuracy.drift import Drift, LayerDrift
from motley.bench.measurements.speed.collectives import Row
from motley.bench.measurements.speed.latency import LatencyReport, Timeline
from motley.bench.reports.standard import Machine, Results


def latency_report(quant: str = "int4", ranks: int = 2, prompt_tokens: int = 64, link: str = "") -> LatencyReport:
    """Four tokens: a rank computes 8 ms, sends 1 and waits 2, the leader needs 1; the third token waits 10 ms more."""
    waits = [2.0, 2.0, 12.0, 2.0]
    parts = {"compute_ms": [8.0] * 4, "wire_ms": [1.0] * 4, "wait_ms": waits}
    mean = {"compute_ms": 8.0, "wire_ms": 1.0, "wait_ms": 4.5}
    return LatencyReport(
        model="shape",
        engine="onnxruntime",
        quant=quant,
        cache_format="fp32",
        exact=False,
        ranks=ranks,
        prompt_tokens=prompt_tokens,
        link=link,
        stages=[],
        shares=[{"attention": 1, "mlp": 2, "vocabulary": 3}] * ranks,
        ms_per_token={"mean": 14.5, "p50": 12.0, "p95": 20.5, "p99": 21.7},
        bandwidth_gb_s=40.0,
        weights_mb_per_token=400.0,
        caches_mb_per_token=0.0,
        bound_ms=10.0,
        ratio=1.2,
        prefill_tokens_per_s=150.4,
        ttft_ms=426.0,
        **mean,
        collectives_per_token=44.0,
        peak_rss_mb=[500.0 + rank for rank in range(ranks)],
        shard_mb=[400.0 / ranks] * ranks,
        load_s=[5.0] * ranks,
        per_rank=[{**mean, "collectives": 44.0}] * ranks,
        timeline=Timeline(step_ms=[12.0, 12.0, 22.0, 12.0], ranks=[parts] * ranks),
    )


LAYER = LayerDrift(
    layer=0,
    fp32_error=1.26e-7,
    fp32_max_error=1e-6,
    fp32_float64_error=2e-7,
    fp16_error=3e-4,
    fp16_max_error=2e-3,
    fp16_float64_error=float("inf"),
    max_activation=3.0,
    rms_activation=0.5,
)
DRIFT = Drift("shape", 2, [LAYER, replace(LAYER, layer=1, fp32_error=2.5e-7)])


def results() -> Results:
    return Results(
        day="2026-11-20",
        machine=Machine("AMD EPYC (Zen 5) @ 4 GHz", 2, "Linux 6", "3.11.7", {"motley": "0.1.0", "onnxruntime": "1.31"}),
        model="Known-1B shape",
        latency=[latency_report(quant, ranks) for quant in ("int4", "int8") for ranks in (1, 2)],
        contexts=[latency_report(), replace(latency_report(prompt_tokens=1950), ms_per_token={"p50": 15.0})],
        exact=[
            replace(latency_report(), load_s=[0.4, 0.6], exact=mode, ms_per_token={"p50": ms})
            for mode, ms in ((False, 10.0), (True, 10.5), (False, 20.0), (True, 21.4), (False, 10.0), (True, 30.0))
        ],
        collectives=[
            Row("all_reduce", 8192, 2, "one-shot", 13.2, 20.0, 14.0, 309.4),
            Row("all_reduce", 1 << 20, 2, "two-shot", 205.0, 300.0, 230.0, None),
        ],
        drift=DRIFT,
    )
