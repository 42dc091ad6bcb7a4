"""`make gpu`: the GPU's tests, what a host step costs, and the bandwidth of each matrix-vector kernel, on this device.

Writes one JSON file and one page to ``bench/results``. Not yet run on a GPU. Still to come: the cost of an all-reduce
between two processes on one GPU, and tokens per second.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from motley.plugins.cuda import ROWS, SOURCES, THREADS, WARP
from motley.transport.cuda.driver import CudaDriver, Driver
from motley.transport.cuda.errors import CudaError
from motley.transport.cuda.stream import CudaStream, measure_host_steps

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
SHAPE = 14336, 4096
"""Rows and columns of a matrix that no cache holds: Mistral-7B's gate projection."""
BLOCK = 32
BITS = {"fp32": 32, "int8": 8 + 32 / BLOCK, "int4": 4 + 32 / BLOCK}
"""Per weight, its part of the scale included."""
TESTS_S = 300.0


def matvec_bandwidth(driver: Driver, kind: str, shape: tuple[int, int] = SHAPE, launches: int = 50) -> float:
    """Bytes of weights per second that a matrix-vector kernel reads."""
    rows, columns = shape
    nbytes = int(rows * columns * BITS[kind] / 8)
    with ExitStack() as memory, CudaStream(driver) as stream:

        def allocate(size: int) -> ctypes.c_void_p:
            address = driver.allocate(size)
            memory.callback(driver.free, address)
            return ctypes.c_void_p(address)

        x, y, weights = allocate(4 * columns), allocate(4 * rows), allocate(4 * rows * columns)
        scales = allocate(4 * rows * columns // BLOCK)
        null, integer = ctypes.c_void_p(0), ctypes.c_int
        block = columns if kind == "fp32" else BLOCK
        numbers = [integer(value) for value in (1, rows, columns, block)]
        arguments: list[Any] = [x, integer(columns), weights, scales, null, null, y, integer(rows), *numbers]
        blocks = -(-rows * WARP // (ROWS * THREADS))

        def run(times: int) -> None:
            for _ in range(times):
                stream.launch(SOURCES, f"matmul_{kind}_wide_one", blocks, THREADS, arguments)
            stream.synchronise(60.0)

        run(1)
        began = time.perf_counter()
        run(launches)
        return nbytes * launches / (time.perf_counter() - began)


def page(result: dict[str, Any]) -> str:
    """The result for people, in Markdown."""
    device = result["device"]
    lines = [
        f"# {device['name']}",
        "",
        f"Compute capability {device['compute_capability']}, the driver knows CUDA {device['cuda']}, "
        f"{device['free_bytes'] / 1e9:.1f} of {device['memory_bytes'] / 1e9:.1f} GB free.",
        "",
        f"Tests: {result['tests']['summary']}",
        "",
        "| host step | us |",
        "|---|---|",
        *(f"| {form} | {1e6 * seconds:.1f} |" for form, seconds in result["host_step_s"].items()),
        "",
        "| weights of a matrix-vector product | GB/s |",
        "|---|---|",
        *(f"| {kind} | {rate / 1e9:.0f} |" for kind, rate in result["matvec_bytes_per_s"].items()),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    try:
        driver = CudaDriver()
    except CudaError as error:
        print(f"make gpu needs an NVIDIA GPU: {error}", file=sys.stderr)
        return 1
    free, total = driver.memory()
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "tests/gpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TESTS_S,
    )
    print(tests.stdout, tests.stderr)
    result = {
        "device": {
            "name": driver.name,
            "compute_capability": str(driver.capability),
            "cuda": ".".join(map(str, driver.version)),
            "memory_bytes": total,
            "free_bytes": free,
        },
        "tests": {"passed": tests.returncode == 0, "summary": (tests.stdout.splitlines() or [""])[-1]},
        "host_step_s": measure_host_steps(driver),
        "matvec_bytes_per_s": {kind: matvec_bandwidth(driver, kind) for kind in BITS},
    }
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"gpu-{driver.name.lower().replace(' ', '-')}.json"
    file.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    file.with_suffix(".md").write_text(page(result), "utf-8")
    print(page(result))
    driver.close()
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
