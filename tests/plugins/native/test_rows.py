"""Our own norms, gates and attention against float64, and against themselves: every level and pool, and a row beside
any others, gives the same bits.

The file is long: norms, gates and attention have one contract, which is checked at every level by the same functions.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.plugins.native.library import F32
from motley.plugins.native.matmul import Pool
from motley.plugins.native.rows import ACTIVATIONS, bind_attention, bind_gated, bind_norm
from tests.plugins.native.native_levels import LEVELS, assert_same, set_level

F64 = np.ndarray[Any, np.dtype[np.float64]]

HALF_ULP = 2.0**-24
POOLS = {threads: Pool(threads) for threads in (1, 2, 3)}


@pytest.fixture(autouse=True)
def _best_level_again() -> Iterator[None]:
    yield
    set_level(LEVELS[-1])


def normal(random: np.random.Generator, *shape: int) -> F32:
    return random.standard_normal(shape).astype(np.float32)


def at_all_levels(compute: Callable[[], F32]) -> F32:
    """What `compute` gives, the same to the bit at every level."""
    set_level(LEVELS[0])
    expected = compute()
    for level in LEVELS[1:]:
        set_level(level)
        assert_same(compute(), expected)
    return expected


# Norms


def norm(x: F32, skip: F32 | None, weight: F32, epsilon: float = 1e-5) -> F32:
    y = np.full_like(x, np.nan)
    bind_norm(x, skip, weight, epsilon, y, None)()
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


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_other_gates_at_their_limits(activation: str) -> None:
    gate = np.array([np.inf, 3e38, 200, 0, -0.0, -200, -3e38, -np.inf, np.nan], np.float32)
    y = at_all_levels(lambda: gated(np.concatenate([gate, np.ones_like(gate)])[None], activation))[0]
    assert np.isnan(y[8])
    np.testing.assert_array_equal(y[3:8], 0)
    np.testing.assert_array_equal(y[:3], gate[:3] if activation == "gelu_tanh" else y[0])
    assert y[0] == np.inf if activation == "gelu_tanh" else abs(y[0] - 14) < 1e-3


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


# Attention


@dataclass(frozen=True)
class Case:
    """Consecutive tokens and what is cached before them."""

    qkv: F32
    keys: F32
    values: F32
    cos: F32
    sin: F32
    position: int
    heads: int
    window: int = 0
    scale: float = 0.3
    soft_cap: float = 0.0
    sinks: F32 | None = None

    @classmethod
    def random(
        cls,
        kv_heads: int,
        group: int,
        size: int,
        capacity: int,
        position: int,
        turned: int = 0,
        window: int = 0,
        rows: int = 1,
    ) -> Case:
        random = np.random.default_rng([kv_heads, group, size, capacity, position])
        angles = random.uniform(0, 7, (capacity, turned))
        return cls(
            normal(random, rows, (group + 2) * kv_heads * size),
            normal(random, 1, kv_heads, capacity, size),
            normal(random, 1, kv_heads, capacity, size),
            np.cos(angles).astype(np.float32),
            np.sin(angles).astype(np.float32),
            position,
            group * kv_heads,
            window,
        )

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def places(self) -> slice:
        """Where the tokens stand."""
        return slice(self.position, self.position + len(self.qkv))

    def copy(self) -> Case:
        return replace(self, keys=self.keys.copy(), values=self.values.copy())

    def bind(self, y: F32, threads: int = 1) -> Callable[[], None]:
        return bind_attention(
            self.qkv,
            self.keys,
            self.values,
            self.cos,
            self.sin,
            np.array([self.position], np.int64),
            y,
            heads=self.heads,
            kv_heads=self.kv_heads,
            scale=self.scale,
            window=self.window,
            pool=POOLS[threads],
            soft_cap=self.soft_cap,
            sinks=self.sinks,
        )

    def result(self, threads: int = 1) -> F32:
        """On copies of the caches."""
        y = np.full((len(self.qkv), self.heads * self.keys.shape[3]), np.nan, np.float32)
        self.copy().bind(y, threads)()
        return y

    def split(self) -> tuple[F64, F64, F64]:
        """f64[H, M, d] of the tokens' queries, keys and values, turned."""
        rows = self.qkv.astype(np.float64).reshape(len(self.qkv), -1, self.keys.shape[3]).transpose(1, 0, 2)
        half = self.cos.shape[1]
        a, b, others = np.split(rows[: -self.kv_heads], [half, 2 * half], axis=2)
        cos, sin = self.cos[self.places].astype(np.float64), self.sin[self.places].astype(np.float64)
        turned = np.concatenate([a * cos - b * sin, b * cos + a * sin, others], axis=2)
        return turned[: self.heads], turned[self.heads :], rows[-self.kv_heads :]

    def exact(self) -> F64:
        queries, own_keys, own_values = self.split()
        keys, values = self.keys[0].astype(np.float64), self.values[0].astype(np.float64)
        keys[:, self.places], values[:, self.places] = own_keys, own_values
        return np.stack([self._seen(queries[:, row], keys, values, row) for row in range(len(self.qkv))])

    def _seen(self, queries: F64, keys: F64, values: F64, row: int) -> F64:
        """f64[H * d]: what one token sees."""
        position = self.position + row
        seen = slice(max(0, position - self.window + 1) if self.window else 0, position + 1)
        grouped = queries.reshape(self.kv_heads, -1, queries.shape[1])
        scores = np.float32(self.scale) * grouped @ keys[:, seen].transpose(0, 2, 1)
        if self.soft_cap:
            scores = self.soft_cap * np.tanh(scores / self.soft_cap)
        sinks = np.full(self.heads, -np.inf) if self.sinks is None else self.sinks.astype(np.float64)
        sinks = sinks.reshape(self.kv_heads, -1, 1)
        largest = np.maximum(scores.max(-1, keepdims=True), sinks)
        e = np.exp(scores - largest)
        total = e.sum(-1, keepdims=True) + np.exp(sinks - largest)
        return (e / total @ values[:, seen]).reshape(-1)

    def bound(self) -> float:
        """Of the values: twice what a score's sum by 16 lanes is off by, and a stretch's sum of 128 positions."""
        queries, key, _ = self.split()
        keys = np.concatenate([self.keys[0], key], axis=1)
        grouped = np.abs(queries).reshape(self.kv_heads, -1, queries.shape[2])
        largest = self.scale * (grouped @ np.abs(keys).transpose(0, 2, 1)).max()
        off = HALF_ULP * ((self.keys.shape[3] / 16 + 10) * 2 * largest + 168)
        return float(off * max(np.abs(self.values).max(), np.abs(self.qkv).max()))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    capacity = draw(st.integers(1, 300))
    position = draw(st.integers(0, capacity - 1) | st.just(capacity - 1))
    size = draw(st.sampled_from((1, 3, 8, 16, 24, 40, 64, 72, 128)))
    return Case.random(
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 9)),
        size=size,
        capacity=capacity,
        position=position,
        turned=draw(st.integers(0, size // 2) | st.just(size // 2)),
        window=draw(st.just(0) | st.integers(1, capacity + 9)),
        rows=draw(st.just(1) | st.integers(1, min(40, capacity - position))),
    )


@given(case=cases())
def test_attention(case: Case) -> None:
    y = at_all_levels(case.result)
    assert np.abs(y - case.exact()).max() <= case.bound()


@given(case=cases(), cap=st.sampled_from((0.0, 0.5, 30.0)), size=st.sampled_from((0.0, 1.0, 8.0)))
def test_attention_with_a_soft_cap_and_sinks(case: Case, cap: float, size: float) -> None:
    sinks = normal(np.random.default_rng(case.heads), case.heads) * np.float32(size) if size else None
    changed = replace(case, soft_cap=cap, sinks=sinks)
    y = at_all_levels(changed.result)
    largest = max(np.abs(case.values).max(), np.abs(case.qkv).max())
    assert np.abs(y - changed.exact()).max() <= case.bound() + 16 * HALF_ULP * cap * float(largest)


@given(case=cases(), level=st.sampled_from(LEVELS), data=st.data())
def test_rows_get_together_what_each_gets_alone(case: Case, level: str, data: st.DataObject) -> None:
    """However they are cut into chunks, to the bit."""
    set_level(level)
    cuts = data.draw(st.sets(st.integers(1, len(case.qkv) - 1))) if len(case.qkv) > 1 else set[int]()
    apart, pieces = case.copy(), []
    for start, stop in pairwise([0, *sorted(cuts), len(case.qkv)]):
        chunk = replace(apart, qkv=np.ascontiguousarray(case.qkv[start:stop]), position=case.position + start)
        pieces.append(np.empty((stop - start, case.heads * case.keys.shape[3]), np.float32))
        chunk.bind(pieces[-1])()
    assert_same(np.concatenate(pieces), case.result())


@given(case=cases(), level=st.sampled_from(LEVELS))
def test_only_the_tokens_are_written_to_the_caches(case: Case, level: str) -> None:
    set_level(level)
    after = case.copy()
    after.bind(np.empty((len(case.qkv), case.heads * case.keys.shape[3]), np.float32))()
    _, key, value = case.split()
    assert_same(after.values[0, :, case.places], value.astype(np.float32))
    np.testing.assert_allclose(after.keys[0, :, case.places], key, atol=4 * HALF_ULP * np.abs(case.qkv).max())
    for cache, before in ((after.keys, case.keys), (after.values, case.values)):
        others = np.delete(np.arange(cache.shape[2]), case.places)
        assert_same(cache[:, :, others], before[:, :, others])


@pytest.mark.parametrize(("kv_heads", "group", "size"), [(1, 1, 128), (2, 4, 64), (3, 8, 40), (1, 20, 64)])
@pytest.mark.parametrize("window", [0, 4000])
def test_threads_do_not_change_bits_of_long_contexts(kv_heads: int, group: int, size: int, window: int) -> None:
    case = Case.random(kv_heads, group, size, 5000, 4900, turned=size // 2, window=window)
    set_level(LEVELS[-1])
    expected = case.result()
    assert np.abs(expected - case.exact()).max() <= case.bound()
    for level in LEVELS[1:]:
        set_level(level)
        for threads in POOLS:
            assert_same(case.result(threads), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_the_position_is_read_by_every_call(level: str) -> None:
    case = Case.random(2, 4, 16, 200, 0, turned=8)
    set_level(level)
    position, y = np.zeros(1, np.int64), np.empty((1, 128), np.float32)
    after = case.copy()
    call = bind_attention(
        after.qkv, after.keys, after.values, after.cos, after.sin, position, y,
        heads=8, kv_heads=2, scale=case.scale, window=0, pool=POOLS[2],
    )  # fmt: skip
    for at in (0, 1, 150, 199):
        position[0] = at
        expected = replace(after, position=at).result()
        call()
        assert_same(y, expected)
    for at in (200, -1):
        position[0] = at
        before, y[...] = after.copy(), 7
        with pytest.raises(IndexError, match=f"positions {at} to {at + 1} .* 200"):
            call()
        assert (y == 7).all()
        assert_same(after.keys, before.keys)


def test_one_position_gives_its_value() -> None:
    case = Case.random(2, 3, 24, 4, 0)
    y = at_all_levels(case.result).reshape(6, 24)
    np.testing.assert_array_equal(y, case.qkv[0, -48:].reshape(2, 24).repeat(3, axis=0))


def test_scores_of_all_magnitudes() -> None:
    """The largest is subtracted first, and stretches far below it count for nothing."""
    case = Case.random(1, 4, 8, 600, 599)
    case.keys[0, 0, 300] *= 1e4
    for scale in (1e-30, 1e3, 1e30):
        scaled = replace(case, scale=scale)
        y = at_all_levels(scaled.result)
        assert np.isfinite(y).all()
        if scale != 1e3:
            np.testing.assert_allclose(y, scaled.exact(), atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cache", ["keys", "values"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_does_not_vanish_in_attention(level: str, cache: str, value: float) -> None:
    case = Case.random(2, 3, 24, 400, 350)
    set_level(level)
    finite = case.result()
    getattr(case, cache)[0, 1, 200, 5] = value
    y = case.result().reshape(2, 3, 24)
    assert_same(y[0], finite.reshape(2, 3, 24)[0])
    if cache == "values":
        assert not np.isfinite(y[1, :, 5]).any()
        assert np.isfinite(np.delete(y[1], 5, axis=1)).all()
    elif np.isnan(value):
        assert np.isnan(y[1]).all()
    else:  # a score of minus infinity only leaves its position out
        up = case.split()[0].reshape(2, 3, 24)[1, :, 5] * value > 0
        assert (np.isnan(y[1]).all(-1) == up).all()
        assert (np.isfinite(y[1]).all(-1) == ~up).all()


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_not_seen_may_be_anything(level: str) -> None:
    case = Case.random(2, 3, 24, 400, 350, turned=8, window=60)
    set_level(level)
    expected = case.result()
    for cache in (case.keys, case.values):
        cache[:, :, 351:] = np.nan
        cache[:, :, : 350 - 59] = np.inf
        cache[:, :, 350] = np.nan
    assert_same(case.result(), expected)


# All


BEYOND = """
import numpy as np
from motley.plugins.native.matmul import Pool
from motley.plugins.native.rows import bind_attention, bind_gated, bind_norm
from tests.plugins.native.native_levels import LEVELS, at_the_end, set_level

def ones(*shape):
    return at_the_end(np.ones(shape, np.float32))

pool = Pool(1)
for level in LEVELS:
    set_level(level)
    for size in (1, 3, 4, 8, 9, 15, 16, 17, 24, 33, 63):
        bind_norm(ones(2, size), ones(2, size), ones(size), 1e-5, ones(2, size), ones(2, size))()
        bind_gated(ones(2, 2 * size), ones(2, size))()
        for turned in {0, size // 2}:
            for places in (1, 2, 7, 130):
                position = at_the_end(np.array([places - 1]))
                caches, angles = [ones(1, 2, places, size) for _ in "kv"], [ones(places, turned) for _ in "cs"]
                bind_attention(
                    ones(1, 10 * size), *caches, *angles, position, ones(1, 6 * size),
                    heads=6, kv_heads=2, scale=1, window=0, pool=pool,
                )()
print("done")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="pages are fenced by mprotect")
def test_nothing_is_touched_beyond_the_last_byte() -> None:
    root = Path(__file__).parents[3]
    ran = subprocess.run([sys.executable, "-c", BEYOND], capture_output=True, text=True, timeout=200, cwd=root)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("level", LEVELS)
def test_operands_may_lie_anywhere(level: str) -> None:
    case = Case.random(2, 3, 24, 40, 30, turned=12)
    set_level(level)

    def moved(array: F32) -> F32:
        memory = np.zeros(array.size + 1, np.float32)
        memory[1:] = array.ravel()
        return memory[1:].reshape(array.shape)

    names = ("qkv", "keys", "values", "cos", "sin")
    assert_same(replace(case, **{name: moved(getattr(case, name)) for name in names}).result(), case.result())
    x = normal(np.random.default_rng(0), 3, 90)
    assert_same(gated(moved(x)), gated(x))
    assert_same(norm(moved(x), moved(x), moved(x[0])), norm(x, x, x[0]))


def a_norm(**changed: Any) -> None:
    shapes = {"x": (3, 8), "skip": (3, 8), "weight": (8,), "y": (3, 8), "total": (3, 8)}
    bind_norm(**{name: np.ones(shape, np.float32) for name, shape in shapes.items()} | {"epsilon": 1e-5} | changed)


def a_gate(**changed: Any) -> None:
    bind_gated(**{"gate_up": np.ones((3, 8), np.float32), "y": np.ones((3, 4), np.float32)} | changed)


def an_attention(**changed: Any) -> None:
    shapes = {"qkv": (1, 64), "key_cache": (1, 2, 9, 8), "value_cache": (1, 2, 9, 8), "cos": (5, 4), "sin": (5, 4)}
    bind_attention(
        **{name: np.ones(shape, np.float32) for name, shape in (shapes | {"y": (1, 32)}).items()}
        | {"position": np.zeros(1, np.int64), "heads": 4, "kv_heads": 2, "scale": 1.0, "window": 0, "pool": POOLS[1]}
        | changed
    )


def ones(*shape: int, dtype: Any = np.float32, writeable: bool = True) -> Any:
    array = np.ones(shape, dtype)
    array.flags.writeable = writeable
    return array


REFUSED: list[tuple[Callable[..., None], str, Any]] = [
    (a_norm, "x", ones(8)),
    (a_norm, "x", ones(3, 8, dtype=np.float64)),
    (a_norm, "skip", ones(3, 9)),
    (a_norm, "weight", ones(1, 8)),
    (a_norm, "y", ones(2, 8)),
    (a_norm, "y", ones(3, 8, writeable=False)),
    (a_norm, "total", ones(3, 8, writeable=False)),
    (a_norm, "total", ones(3, 16)[:, ::2]),
    (a_gate, "y", ones(4)),
    (a_gate, "y", ones(3, 4, writeable=False)),
    (a_gate, "gate_up", ones(3, 7)),
    (an_attention, "qkv", ones(1, 63)),
    (an_attention, "qkv", ones(0, 64)),
    (an_attention, "y", ones(2, 32)),
    (an_attention, "key_cache", ones(2, 9, 8)),
    (an_attention, "key_cache", ones(1, 1, 9, 8)),
    (an_attention, "key_cache", ones(1, 2, 9, 8, writeable=False)),
    (an_attention, "value_cache", ones(1, 2, 8, 8)),
    (an_attention, "value_cache", ones(1, 2, 9, 8, writeable=False)),
    (an_attention, "cos", ones(5)),
    (an_attention, "cos", ones(5, 5)),
    (an_attention, "sin", ones(5, 3)),
    (an_attention, "position", ones(1)),
    (an_attention, "position", ones(2, dtype=np.int64)),
    (an_attention, "y", ones(1, 64)),
    (an_attention, "y", ones(1, 32, writeable=False)),
    (an_attention, "heads", 3),
    (an_attention, "heads", 0),
    (an_attention, "window", -1),
]


@pytest.mark.parametrize(("bind", "name", "value"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(bind: Callable[..., None], name: str, value: Any) -> None:
    bind()
    with pytest.raises(ValueError, match=f"^{name} must"):
        bind(**{name: value})
