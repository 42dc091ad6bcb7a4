"""Our own norms and gates against float64, and against themselves: every level, and a row beside any others, gives the
same bits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.plugins.native.library import F32
from motley.plugins.native.rows import ACTIVATIONS, bind_gated, bind_head_norms, bind_norm
from tests.plugins.native.native_levels import LEVELS, assert_same, at_all_levels, normal, set_level

F64 = np.ndarray[Any, np.dtype[np.float64]]

HALF_ULP = 2.0**-24


# Norms


def norm(x: F32, skip: F32 | None, weight: F32, epsilon: float = 1e-5, **layer: Any) -> F32:
    y = np.full_like(x, np.nan)
    bind_norm(x, skip, weight, epsilon, y, None, **layer)()
    return y


@given(
    rows=st.integers(1, 4), columns=st.integers(1, 200), skipped=st.booleans(), scale=st.sampled_from((1e-3, 1, 1e6))
)
def test_norms(rows: int, columns: int, skipped: bool, scale: float) -> None:
    random = np.random.default_rng([rows, columns])
    x, skip = normal(random, rows, columns) * np.float32(scale), normal(random, rows, columns) if skipped else None
    weight = normal(random, columns)
    y = at_all_levels(lambda: norm(x, skip, weight))
    total = (x if skip is None else x + skip).astype(np.float64)
    exact = total / np.sqrt((total**2).mean(-1, keepdims=True) + np.float32(1e-5)) * weight
    assert (np.abs(y - exact) <= (6 + columns / 32) * HALF_ULP * np.abs(exact)).all()
    for row in range(rows):
        alone = norm(x[row : row + 1], None if skip is None else skip[row : row + 1], weight)
        assert_same(alone, y[row : row + 1])


@given(rows=st.integers(1, 3), columns=st.integers(1, 70), factor=st.sampled_from((1.0, 0.22, -3.5)))
def test_norms_of_scaled_rows(rows: int, columns: int, factor: float) -> None:
    random = np.random.default_rng([rows, columns])
    x, skip, weight = normal(random, rows, columns), normal(random, rows, columns), normal(random, columns)
    total = x * np.float32(factor) + skip

    def scaled() -> F32:
        y, added = np.empty_like(x), np.empty_like(x)
        bind_norm(x, skip, weight, 1e-5, y, added, factor=factor)()
        assert_same(added, total)
        return y

    assert_same(at_all_levels(scaled), norm(total, None, weight))


@given(
    rows=st.integers(1, 3),
    heads=st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(any),
    size=st.integers(1, 70),
    normed=st.lists(st.booleans(), min_size=3, max_size=3),
    firsts=st.lists(st.integers(0, 9), min_size=3, max_size=3),
)
def test_norms_of_heads_are_those_of_each_head(
    rows: int, heads: list[int], size: int, normed: list[bool], firsts: list[int]
) -> None:
    random = np.random.default_rng([rows, size])
    firsts = firsts[: len(heads)]
    x = normal(random, rows, 9 + max(heads) * size)
    gains = [normal(random, size) if one else None for one, _ in zip(normed, heads, strict=False)]

    def norms() -> F32:
        y = np.full((rows, sum(heads) * size), np.nan, np.float32)
        bind_head_norms(x, firsts, gains, heads, size, 1e-5, y)()
        return y

    y, at = at_all_levels(norms), 0
    for first, count, gain in zip(firsts, heads, gains, strict=True):
        own = x[:, first : first + count * size].reshape(-1, size)
        expected = own if gain is None else norm(own.copy(), None, gain)
        assert_same(y[:, at : at + count * size].reshape(-1, size), expected)
        at += count * size


@given(rows=st.integers(1, 4), columns=st.integers(2, 200), skipped=st.booleans(), biased=st.booleans())
def test_layer_norms(rows: int, columns: int, skipped: bool, biased: bool) -> None:
    random = np.random.default_rng([rows, columns])
    x, skip = normal(random, rows, columns) + np.float32(3), normal(random, rows, columns) if skipped else None
    weight, bias = normal(random, columns), normal(random, columns) if biased else None
    y = at_all_levels(lambda: norm(x, skip, weight, bias=bias, centred=True))
    total = (x if skip is None else x + skip).astype(np.float64)
    total -= total.mean(-1, keepdims=True)
    unbiased = total / np.sqrt((total**2).mean(-1, keepdims=True) + np.float32(1e-5)) * weight
    np.testing.assert_allclose(y, unbiased + (0 if bias is None else bias), 1e-4, 1e-4)
    for row in range(rows):
        alone = norm(x[row : row + 1], skip if skip is None else skip[row : row + 1], weight, bias=bias, centred=True)
        assert_same(alone, y[row : row + 1])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("columns", [5, 32, 2049])
def test_the_sum_of_a_norm_may_replace_an_operand(level: str, columns: int) -> None:
    random = np.random.default_rng(columns)
    x, skip, weight = normal(random, 3, columns), normal(random, 3, columns), normal(random, columns)
    set_level(level)
    expected, total = norm(x, skip, weight), x + skip
    for place in ("x", "skip", "elsewhere"):
        of = {"x": x.copy(), "skip": skip.copy(), "elsewhere": np.empty_like(x)}
        y = np.empty_like(x)
        bind_norm(of["x"], of["skip"], weight, 1e-5, y, of[place])()
        assert_same(y, expected)
        assert_same(of[place], total)
    copy = np.empty_like(x)
    bind_norm(x, None, weight, 1e-5, np.empty_like(x), copy)()
    assert_same(copy, x)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_does_not_vanish_in_norms(level: str, value: float) -> None:
    x, weight = normal(np.random.default_rng(0), 3, 45), np.ones(45, np.float32)
    set_level(level)
    finite = norm(x, None, weight)
    x[1, 43] = value
    y = norm(x, None, weight)
    assert np.isnan(y[1, 43])
    assert_same(y[[0, 2]], finite[[0, 2]])


# Gates


def gated(gate_up: F32, activation: str = "silu") -> F32:
    y = np.full((len(gate_up), gate_up.shape[1] // 2), np.nan, np.float32)
    bind_gated(gate_up, y, activation)()
    return y


def exactly_gated(gate_up: F32, activation: str) -> F64:
    """By the formulas of `motley.daemon.models.description.operations.Activation`."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    if activation == "sigmoid":
        return up / (1 + np.exp(-gate))
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 200),
    scale=st.sampled_from((0.1, 3, 40)),
    activation=st.sampled_from(ACTIVATIONS[1:]),
)
def test_other_gates(rows: int, columns: int, scale: float, activation: str) -> None:
    gate_up = normal(np.random.default_rng([rows, columns]), rows, 2 * columns) * np.float32(scale)
    y = at_all_levels(lambda: gated(gate_up, activation))
    exact = exactly_gated(gate_up, activation)
    largest = np.abs(gate_up).max(initial=1)
    assert (np.abs(y - exact) <= 1e-5 * np.abs(exact) + 2e-7 * largest).all()
    for row in range(rows):
        assert_same(gated(gate_up[row : row + 1], activation), y[row : row + 1])


