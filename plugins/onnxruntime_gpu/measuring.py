"""How fast a provider of ONNX Runtime is on a GPU: how it reads weights, and what a layer and a sum take besides."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from onnx import helper, numpy_helper

from motley.plugins.engine import DeviceSpeed, FormatSpeed
from motley.plugins.onnxruntime_gpu.device import Action, Gpu, carry_out, declared, upload
from motley.plugins.onnxruntime_gpu.lowering import product_node

TIMES, ENOUGH_S = 5, 1.0
"""So often each thing is measured, or for so long; the least time counts."""
LONG_S = 0.005
"""A product that takes so many seconds is long enough to measure by."""
SIZES = [1 << shift for shift in range(18, 30, 2)]
"""Bytes of its weights, of which the first are taken that take so long; of the last, more than caches of GPUs hold."""
COLUMNS = 8192
"""Of these weights, at most."""
REPEATS = 8
"""Products that are measured one after another where one is too short."""
CLOCK_S = 1e-6
"""No less is told by a clock from nothing."""
ROWS = 32
"""Of a product of many."""
BLOCK = 128
"""Numbers of a row of weights that have a scale."""
OPERATORS, RUNS = 12, 3
"""Operators of a run, and the runs of a layer: those of one of Llama's, about."""
LAYERS = 8
"""That are computed one after another before they are waited for."""
WIDTH = 256
"""Elements of a row of which hardly more than a call is measured."""


def measure_speed(gpu: Gpu) -> DeviceSpeed:
    """Measure a GPU. Takes some seconds where its driver compiles slowly, else part of one.

    Products of many rows compute more than they read, and drivers in software compile theirs for half a minute: so one
    is measured, and others are taken to multiply as many weights by as many rows.
    """
    kinds = {32: "fp32", **({4: "int4", 8: "int8"} if gpu.provider.has_products else {})}
    read = {bits: _read(gpu, bits) for bits in kinds}
    size = read[32][0]
    multiplied = ROWS * size / _product_s(gpu, 32, size, ROWS)
    speeds = [
        FormatSpeed(kinds[bits], size / seconds, multiplied * bits / 32) for bits, (size, seconds) in read.items()
    ]
    return DeviceSpeed(speeds[0].bytes_per_s, *_besides(gpu), speeds)


def _read(gpu: Gpu, bits: int) -> tuple[int, float]:
    """Bytes of weights of so many bits (of 32, floats), and the seconds of their product with a row."""
    for size in SIZES:
        seconds = _product_s(gpu, bits, size, 1)
        if seconds > LONG_S:
            break
    return size, seconds


def _product_s(gpu: Gpu, bits: int, size: int, rows: int) -> float:
    """Seconds of a product of some rows with weights of so many bytes, without what it takes to wait for it."""
    count = 8 * size // bits
    columns = min(COLUMNS, 1 << count.bit_length() // 2)
    outputs = count // columns
    if bits == 32:
        weights = [np.zeros((columns, outputs), np.float32)]
        node = helper.make_node("MatMul", ["x", "w0"], ["y"])
    else:
        blocks = columns // BLOCK
        weights = [np.zeros((outputs, blocks, BLOCK * bits // 8), np.uint8), np.ones((outputs, blocks), np.float32)]
        node = product_node(["x", "w0", "w1"], "y", bits, (columns, outputs), BLOCK)
    held = [numpy_helper.from_array(each, f"w{number}") for number, each in enumerate(weights)]
    ends = [declared("x", np.float32, [rows, columns]), declared("y", np.float32, [rows, outputs])]
    places = {"x": gpu.empty((rows, columns))}, {"y": gpu.empty((rows, outputs))}
    run = gpu.bind(gpu.session([node], ends[:1], ends[1:], held, captured=True), *places, gpu.captures(rows))
    waiting = [gpu.download([gpu.mirror(np.zeros(1, np.float32))])]
    waits = seconds_of(waiting)
    once = seconds_of([run, *waiting]) - waits
    return once if once > LONG_S else max(CLOCK_S, seconds_of([*[run] * REPEATS, *waiting]) - waits) / REPEATS


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
        if sum(took) > ENOUGH_S:
            break
    return min(took)
