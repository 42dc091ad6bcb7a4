"""`make gpu`: the GPU's tests, and how fast this device is (`motley.bench.measurements.gpu_speed`).

Writes one JSON file and one page to ``bench/results``; what could not be measured is in them with the reason. Not yet
run on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from motley.bench.measurements.gpu_speed import BITS, LONG, REQUESTS, SIZES, all_reduce_us, matmul_bandwidth, speed
from motley.bench.random_models.writing import synthesise
from motley.orchestrator.known_models.shapes import SHAPES
from motley.plugins.cuda.kernels import TOKENS
from motley.protocol.wording import counted
from motley.transport.cuda.driver import CudaDriver
from motley.transport.cuda.errors import CudaError
from motley.transport.cuda.host_step import HostStep
from motley.transport.cuda.stream import measure_host_steps

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
TESTS_S = 300.0
MODELS = {"tinyllama-1.1b": ("fp16", "int4"), "mistral-7b": ("fp16",)}
"""Shapes, and how they are held."""
RANKS = (1, 2)
PARTS = ("p50", "compute", "wire", "wait", "lead")

Result = dict[str, Any]


def attempt(what: str, work: Callable[[], Any]) -> Any:
    """What `work` returns, or ``{"failed": ...}`` with the reason."""
    print(f"{what} ...", flush=True)
    try:
        return work()
    except Exception as error:  # whatever one measurement meets, the others go on
        print(f"{what}: {error}", file=sys.stderr)
        return {"failed": f"{type(error).__name__}: {error}"}


def run_tests() -> Result:
    """Whether `tests/gpu` passes here, its last line, and why what was skipped was.

    Raises:
        subprocess.TimeoutExpired: it took longer than `TESTS_S`.
    """
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "tests/gpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TESTS_S,
    )
    print(tests.stdout, tests.stderr)
    lines = tests.stdout.splitlines() or [""]
    skipped = [line for line in lines if line.startswith("SKIPPED")]
    return {"passed": tests.returncode == 0, "summary": lines[-1], "skipped": skipped}


def measure_sums(forms: Iterable[HostStep]) -> Result:
    """Time sums of two processes on one GPU: us by form of the host step and by bytes, or why one failed."""
    rows = {}
    for form in forms:
        rows[str(form)] = attempt(f"all_reduce, {form}", partial(all_reduce_us, form, captured=False))
        if form is not HostStep.MEMORY:
            name = f"{form}, captured"
            rows[name] = attempt(f"all_reduce, {name}", partial(all_reduce_us, form, captured=True))
    return rows


def measure_tokens(shape: str, quantisations: Sequence[str]) -> Result:
    """How fast a random model of a shape is on this GPU (`speed`), by quantisation and number of ranks."""
    rows = {}
    with TemporaryDirectory(prefix="motley-gpu-") as folder:
        model = Path(folder, shape)
        synthesise(SHAPES[shape], model)
        for quantisation in quantisations:
            for ranks in RANKS:
                name = f"{shape}, {quantisation}, {counted(ranks, 'rank')}"
                with TemporaryDirectory(prefix="shares-", dir=folder) as shares:
                    os.environ["MOTLEY_CACHE"] = shares
                    rows[name] = attempt(name, partial(speed, model, quantisation, ranks))
    return rows


def page(result: Result) -> str:
    """The result for people, in Markdown."""
    device, bandwidth = result["device"], result["matmul_bytes_per_s"]
    fastest = max((rates[1] for rates in bandwidth.values() if "failed" not in rates), default=None)

    def bound(row: Result) -> str:
        return f"{1e9 * row['weights_mb'] / fastest:.2f}" if fastest else "?"

    lines = [
        f"# {device['name']}",
        "",
        f"Compute capability {device['compute_capability']}, the driver knows CUDA {device['cuda']}, "
        f"{device['free_bytes'] / 1e9:.1f} of {device['memory_bytes'] / 1e9:.1f} GB free.",
        "",
        f"Tests: {told(result['tests'], lambda tests: tests['summary'])}",
        *(f"- {reason}" for reason in result["tests"].get("skipped", ())),
        "",
        *table(["host step", "us"], result["host_step_s"], lambda seconds: [f"{1e6 * seconds:.1f}"]),
        *table(
            ["weights of a product, GB/s", *(counted(tokens, "token") for tokens in TOKENS)],
            bandwidth,
            lambda rates: [f"{rates[tokens] / 1e9:.0f}" for tokens in TOKENS],
        ),
        *table(
            ["all-reduce between two processes, us", *(f"{size >> 10} KiB" for size in SIZES)],
            result["all_reduce_us"],
            lambda row: [f"{row[size]:.1f}" for size in SIZES],
        ),
        *table(
            ["ms per token", *PARTS, "weights at the fastest product's GB/s"],
            result["speed"],
            lambda row: [*(f"{row[part]:.2f}" for part in PARTS), bound(row)],
        ),
        *table(
            ["tokens per second", *(f"{count} at once" for count in REQUESTS), f"of a prompt of {LONG}"],
            result["speed"],
            lambda row: [*(f"{row['per_s'][count]:.0f}" for count in REQUESTS), f"{row['prompt_per_s']:.0f}"],
        ),
    ]
    return "\n".join(lines)


def table(columns: Sequence[str], rows: Result, cells: Callable[[Any], list[str]]) -> list[str]:
    """A table whose rows are measured values or reasons; the whole may be a reason."""
    if "failed" in rows:
        return [f"{columns[0]}: {rows['failed']}", ""]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, value in rows.items():
        lines.append(f"| {name} | {told(value, lambda value: ' | '.join(cells(value)))} |")
    return [*lines, ""]


def told(value: Any, words: Callable[[Any], str]) -> str:
    """A measured value in words, or why there is none."""
    return str(value["failed"]) if isinstance(value, dict) and "failed" in value else words(value)


def main() -> int:
    """Test and measure this GPU, write and print the result; the exit status: 1 without a GPU or if a test failed."""
    try:
        driver = CudaDriver()
    except CudaError as error:
        print(f"make gpu needs an NVIDIA GPU: {error}", file=sys.stderr)
        return 1
    free, total = driver.memory()
    steps = attempt("host steps", lambda: measure_host_steps(driver))
    tokens: Result = {}
    result: Result = {
        "device": {
            "name": driver.name,
            "compute_capability": str(driver.capability),
            "cuda": ".".join(map(str, driver.version)),
            "memory_bytes": total,
            "free_bytes": free,
        },
        "tests": attempt("tests", run_tests),
        "host_step_s": steps,
        "matmul_bytes_per_s": {
            kind: attempt(f"{kind} weights", partial(matmul_bandwidth, driver, kind)) for kind in BITS
        },
        "all_reduce_us": measure_sums(form for form in HostStep if form in steps),
        "speed": tokens,
    }
    driver.close()  # its memory is the ranks' now
    for shape, quantisations in MODELS.items():
        rows = attempt(shape, partial(measure_tokens, shape, quantisations))
        tokens |= {shape: rows} if "failed" in rows else rows
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"gpu-{result['device']['name'].lower().replace(' ', '-')}.json"
    file.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    file.with_suffix(".md").write_text(page(result), "utf-8")
    print(page(result))
    return 0 if result["tests"].get("passed") else 1


if __name__ == "__main__":
    sys.exit(main())
