"""`make gpu` without a GPU: its measurements run, on what stands for one, and it says what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import motley.cli
from motley.bench.measurements import gpu_speed
from motley.bench.reports import gpu
from motley.transport.cuda.driver import CudaDriver
from motley.transport.cuda.errors import CudaError
from motley.transport.cuda.host_step import HostStep
from tests.transport.cuda.host_driver import HostDriver

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"


@pytest.mark.parametrize("kind", gpu_speed.BITS)
def test_a_bandwidth_is_measured_and_nothing_is_left(kind: str) -> None:
    driver = HostDriver()
    rates = gpu_speed.matmul_bandwidth(driver, kind, (16, 1024), launches=2)
    assert list(rates) == [1, 2, 4, 8]
    assert min(rates.values()) > 0
    assert driver.live == 0


@pytest.mark.parametrize(("form", "captured"), [(HostStep.MEMORY, False), (HostStep.FUNCTION, True)])
def test_sums_are_timed_between_two_processes(form: HostStep, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3])  # for the processes: the driver is one of the tests
    took = gpu_speed.all_reduce_us(form, captured, rounds=1, open_driver=HostDriver)
    assert list(took) == list(gpu_speed.SIZES)
    assert min(took.values()) > 0


def test_tokens_are_timed_on_any_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_speed, "REQUESTS", (1, 2))
    monkeypatch.setattr(gpu_speed, "ANSWER", 12)
    monkeypatch.setattr(gpu_speed, "LONG", 70)
    took = gpu_speed.speed(BUNDLED, "fp16", 2, engine="onnxruntime")
    parts = [took[part] for part in gpu.PARTS if part != "p50"]
    assert min(took[part] for part in ("p50", "compute", "wire", "wait")) > 0
    assert sum(parts) > 0.5 * took["p50"]
    assert took["weights_mb"] > 8  # as FP32: this engine would widen FP16
    assert took["prompt_per_s"] > 0
    assert list(took["per_s"]) == [1, 2]
    assert min(took["per_s"].values()) > 0


def result(**changed: Any) -> gpu.Result:
    device = {
        "name": "A GPU",
        "compute_capability": "8.6",
        "cuda": "13.0",
        "memory_bytes": 12_000_000_000,
        "free_bytes": 11_000_000_000,
    }
    token = {"p50": 4.0, "compute": 3.0, "wire": 0.25, "wait": 0.5, "lead": 0.125, "weights_mb": 600.0}
    token |= {"prompt_per_s": 1999.6, "per_s": {1: 250.0, 2: 480.2, 4: 900.0, 8: 1500.0}}
    rates = {1: 3e11, 2: 2.9e11, 4: 2.8e11, 8: 2e11}
    return {
        "device": device,
        "tests": {"passed": True, "summary": "3 passed, 1 skipped", "skipped": ["SKIPPED [1] no CuPy"]},
        "host_step_s": {"memory": 4.2e-6},
        "matmul_bytes_per_s": {"int4": rates, "int8": {"failed": "CudaError: out of memory"}},
        "all_reduce_us": {"function, captured": {8192: 31.0, 16384: 32.0, 65536: 40.5}},
        "speed": {"tinyllama-1.1b, int4, 1 rank": token},
        **changed,
    }


def test_the_page_tells_what_was_measured() -> None:
    text = gpu.page(result())
    for part in (
        "# A GPU",
        "11.0 of 12.0 GB",
        "3 passed, 1 skipped",
        "- SKIPPED [1] no CuPy",
        "| memory | 4.2 |",
        "| int4 | 300 | 290 | 280 | 200 |",
        "| int8 | CudaError: out of memory |",
        "| function, captured | 31.0 | 32.0 | 40.5 |",
        "| tinyllama-1.1b, int4, 1 rank | 4.00 | 3.00 | 0.25 | 0.50 | 0.12 | 2.00 |",
        "| tinyllama-1.1b, int4, 1 rank | 250 | 480 | 900 | 1500 | 2000 |",
    ):
        assert part in text


def test_the_page_tells_what_was_not_measured() -> None:
    failed = gpu.attempt("a measurement", lambda: 1 / 0)
    text = gpu.page(result(tests=failed, host_step_s=failed, speed={"tinyllama-1.1b": failed}))
    for part in ("Tests: ZeroDiv", "host step: ZeroDivisionError: division by zero", "| tinyllama-1.1b | ZeroDiv"):
        assert part in text


def test_without_a_gpu_it_ends_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        CudaDriver().close()
    except CudaError as error:
        missing = str(error)
    else:
        pytest.skip("there is a GPU here")
    assert gpu.main() == 1
    assert missing in capsys.readouterr().err
