"""`make gpu` without a GPU: its measurement runs, on kernels compiled for the host, and it says what is missing."""

from __future__ import annotations

import pytest

from motley.bench import gpu
from motley.transport.cuda.driver import CudaDriver
from motley.transport.cuda.errors import CudaError
from tests.transport.cuda.host_driver import HostDriver


@pytest.mark.parametrize("kind", gpu.BITS)
def test_a_bandwidth_is_measured_and_nothing_is_left(kind: str) -> None:
    driver = HostDriver()
    assert gpu.matvec_bandwidth(driver, kind, (16, 1024), launches=2) > 0
    assert driver.live == 0


def test_the_page_tells_what_was_measured() -> None:
    device = {
        "name": "A GPU",
        "compute_capability": "8.6",
        "cuda": "13.0",
        "memory_bytes": 12_000_000_000,
        "free_bytes": 11_000_000_000,
    }
    text = gpu.page(
        {
            "device": device,
            "tests": {"summary": "3 passed"},
            "host_step_s": {"memory": 4.2e-6},
            "matvec_bytes_per_s": {"int4": 3e11},
        }
    )
    for part in ("# A GPU", "11.0 of 12.0 GB", "3 passed", "| memory | 4.2 |", "| int4 | 300 |"):
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
