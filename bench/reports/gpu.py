"""`make gpu`: first contact with an NVIDIA GPU, from what is least to what is most.

Each step is a process of its own, so that one that crashes, or never ends, is a line of the result like any other.
Lines are appended to ``gpu.jsonl`` as they come; the page beside it, ``gpu.md``, says of each step what to look at. All
of them together take no longer than `MOST_S`: what there is no time left for says so.

``--step NAME`` does one of them here and prints its result; so ``--under "ncu --set basic"`` runs steps under another
program, a profiler or a checker.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from motley.bench.measurements.gpu import contact as gpu_contact
from motley.bench.measurements.gpu.webgpu import webgpu_calls

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
MOST_S = 530.0
TOLD = 6000
"""Characters that are kept of what a failed step has said."""
SLOWEST = 5
"""Tests of a step whose seconds are told."""
PACKAGES = (
    *("numpy", "cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cublas", "torch"),
    *("onnxruntime", "onnxruntime-ep-webgpu"),
)
WEBGPU_TESTS = "tests/plugins/onnxruntime_gpu/test_engine.py"

MARK = "result: "
"""What the line with a step's result begins with; profilers write to the same place."""

Result = dict[str, Any]


class Step(NamedTuple):
    """One step of first contact.

    Attributes:
        work: gives its result, in a process of its own.
        most_s: how long it may take.
        look_at: what its result says, and what it should be.
    """

    work: Callable[[], Any]
    most_s: float
    look_at: str


def device() -> Result:
    """Which GPU, which driver, which packages, and who else uses it."""
    asked = "name,driver_version,memory.total,memory.used,clocks.max.sm,power.limit,compute_mode"
    said = _output(["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"])
    users = _output(["nvidia-smi", "--query-compute-apps=pid,name,used_memory", "--format=csv,noheader"])
    return {"gpu": said, "used by": users, "python": sys.version.split()[0], "packages": _versions()}


def run_tests(chosen: Sequence[str], under: Sequence[str] = ()) -> Result:
    """Whether some tests pass here, the last line, and why some failed or were skipped.

    Args:
        chosen: arguments of pytest.
        under: a program that runs it.
    """
    # Without the settings of the project, which want plugins and make errors of any package's warnings.
    options = ["-v", "-n0", "-rfEs", "--import-mode=importlib", "-p", "no:cacheprovider", f"--durations={SLOWEST}"]
    # One that hangs ends all, with the stacks of all threads: what holds it would not let go of the next one either.
    options += ["--timeout=30", "--timeout-method=thread"]
    command = [*under, sys.executable, "-m", "pytest", "-o", "addopts=", "-W", "default", *options, *chosen]
    lines = [""]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:  # heard by whoever ends this step before its time
            print(line, end="", file=sys.stderr, flush=True)
            lines.append(line.rstrip())
    told = [line[:300] for line in lines if line.startswith(("SKIPPED", "FAILED", "ERROR", "E  "))]
    slowest = [line for line in lines if " call " in line or " setup " in line][:SLOWEST]
    return {"passed": process.returncode == 0, "summary": lines[-1], "told": told[:40], "slowest": slowest}


