"""Rows that kernels make as they read them, compiled for the host: as NumPy makes them, the same bits however they are
read; and which values of a graph are made so."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from motley.plugins.adapters import ADAPTED
from motley.plugins.cuda.kernels import GATES, LAYER_NORM, NORM, NORM_PART, THREADS, Coded, RowSource, View
from motley.plugins.cuda.modules import MODULES
from motley.plugins.cuda.quantised_values import QuantisedValue, normalised_sums, quantised_values
from tests.plugins.cuda.launching import launch_kernel

F32 = npt.NDArray[np.float32]
CODED = Coded(4, 256, 7)
EPSILON = 1e-5
WAITING = ("wait_for_previous", "products", "tile_products", "matmul")
"""What a kernel may begin with: functions that wait for the kernel before, some once weights are on their way."""


def view(array: F32, columns: int) -> View:
    """The first columns of an array's rows."""
    return View(array.ctypes.data, columns, array.shape[1])


def aligned(rows: int, width: int, fill: float = np.nan) -> F32:
    """f32[rows, width] at an address that is a multiple of 16."""
    room = np.full(rows * width + 4, fill, np.float32)
    start = -room.ctypes.data % 16 // 4
    return room[start : start + rows * width].reshape(rows, width)


def random_rows(rng: np.random.Generator, rows: int, width: int) -> F32:
    made = aligned(rows, width)
    made[:] = rng.standard_normal(made.shape)
    return made


