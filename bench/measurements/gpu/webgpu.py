"""What single calls of ONNX Runtime take on a GPU by WebGPU, and how fast it reads weights: by these a token's time is
told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from motley.bench.measurements.gpu.speed import BITS, BLOCK, SHAPE
from motley.plugins.onnxruntime.lowering import MICROSOFT
from motley.plugins.onnxruntime_gpu.device import Action, Gpu, declared, upload
from motley.plugins.onnxruntime_gpu.measuring import measure_speed, seconds_of
from motley.plugins.onnxruntime_gpu.providers import WEBGPU

WIDTH = 64
"""Numbers of what is copied, and computed from, where nothing but the call shall count."""
TOGETHER = 10
"""Runs before one that is waited for."""


def webgpu_calls(shape: tuple[int, int] = SHAPE) -> dict[str, Any]:
    """Microseconds of calls by themselves, and bytes of weights that products of a row read in a second.

    Args:
        shape: rows and columns of the matrix of 4-bit codes.
    """
    gpu = Gpu(WEBGPU)
    x, y = (gpu.mirror(np.ones((1, WIDTH), np.float32)) for _ in range(2))
    ends = [declared(name, np.float32, [1, WIDTH]) for name in ("x", "y")]
    session = gpu.session([helper.make_node("Neg", ["x"], ["y"])], ends[:1], ends[1:])
    run, here = (gpu.bind(session, {"x": x.there}, {"y": place}) for place in (y.there, y.host))
    up, down = upload([x]), gpu.download([y])
    calls: dict[str, Sequence[Action]] = {
        "up": [up],
        "run": [run],
        "down": [down],
        "run to the host": [here],
        "up and run to the host": [up, here],
        f"{TOGETHER} runs and down": [*[run] * TOGETHER, down],
    }
    return {
        "us": {name: 1e6 * seconds_of(actions) for name, actions in calls.items()},
        **asdict(measure_speed(gpu)),
        "memory_bandwidth, int4": _int4_rate(gpu, shape),
    }


def _int4_rate(gpu: Gpu, shape: tuple[int, int]) -> float:
    rows, columns = shape
    weights: dict[str, np.ndarray[Any, Any]] = {
        "codes": np.zeros((rows, columns // BLOCK, BLOCK // 2), np.uint8),
        "scales": np.ones(rows * columns // BLOCK, np.float32),
    }
    sizes: dict[str, Any] = {"K": columns, "N": rows, "bits": 4, "block_size": BLOCK}
    node = helper.make_node("MatMulNBits", ["x", *weights], ["y"], domain=MICROSOFT, **sizes)
    ends = [declared("x", np.float32, [1, columns]), declared("y", np.float32, [1, rows])]
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    session = gpu.session([node], ends[:1], ends[1:], tensors)
    x, there, here = gpu.empty((1, columns)), gpu.empty((1, rows)), np.empty((1, rows), np.float32)
    run, last = (gpu.bind(session, {"x": x}, {"y": place}) for place in (there, here))
    seconds = seconds_of([*[run] * TOGETHER, last]) / (TOGETHER + 1)
    return rows * columns * BITS["int4"] / 8 / seconds