def test_a_gate_that_lies_apart_opens_the_same() -> None:
    gate, up = np.split(normal(np.random.default_rng(7), 3, 42), 2, axis=1)
    y = np.full((3, 21), np.nan, np.float32)
    for before, behind in ((0, 0), (3, 0), (0, 5), (2, 1)):
        y.fill(np.nan)
        among = np.pad(gate, ((0, 0), (before, behind)), constant_values=np.nan)
        bind_gated(among, y, "sigmoid", np.ascontiguousarray(up), before)()
        assert_same(y, gated(np.concatenate([gate, up], axis=1), "sigmoid"))


@pytest.mark.parametrize("activation", ["gelu_tanh", "clamped"])
def test_other_gates_at_their_limits(activation: str) -> None:
    gate = np.array([np.inf, 3e38, 200, 0, -0.0, -200, -3e38, -np.inf, np.nan], np.float32)
    y = at_all_levels(lambda: gated(np.concatenate([gate, np.ones_like(gate)])[None], activation))[0]
    assert np.isnan(y[8])
    np.testing.assert_array_equal(y[3:8], 0)
    np.testing.assert_array_equal(y[:3], gate[:3] if activation == "gelu_tanh" else y[0])
    assert y[0] == np.inf if activation == "gelu_tanh" else abs(y[0] - 14) < 1e-3


@given(columns=st.integers(1, 70), limits=st.tuples(*[st.sampled_from((0.25, 1.5, np.inf))] * 2))
def test_limits_of_gates_and_ups(columns: int, limits: tuple[float, float]) -> None:
    gate_up = normal(np.random.default_rng(columns), 2, 2 * columns) * np.float32(2)
    y = np.empty((2, columns), np.float32)

    def bounded() -> F32:
        bind_gated(gate_up, y, limits=limits)()
        return y.copy()

    gate, up = np.split(gate_up, 2, axis=1)
    within = np.minimum(gate, np.float32(limits[0])), np.clip(up, -np.float32(limits[1]), np.float32(limits[1]))
    assert_same(at_all_levels(bounded), gated(np.concatenate(within, axis=1)))


def silu(gate: F32) -> F64:
    wide = gate.astype(np.float64)
    e = np.exp(-np.abs(wide))
    return np.where(wide < 0, wide * e, wide) / (1 + e)


@given(rows=st.integers(1, 4), columns=st.integers(1, 200), scale=st.sampled_from((0.1, 3, 40)))
def test_gates(rows: int, columns: int, scale: float) -> None:
    gate_up = normal(np.random.default_rng([rows, columns]), rows, 2 * columns) * np.float32(scale)
    y = at_all_levels(lambda: gated(gate_up))
    exact = silu(gate_up[:, :columns]) * gate_up[:, columns:]
    assert (np.abs(y - exact) <= 6 * HALF_ULP * np.abs(exact) + 1e-37).all()
    for row in range(rows):
        assert_same(gated(gate_up[row : row + 1]), y[row : row + 1])