def make(source: RowSource, rows: int, columns: int) -> F32:
    y = aligned(rows, columns)
    blocks = rows * -(-columns // NORM_PART)
    launch_kernel("make_rows", blocks, [source.kept(view(y, columns))])
    return y


def quantised(source: RowSource, rows: int) -> bytes:
    """What the products of a few tokens take."""
    room = np.zeros(CODED.activation_bytes(rows) + 16, np.uint8)
    there = room[-room.ctypes.data % 16 :]
    numbers = map(ctypes.c_int, (CODED.columns, CODED.shift, CODED.stretches))
    arguments = [source, ctypes.c_void_p(there.ctypes.data), *numbers]
    launch_kernel(CODED.quantise(1), rows * CODED.quantising_threads // THREADS, arguments)
    return there[: rows * CODED.stretches * 192].tobytes()


def normalised(x: F32, gain: F32, centred: bool) -> Any:
    wide = x.astype(np.float64)
    if centred:
        wide -= wide.mean(1, keepdims=True)
    return wide / np.sqrt(np.mean(wide**2, 1, keepdims=True) + EPSILON) * gain


@given(
    st.integers(1, 4),
    st.integers(2, 1100),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from((NORM, LAYER_NORM)),
    st.booleans(),
    st.integers(0, 1 << 30),
)
@example(3, 1024, 0, True, NORM, False, 0)
@example(2, 1024, 4, False, LAYER_NORM, True, 1)
@example(1, 513, 0, True, LAYER_NORM, False, 2)
def test_norms_of_rows_and_of_sums(
    rows: int, columns: int, more: int, adds: bool, kind: int, biased: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, other = (random_rows(rng, rows, columns + more) for _ in range(2))
    gain, bias, sums = random_rows(rng, 1, columns), random_rows(rng, 1, columns), aligned(rows, columns)
    added = (view(other, columns), view(sums, columns)) if adds else (None, None)
    place = bias.ctypes.data if biased else 0
    source = RowSource.of(view(x, columns), kind, added[0], gain.ctypes.data, EPSILON, added[1], place)
    assert source.in_fours == (columns % 4 == 0 == more % 4)
    total = x[:, :columns] + other[:, :columns] if adds else x[:, :columns]
    got = make(source, rows, columns)
    expected = normalised(total, gain[0], kind == LAYER_NORM) + (bias[0] if biased else 0)
    np.testing.assert_allclose(got, expected, 1e-4 if kind == LAYER_NORM else 1e-5, 1e-5 if biased else 2e-6)
    assert np.array_equal(sums, total) if adds else np.isnan(sums).all()


@pytest.mark.parametrize("operator", GATES)
@pytest.mark.parametrize("columns", [3, 256, 600])
def test_gates(operator: str, columns: int) -> None:
    rng = np.random.default_rng(columns)
    both = random_rows(rng, 3, 2 * columns)
    gate, up = view(both, columns), replace(view(both, columns), address=both[:, columns:].ctypes.data)
    g, u = both[:, :columns].astype(np.float64), both[:, columns:].astype(np.float64)
    tanh = np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))
    expected = {"Swish": g / (1 + np.exp(-g)), "Relu": np.maximum(g, 0), "Gelu": g / 2 * (1 + tanh)}[operator] * u
    got = make(RowSource.of(gate, GATES[operator], up), 3, columns)
    np.testing.assert_allclose(got, expected, 1e-5, 1e-6)
    np.testing.assert_allclose(make(RowSource.of(gate, GATES[operator]), 3, columns) * u, expected, 1e-5, 1e-6)


@given(st.sampled_from(["norm", "norm of a sum", "layer norm", *GATES]), st.integers(1, 5), st.integers(0, 1 << 30))
def test_what_is_quantised_as_it_is_made_has_the_bits_of_what_is_made_first(kind: str, rows: int, seed: int) -> None:
    """And rows have the same bits beside others."""
    rng = np.random.default_rng(seed)
    x, other = (random_rows(rng, rows, CODED.columns) for _ in range(2))
    gain, sums, kept = random_rows(rng, 1, CODED.columns), aligned(rows, CODED.columns), aligned(rows, CODED.columns)

    def source(first: int = 0) -> RowSource:
        a, b = (view(each[first:], CODED.columns) for each in (x, other))
        if kind in GATES:
            return RowSource.of(a, GATES[kind], b)
        added = (b, view(sums[first:], CODED.columns)) if kind != "norm" else (None, None)
        made, bias = (LAYER_NORM, gain.ctypes.data) if kind == "layer norm" else (NORM, 0)
        return RowSource.of(a, made, added[0], gain.ctypes.data, EPSILON, added[1], bias)

    made = make(source(), rows, CODED.columns)
    expected = quantised(RowSource.of(view(made, CODED.columns)), rows)
    assert quantised(source().kept(view(kept, CODED.columns)), rows) == expected
    assert kept.tobytes() == made.tobytes()
    assert quantised(source(rows - 1), 1) == expected[-len(expected) // rows :]


def test_every_kernel_waits_for_the_one_before_it() -> None:
    """All are launched early: those that do not wait would read what is not there yet."""
    files = sorted({file for module in MODULES for file in module[1:]})
    assert files == sorted(files[0].parent.glob("*.cu"))
    whole = "".join(file.read_text("utf-8") for file in files)
    for name in WAITING[1:]:
        before = re.search(rf"__device__ void {name}\(((?:(?!__global__)[\s\S])*?)\n    wait_for_previous\(\);", whole)
        assert before, name
        assert not re.search(r"read_run|read_piece\(|now\.read|bias\[", before[1]), f"{name} reads too early"
    kernels = 0
    for source in files:
        lines = source.read_text("utf-8").splitlines()
        for number, line in enumerate(lines):
            if 'extern "C" __global__' not in line:
                continue
            kernels += 1
            body = "\n".join(lines[number:]).partition("{")[2]
            started = re.sub(r"const \w+ matrix = {[^;\[\]*]*};|if \([^{]*{", "", body.replace("\\", "")).split()[0]
            assert re.split("[<(]", started)[0] in WAITING, f"{source.name}:{number + 1} does something before it waits"
    assert kernels > 30


def node(operator: str, *names: str) -> onnx.NodeProto:
    return onnx.helper.make_node(operator, names[:-1], names[-1:])


def test_values_are_quantised_as_they_are_made_for_the_products_behind_them() -> None:
    nodes = [
        node("Add", "x", "y", "sum"),
        node("RMSNormalization", "sum", "gain", "a"),
        node("Gemm", "a", "codes", "q"),
        node(ADAPTED, "a", "q", "q+"),
        node("Gemm", "a", "codes", "k"),
        node("Mul", "q+", "k", "b"),
        node("Gemm", "b", "codes", "c"),
        node("Gemm", "a", "codes", "later"),
        node("Mul", "q+", "k", "d"),
        node("Gemm", "d", "floats", "e"),
        node("Mul", "q+", "k", "f"),
        node("Gemm", "f", "codes", "g"),
        node("Gemm", "f", "floats", "h"),
        node("Add", "x", "y", "i"),
        node("Gemm", "c", "codes", "j"),
    ]
    graph = onnx.helper.make_graph(nodes, "graph", [], [])
    assert quantised_values(nodes, graph, {"codes": CODED}) == {
        "a": QuantisedValue(CODED, read_as_floats=True),
        "b": QuantisedValue(CODED, read_as_floats=False),
        "f": QuantisedValue(CODED, read_as_floats=True),
    }
    assert normalised_sums(nodes) == {"sum"}


def test_what_reads_a_value_along_with_its_own_work_reads_its_floats() -> None:
    """What opens a gate is computed by the product with it, and no node of a step."""
    nodes = [node("RMSNormalization", "x", "gain", "a"), node("Gemm", "a", "codes", "u"), node("Mul", "s", "u", "y")]
    whole = onnx.helper.make_graph([*nodes[:2], node("Swish", "a", "s"), nodes[2]], "graph", [], [])
    assert quantised_values(nodes, whole, {"codes": CODED}) == {"a": QuantisedValue(CODED, read_as_floats=True)}
    told = onnx.helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, None)
    last = onnx.helper.make_graph(nodes[:2], "graph", [], [told])
    assert quantised_values(nodes[:2], last, {"codes": CODED})["a"].read_as_floats
