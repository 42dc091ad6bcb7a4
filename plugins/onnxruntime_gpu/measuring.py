"""How fast a provider of ONNX Runtime is on a GPU: how it reads weights, and what a layer and a sum take besides."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from onnx import helper, numpy_helper

from motley.plugins.engine import DeviceSpeed
from motley.plugins.onnxruntime_gpu.device import Action, Gpu, carry_out, declared, upload

TIMES = 5
"""So often each thing is measured; the least time counts."""
LONG_S = 0.005
"""A product that takes so many seconds is long enough to measure bandwidth by."""
OPERATORS, RUNS = 12, 3
"""Operators of a run, and the runs of a layer: those of one of Llama's, about."""
LAYERS = 8
"""That are computed one after another before they are waited for."""
WIDTH = 256
"""Elements of a row of which hardly more than a call is measured."""


def measure_speed(gpu: Gpu) -> DeviceSpeed:
    """Measure a GPU. Takes some seconds where its driver compiles slowly, else part of one."""
    return DeviceSpeed(_bandwidth(gpu), *_besides(gpu))


def _bandwidth(gpu: Gpu) -> float:
    """Bytes/s that products of one row read of a matrix in the GPU's memory."""
    best = 0.0
    for side in (512, 1024, 2048, 4096, 8192):
        weights = numpy_helper.from_array(np.zeros((side, side), np.float32), "w")
        ends = [declared(name, np.float32, [1, side]) for name in ("x", "y")]
        session = gpu.session([helper.make_node("MatMul", ["x", "w"], ["y"])], ends[:1], ends[1:], [weights])
        y = np.empty((1, side), np.float32)
        seconds = seconds_of([gpu.bind(session, {"x": gpu.empty((1, side))}, {"y": y})])
        best = max(best, weights.ByteSize() / seconds)
        if seconds > LONG_S:  # what a call costs besides no longer matters
            break
    return best


def _besides(gpu: Gpu) -> tuple[float, float]:
    """Seconds of the small operators of a layer, and of a row's way to the host and back."""
    names = ["x", *(f"made.{number}" for number in range(OPERATORS - 1)), "y"]
    nodes = [helper.make_node("Sigmoid", [one], [other]) for one, other in pairwise(names)]
    ends = [declared(name, np.float32, [1, WIDTH]) for name in ("x", "y")]
    run = gpu.bind(
        gpu.session(nodes, ends[:1], ends[1:], captured=True),
        {"x": gpu.empty((1, WIDTH))},
        {"y": gpu.empty((1, WIDTH))},
        captured=True,
    )
    row = gpu.mirror(np.zeros((1, WIDTH), np.float32))
    way = [upload([row]), gpu.download([row])]
    host = seconds_of(way)
    layers = seconds_of([*[run] * (RUNS * LAYERS), *way])
    return max(0.0, layers - host) / LAYERS, host


def seconds_of(actions: Sequence[Action]) -> float:
    """The least time that some actions have taken, one after another, when they had been carried out before."""
    carry_out([actions])  # which compiles
    took = []
    for _ in range(TIMES):
        began = time.perf_counter()
        carry_out([actions])
        took.append(time.perf_counter() - began)
    return min(took)