def checked_replays() -> Result:
    """Captured sums, run again and again, under NVIDIA's memory checker."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"skipped": "compute-sanitizer is not on the PATH"}
    under = [program, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all"]
    under += ["--report-api-errors", "no"]  # CUDA's own binding asks for functions that older drivers lack
    return run_tests(["tests/gpu/test_collectives.py", "-k", "captured"], under)


def demo() -> Result:
    """A mesh of daemons, the first of which computes on the GPU and the others on processors: what they write together,
    whether that is the text of one process, and how fast."""
    program = "from motley.cli.main import main; main()"
    said = subprocess.run(
        [sys.executable, "-c", program, "demo", "--device", "cuda", "--json"], capture_output=True, text=True
    )
    print(said.stdout[-TOLD:], said.stderr[-TOLD:], file=sys.stderr)
    if said.returncode:
        return {"passed": False, "said": (said.stdout + said.stderr)[-TOLD:]}
    told: Result = json.loads(said.stdout.splitlines()[-1])
    kept = {name: told[name] for name in ("devices", "ms_per_token", "text")}
    return {"passed": told["identical_to_single_process"], **kept}


def _webgpu_tokens(shape: str, *quantisations: str) -> Step:
    work = partial(gpu_contact.webgpu_tokens, shape, quantisations)
    return Step(partial(gpu_contact.on_webgpu, work), 240, "ms per token by Vulkan, beside CUDA")


STEPS: Mapping[str, Step] = {
    "device": Step(device, 30, "the driver must be 580 or newer; nobody else should use the GPU"),
    "calls": Step(gpu_contact.calls, 60, "the first call that is not 'ok' is what to mend first"),
    "host steps": Step(gpu_contact.host_steps, 60, "us of an empty step; 10 to 20 wanted, and one form at least"),
    "sums": Step(partial(run_tests, ["tests/gpu/test_collectives.py"]), 120, "bits of the host; order; replays"),
    "checked replays": Step(checked_replays, 90, "no error of the checker: nothing is used after it is freed"),
    "products": Step(partial(run_tests, ["tests/gpu/test_products.py"]), 90, "bits of the CPU engine, to 512 rows"),
    "logits": Step(
        partial(run_tests, ["tests/gpu/test_engine.py", "-k", "transformers and memory or waves or spans or narrow"]),
        120,
        "golden models, within 1e-4 (by codes 5 %); waves from one graph each have the bits that rows have alone",
    ),
    "bandwidth": Step(
        gpu_contact.bandwidth,
        60,
        "share of a copy's bytes/s: int4 0.7 at one row and at 8 wanted; op/s at 512 rows: int4 0.4 of PyTorch's",
    ),
    "pytorch": Step(gpu_contact.pytorch, 60, "the same products by cuBLAS in FP16: what is possible here"),
    "sums of processes": Step(gpu_contact.sums, 120, "us per sum, beside a host, and a rank on the same GPU"),
    "tinyllama int4": Step(partial(gpu_contact.tokens, "tinyllama-1.1b", "int4"), 150, "ms per token"),
    "tinyllama fp16": Step(
        partial(gpu_contact.tokens, "tinyllama-1.1b", "fp16"), 150, "a GPU and a CPU: 8 ms per token or less wanted"
    ),
    "demo": Step(demo, 90, "the first device is the GPU; the text is that of one process"),
    "prompts": Step(partial(run_tests, ["tests/gpu/test_engine.py", "-k", "cublas"]), 90, "within 1e-4, by codes 5 %"),
    "split": Step(
        partial(run_tests, ["tests/gpu/test_engine.py", "-k", "transformers and split or 10_000"]), 120, "the fallback"
    ),
    "nccl": Step(partial(run_tests, ["tests/gpu/test_nccl.py"]), 60, "calls of NCCL in a stream's order"),
    "mistral int4": Step(
        partial(gpu_contact.tokens, "mistral-7b", "int4", ("1",)), 240, "0.55 of the bandwidth wanted"
    ),
    "qwen3-30b-a3b int4, 6 of 48 layers": Step(
        partial(gpu_contact.tokens, "qwen3-30b-a3b", "int4", ("1",), 6), 150, "ms per token, 8 of 128 experts a row"
    ),
    "webgpu logits": Step(
        partial(gpu_contact.on_webgpu, partial(run_tests, [WEBGPU_TESTS, "-k", "golden_models", "-m", "not soak"])),
        120,
        "golden models by Vulkan, within 1e-4 (by codes 5 %); or what is missing here",
    ),
    "webgpu calls": Step(
        partial(gpu_contact.on_webgpu, webgpu_calls),
        60,
        "us of calls that do nothing; products' bytes/s, beside those of the memory",
    ),
    "webgpu tokens": _webgpu_tokens("tinyllama-1.1b", "int4"),
    "webgpu tokens fp16": _webgpu_tokens("tinyllama-1.1b", "fp16"),
    "webgpu mistral int4": _webgpu_tokens("mistral-7b", "int4"),
    "webgpu mistral fp16": _webgpu_tokens("mistral-7b", "fp16"),
    "others": Step(
        partial(run_tests, ["tests/gpu/test_engine.py", "-k", "reference or tensorrt"]), 120, "skipped without TensorRT"
    ),
}


def run(name: str, seconds: float, under: Sequence[str] = ()) -> Result:
    """Do a step in a process of its own; its result, or what its last words were."""
    step = STEPS[name]
    command = [*under, sys.executable, "-m", "motley.bench.reports.gpu", "--step", name]
    began, said, errors = monotonic(), "", ""
    line: Result = {"step": name, "look_at": step.look_at, "at": datetime.now(UTC).isoformat(timespec="seconds")}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said, errors = process.communicate(timeout=min(step.most_s, seconds))
        failed = "" if process.returncode == 0 else f"it ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        _end_group(process)
        with suppress(subprocess.TimeoutExpired):  # whom it has started may hold its pipes
            said, errors = process.communicate(timeout=5)
        failed = f"it took longer than {min(step.most_s, seconds):.0f} s"
    line["seconds"] = round(monotonic() - began, 1)
    told = [each.removeprefix(MARK) for each in said.splitlines() if each.startswith(MARK)]
    if not failed and not told:
        failed = "it told no result"
    if failed:
        return {**line, "failed": failed, "said": (said + errors)[-TOLD:]}
    return {**line, "result": json.loads(told[-1])}


def _end_group(process: subprocess.Popen[str]) -> None:
    """Kill a step and the ranks that it has started."""
    if sys.platform == "win32":
        process.kill()
    else:
        import signal

        os.killpg(process.pid, signal.SIGKILL)


def page(lines: Sequence[Result]) -> str:
    """All lines for people, in Markdown."""
    parts = ["# First contact with a GPU", ""]
    for line in lines:
        parts += [f"## {line['step']} ({line['seconds']} s)", "", f"Look at: {line['look_at']}.", ""]
        if "failed" in line:
            parts += [f"**Failed**: {line['failed']}", "", "```", line["said"], "```", ""]
        else:
            parts += [*(f"- {name}: {_told(value)}" for name, value in line["result"].items()), ""]
    return "\n".join(parts)


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_told(each)}" for name, each in value.items())
    if isinstance(value, list):
        return "; ".join(map(_told, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Do all steps, or those that are named; the exit status: 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--step", choices=STEPS, help="do this one here, and print its result")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu.jsonl and gpu.md")
    parser.add_argument("--within", type=float, default=MOST_S, metavar="S", help="seconds that all of it may take")
    parser.add_argument("--under", default="", help="run steps under this program")
    parser.add_argument("only", nargs="*", choices=[[], *STEPS], metavar="STEP", help=f"of: {', '.join(STEPS)}")
    asked = parser.parse_args(arguments)
    if asked.step:
        result = STEPS[asked.step].work()
        print(f"{MARK}{json.dumps(result)}")
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    end = monotonic() + asked.within
    lines: list[Result] = []
    for name in asked.only or STEPS:
        left = end - monotonic()
        print(f"{name} ...", flush=True)
        if left > 5:
            line = run(name, left, shlex.split(asked.under))
        else:
            look_at = STEPS[name].look_at
            line = {"step": name, "look_at": look_at, "seconds": 0, "failed": "no time was left", "said": ""}
        lines.append(line)
        with (asked.out / "gpu.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        (asked.out / "gpu.md").write_text(page(lines), "utf-8")
        print(json.dumps(line, indent=2), flush=True)
        if name == "calls" and "failed" in line:
            break  # without a GPU nothing else tells more
    return 0 if all(line.get("result", {"passed": False}).get("passed", True) for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
