"""`make gpu` without a GPU: its measurements run, on what stands for one, and it says what is missing."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest

import motley.cli
from motley.bench.measurements.gpu import contact as gpu_contact
from motley.bench.measurements.gpu import speed as gpu_speed
from motley.bench.measurements.gpu import webgpu as gpu_webgpu
from motley.bench.reports import gpu
from motley.protocol.installing import how_to_install
from motley.transport.cuda.driver import CudaDriver
from motley.transport.cuda.errors import CudaError
from motley.transport.cuda.host_step import HostStep
from tests.software_gpu import ALLOWED, show_software_gpu
from tests.transport.cuda.host_driver import HostDriver

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"


@pytest.mark.parametrize("kind", gpu_speed.BITS)
def test_products_are_timed_and_nothing_is_left(kind: str) -> None:
    driver = HostDriver()
    took = gpu_speed.product_seconds(driver, kind, (16, 1024), launches=2, rows_at_once=(1, 8, 40))
    assert list(took) == [1, 8, 40]
    assert min(took.values()) > 0
    assert driver.live == 0


@pytest.mark.parametrize(
    ("form", "captured", "beside_host"),
    [pytest.param(HostStep.MEMORY, False, False, marks=pytest.mark.soak), (HostStep.FUNCTION, True, True)],
)
def test_sums_are_timed_between_two_processes(
    form: HostStep, captured: bool, beside_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3])  # for the processes: the driver is one of the tests
    took = gpu_speed.all_reduce_us(form, captured, 1, HostDriver, beside_host=beside_host)
    assert list(took) == list(gpu_speed.SIZES)
    assert min(took.values()) > 0


def test_tokens_are_timed_on_any_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_speed, "REQUESTS", (1, 2))
    monkeypatch.setattr(gpu_speed, "ANSWER", 12)
    monkeypatch.setattr(gpu_speed, "LONG", 70)
    took = gpu_speed.speed(BUNDLED, "fp16", [("onnxruntime", 1.0), ("reference", 2.0)])
    parts = [took[part] for part in ("compute", "wire", "wait", "lead")]
    assert min(took[part] for part in ("p50", "compute", "wire", "wait")) > 0
    assert sum(parts) > 0.5 * took["p50"]
    assert took["weights_mb"] > 6  # one of them has FP32, as it would widen FP16
    assert took["prompt_per_s"] > 0
    assert list(took["per_s"]) == list(took["step_ms"]) == [1, 2]
    assert min(took["per_s"].values()) > 0


@pytest.fixture
def _webgpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if why := show_software_gpu():
        pytest.skip(why)
    monkeypatch.setenv(ALLOWED, "1")


@pytest.mark.soak  # a minute: the driver in software compiles for all sizes of prompts
@pytest.mark.usefixtures("_webgpu")
def test_webgpu_is_timed_beside_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_speed, "REQUESTS", (1,))
    monkeypatch.setattr(gpu_speed, "ANSWER", 6)
    monkeypatch.setattr(gpu_speed, "LONG", 40)
    took = gpu_contact.on_webgpu(lambda: gpu_contact.by_engine(BUNDLED, ["fp16"], ["webgpu", "onnxruntime"]))
    assert took["gpu"]
    assert list(took["fp16"]) == ["webgpu", "onnxruntime"]
    assert min(each["p50"] for each in took["fp16"].values()) > 0


@pytest.mark.soak  # half a minute of products by a GPU in software
@pytest.mark.usefixtures("_webgpu")
def test_calls_on_webgpu_are_timed_one_by_one() -> None:
    told = gpu_webgpu.webgpu_calls((64, 256))
    assert min(told.pop("us").values()) > 0
    assert min(told.values()) > 0


@pytest.mark.soak  # ten seconds of a processor for a test that runs beside this one anyway
@pytest.mark.usefixtures("_webgpu")
def test_golden_logits_are_computed_on_webgpu() -> None:
    one = partial(gpu.run_tests, [gpu.WEBGPU_TESTS, "-k", "golden_models and llama-mqa-3"])
    said = gpu_contact.on_webgpu(one)
    assert said["passed"], said
    assert "1 passed" in said["summary"]


@pytest.mark.parametrize(
    ("step", "package"),
    [("webgpu logits", "onnxruntime_ep_webgpu"), ("webgpu tokens", "vulkan"), ("webgpu mistral fp16", "vulkan")],
)
@pytest.mark.usefixtures("_webgpu")
def test_steps_of_webgpu_say_which_package_is_missing(
    step: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / f"{package}.py").write_text("raise ImportError('it is not here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = gpu.run(step, 60)["result"]["skipped"]
    assert said.endswith(f"missing (it is not here): {how_to_install('webgpu')}")


def test_calls_are_made_one_by_one_until_one_fails() -> None:
    made = gpu_contact.calls(HostDriver)
    assert set(made.values()) - {"ok"} == {made["device"]}
    assert "replay again" in made
    assert "host steps by memory" in made
    made = gpu_contact.calls(lambda: HostDriver(captures=False))
    assert (made["its result"], made["passed"]) == ("ok", False)
    assert "operation not supported" in made["failed"]
    assert "replay" not in made


def test_a_measurement_that_fails_is_a_step_that_fails() -> None:
    """Also where it is one of several, by engine and quantisation."""
    worked, failed = {"p50": 1.0}, gpu_contact.attempt(lambda: 1 / 0)
    assert gpu_contact.with_verdict({"1": worked}) == {"1": worked}
    assert gpu_contact.with_verdict({"1": worked, "2": failed})["passed"] is False
    by_engine = gpu_contact.by_engine(Path("nowhere"), ["fp16"], ["onnxruntime"])
    assert "nowhere" in by_engine["fp16"]["onnxruntime"]["failed"]
    assert by_engine["passed"] is False


def test_a_copy_is_timed() -> None:
    driver = HostDriver()
    assert gpu_contact.copy_rate(driver, 1 << 12) > 0
    assert driver.live == 0


def lines_of(folder: Path) -> list[gpu.Result]:
    return [json.loads(line) for line in (folder / "gpu.jsonl").read_text("utf-8").splitlines()]


def test_steps_that_crash_or_hang_are_lines_like_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps are looked up by their names in the processes, so this one's are those of a program before them."""
    look_at = gpu.Step(dict, 3.0, "whether it goes on")
    monkeypatch.setattr(gpu, "STEPS", dict.fromkeys(("crashes", "hangs", "measures"), look_at))
    program = tmp_path / "under.py"
    program.write_text(
        "import os, sys, time\n"
        "step = sys.argv[-1]\n"
        "if step == 'crashes': print('last words', flush=True), os.abort()\n"
        "if step == 'hangs': time.sleep(600)\n"
        'print(\'noise\\nresult: {"us": {"8192": 12.3456}}\\n==PROF== a report\')\n'
    )
    assert gpu.main(["--out", str(tmp_path), "--under", f"{sys.executable} {program}"]) == 1
    crashed, hung, measured = lines_of(tmp_path)
    assert (crashed["failed"][:13], "last words" in crashed["said"]) == ("it ended with", True)
    assert hung["failed"] == "it took longer than 3 s"
    assert measured["result"] == {"us": {"8192": 12.3456}}
    text = (tmp_path / "gpu.md").read_text("utf-8")
    for part in ("## hangs (3", "Look at: whether it goes on.", "**Failed**: it took", "- us: 8192 12.35"):
        assert part in text
    monkeypatch.setattr(gpu, "MOST_S", 0.0)
    assert gpu.main(["--out", str(tmp_path), "measures"]) == 1
    assert lines_of(tmp_path)[3]["failed"] == "no time was left"


def test_without_a_gpu_it_ends_with_a_message(tmp_path: Path) -> None:
    try:
        CudaDriver().close()
    except CudaError as error:
        missing = str(error)
    else:
        pytest.skip("there is a GPU here")
    assert gpu.main(["--out", str(tmp_path), "calls", "sums"]) == 1
    (line,) = lines_of(tmp_path)
    assert missing in line["said"]
