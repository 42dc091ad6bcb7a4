"""A GPU whose memory is full in the middle, and one that two processes compute on."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper

from motley.plugins.engine import EngineError, EngineMemoryError
from motley.plugins.onnxruntime_gpu.device import CHECKED_BYTES, Action, ErrorsTold, Gpu, Place, declared
from motley.plugins.onnxruntime_gpu.providers import WEBGPU

WIDTH = 1024


def spread(gpu: Gpu) -> ort.InferenceSession:
    """(x f32[1, WIDTH], shape i64[2]) -> x repeated to that shape, and added up."""
    nodes = [
        helper.make_node("Expand", ["x", "shape"], ["rows"]),
        helper.make_node("Mul", ["rows", "rows"], ["squares"]),
        helper.make_node("ReduceSum", ["squares"], ["y"], keepdims=0),
    ]
    inputs = [declared("x", np.float32, [1, WIDTH]), declared("shape", np.int64, [2])]
    return gpu.session(nodes, inputs, [declared("y", np.float32)])


def added(gpu: Gpu, session: ort.InferenceSession, rows: int) -> float:
    values = {"x": np.ones((1, WIDTH), np.float32), "shape": np.array([rows, WIDTH], np.int64)}
    with ErrorsTold(gpu.provider.engine):
        (total,) = gpu.run(session, values)
    return float(total)


def test_what_a_run_writes_to_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs keep no array of the host alive; large arrays are read as soon as they are placed."""
    gpu = Gpu(WEBGPU)
    bind, written = gpu.bind, list[weakref.ref[np.ndarray]]()

    def watched(session: ort.InferenceSession, inputs: Any, outputs: Mapping[str, Place]) -> Action:
        run = bind(session, inputs, outputs)
        written.extend(weakref.ref(place) for place in outputs.values())

        def act() -> None:
            assert all(place() is not None for place in written)
            run()

        return act

    monkeypatch.setattr(gpu, "bind", watched)
    gpu.empty((2, CHECKED_BYTES))
    assert written


def test_a_step_for_which_memory_lacks_says_so_and_the_next_one_is_right() -> None:
    gpu = Gpu(WEBGPU)
    session = spread(gpu)
    with pytest.raises(EngineMemoryError, match=r"engine 'webgpu' failed in a step: .*[Bb]uffer"):
        added(gpu, session, 1 << 20)  # 4 GiB
    assert added(gpu, session, 4) == 4 * WIDTH


@pytest.mark.parametrize(
    "words",
    [
        "WebGPU validation failed. [Invalid Buffer (unlabeled)] is invalid due to a previous error.",
        "Buffer size (4294967296) exceeds the max buffer size limit (1073741824).",
        "vkAllocateMemory failed with VK_ERROR_OUT_OF_DEVICE_MEMORY",
    ],
)
def test_words_for_a_lack_of_memory(words: str) -> None:
    """These are the plugin's 0.4.0, as it said them when its memory was limited."""
    with pytest.raises(EngineMemoryError), ErrorsTold("webgpu"):
        raise RuntimeError(words)


def test_an_array_for_which_there_is_no_room_is_refused_with_its_size() -> None:
    gpu = Gpu(WEBGPU)
    with pytest.raises(EngineMemoryError, match=r"'webgpu' cannot place 1\.07 GB in one piece: .*[Bb]uffer"):
        gpu.empty(((1 << 28) + 4,))  # more than the software driver allows
    assert gpu.empty((1 << 20,)).shape() == [1 << 20]


def test_an_operator_that_the_provider_lacks_is_named() -> None:
    nodes = [helper.make_node("Neg", ["x"], ["z"]), helper.make_node("Hardmax", ["z"], ["y"])]
    ends = [declared(name, np.float32, [4, 4]) for name in ("x", "y")]
    with pytest.raises(EngineError, match=r"\(Hardmax, Neg\), as its provider lacks Hardmax: "):
        Gpu(WEBGPU).session(nodes, ends[:1], ends[1:])


def test_a_driver_that_the_provider_refuses_is_told_without_the_runtime_s_source(tmp_path: Path) -> None:
    code = "from motley.plugins.onnxruntime_gpu.engine import WebGpuEngine; WebGpuEngine.check_machine()"
    no_driver = {"VK_DRIVER_FILES": str(tmp_path), "MOTLEY_SOFTWARE_GPU": "1"}
    told = subprocess.run([sys.executable, "-c", code], env={**os.environ, **no_driver}, capture_output=True, text=True)
    last = [line for line in told.stderr.splitlines() if "EngineError" in line][-1]
    assert "engine 'webgpu' cannot open a GPU (Failed to get a WebGPU adapter: " in last
    assert "one in software: SwiftShader, or Mesa's" in last
    assert "/" not in last.replace(str(tmp_path), "")


def test_two_processes_compute_on_one_gpu() -> None:
    gpu = Gpu(WEBGPU)
    session = spread(gpu)
    other = (
        "import tests.plugins.onnxruntime_gpu.test_faults as here;"
        "gpu = here.Gpu(here.WEBGPU); session = here.spread(gpu);"
        "print(all(here.added(gpu, session, rows) == rows * here.WIDTH for rows in range(1, 40)))"
    )
    with subprocess.Popen([sys.executable, "-c", other], stdout=subprocess.PIPE, text=True) as process:
        rows = 0
        while process.poll() is None:
            rows = rows % 40 + 1
            assert added(gpu, session, rows) == rows * WIDTH
        assert process.stdout is not None
        assert process.stdout.read() == "True\n"
    assert process.returncode == 0