def test_gates_of_all_magnitudes() -> None:
    """From where silu is gate / 2 to where it is the gate, or nothing: within 6 half ulp, of which 4 are exp's."""
    gate = np.concatenate([np.linspace(-130, 130, 20001), np.geomspace(1e-30, 1, 999), -np.geomspace(1e-30, 1, 999)])
    gate_up = np.stack([gate, np.ones_like(gate)]).astype(np.float32).reshape(1, -1)
    y = at_all_levels(lambda: gated(gate_up))
    exact = silu(gate_up[:, : gate.size])
    assert (np.abs(y - exact) <= 6 * HALF_ULP * np.abs(exact) + 2e-43).all()


def test_gates_at_their_limits() -> None:
    gate = np.array([np.inf, 3e38, 200, 104.5, 0, -0.0, -104.5, -200, -3e38, -np.inf, np.nan], np.float32)
    y = at_all_levels(lambda: gated(np.concatenate([gate, np.ones_like(gate)])[None]))[0]
    np.testing.assert_array_equal(y[:4], gate[:4])
    np.testing.assert_array_equal(y[4:10], np.where(gate[4:10] == np.float32(-104.5), y[6], 0))
    assert -1e-42 < y[6] <= 0
    assert np.isnan(y[10])
    ups = np.array([np.nan, np.inf, 1], np.float32)
    assert np.isnan(gated(np.concatenate([np.ones(3, np.float32), ups])[None])[0]).tolist() == [True, False, False]


# All


BEYOND = """
import numpy as np
from motley.plugins.native.rows import bind_gated, bind_norm
from tests.plugins.native.native_levels import LEVELS, at_the_end, set_level

def ones(*shape):
    return at_the_end(np.ones(shape, np.float32))

for level in LEVELS:
    set_level(level)
    for size in (1, 3, 4, 8, 9, 15, 16, 17, 24, 33, 63):
        bind_norm(ones(2, size), ones(2, size), ones(size), 1e-5, ones(2, size), ones(2, size))()
        bind_gated(ones(2, 2 * size), ones(2, size))()
print("done")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="pages are fenced by mprotect")
def test_nothing_is_touched_beyond_the_last_byte() -> None:
    root = Path(__file__).parents[3]
    ran = subprocess.run([sys.executable, "-c", BEYOND], capture_output=True, text=True, timeout=200, cwd=root)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("level", LEVELS)
def test_operands_may_lie_anywhere(level: str) -> None:
    set_level(level)

    def moved(array: F32) -> F32:
        memory = np.zeros(array.size + 1, np.float32)
        memory[1:] = array.ravel()
        return memory[1:].reshape(array.shape)

    x = normal(np.random.default_rng(0), 3, 90)
    assert_same(gated(moved(x)), gated(x))
    assert_same(norm(moved(x), moved(x), moved(x[0])), norm(x, x, x[0]))


def a_norm(**changed: Any) -> None:
    shapes = {"x": (3, 8), "skip": (3, 8), "weight": (8,), "y": (3, 8), "total": (3, 8)}
    bind_norm(**{name: np.ones(shape, np.float32) for name, shape in shapes.items()} | {"epsilon": 1e-5} | changed)


def head_norms(**changed: Any) -> None:
    given = {
        "x": np.ones((3, 8), np.float32),
        "y": np.ones((3, 8), np.float32),
        "gains": [np.ones(2, np.float32), None],
    }
    bind_head_norms(**given | {"firsts": [0, 6], "heads": [3, 1], "size": 2, "epsilon": 1e-5} | changed)


def a_gate(**changed: Any) -> None:
    bind_gated(**{"gate_up": np.ones((3, 8), np.float32), "y": np.ones((3, 4), np.float32)} | changed)


def ones(*shape: int, dtype: Any = np.float32, writeable: bool = True) -> Any:
    array = np.ones(shape, dtype)
    array.flags.writeable = writeable
    return array


REFUSED: list[tuple[Callable[..., None], str, Any]] = [
    (a_norm, "x", ones(8)),
    (a_norm, "x", ones(3, 8, dtype=np.float64)),
    (a_norm, "skip", ones(3, 9)),
    (a_norm, "weight", ones(1, 8)),
    (a_norm, "bias", ones(9)),
    (a_norm, "y", ones(2, 8)),
    (a_norm, "y", ones(3, 8, writeable=False)),
    (a_norm, "total", ones(3, 8, writeable=False)),
    (a_norm, "total", ones(3, 16)[:, ::2]),
    (head_norms, "x", ones(3, 7)),
    (head_norms, "y", ones(3, 8, writeable=False)),
    (head_norms, "gains", [ones(3), None]),
    (a_gate, "y", ones(4)),
    (a_gate, "y", ones(3, 4, writeable=False)),
    (a_gate, "gate_up", ones(3, 7)),
]


@pytest.mark.parametrize(("bind", "name", "value"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(bind: Callable[..., None], name: str, value: Any) -> None:
    bind()
    with pytest.raises(ValueError, match=f"^{name} must"):
        bind(**{name: value})
