"""Attention without a GPU: what the kernels compute for rows of any sequences, and that company does not show in it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from motley.plugins.cuda import kernels
from motley.plugins.cuda.kernels import PART
from motley.plugins.cuda.nodes.attention import Reach, Tiles, rows_that_attend_together
from motley.plugins.engine import CACHE_FORMATS, F32
from motley.plugins.reference.caches import int8_codes
from tests.plugins.cuda.launching import launch_kernel
from tests.transport.cuda.host_driver import DEVICE as DEVICE_ADDRESSES

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Layer:
    """A layer that attends.

    Attributes:
        sinks: f32[heads], or None.
    """

    heads: int
    kv_heads: int
    width: int
    scale: float = 0.2
    cap: float = 0.0
    window: int = 0
    chunk: int = 0
    format: str = "fp32"
    sinks: F32 | None = None

    @property
    def tiles(self) -> Tiles:
        return Tiles.of(self.heads, self.kv_heads, self.width)

    def parts(self, stop: int) -> int:
        return self.tiles.most_parts(stop, self.window or self.chunk)


@dataclass(frozen=True)
class Rows:
    """Rows of a sequence: queries, f32[rows, heads * width], at the positions from `first` on, keys and values up to
    there: f32[kv_heads, positions, width]."""

    first: int
    queries: F32
    keys: F32
    values: F32

    @property
    def positions(self) -> range:
        return range(self.first, self.first + len(self.queries))

    def some(self, begin: int, end: int) -> Rows:
        return replace(self, first=self.first + begin, queries=self.queries[begin:end])


@dataclass
class Step:
    """What the kernels are given for some rows of some sequences, with blocks of so many positions; what no row sees is
    no number."""

    layer: Layer
    spans: Sequence[Rows]
    tokens: int = 32
    seed: int = 0
    held: list[Array] = field(default_factory=list)

    def run(self, *, in_parts: bool = False, stride: int = 1, apart: bool = False) -> F32:
        """y: f32[rows, heads * width]. `in_parts`: blocks of threads have a part each; `apart`: and a row each."""
        layer, rng = self.layer, np.random.default_rng(self.seed)
        q = np.concatenate([span.queries for span in self.spans])
        needs = [-(-span.positions.stop // self.tokens) for span in self.spans]
        numbers = np.split(rng.permutation(sum(needs) + 1).astype(np.int32)[:-1], np.cumsum(needs)[:-1])
        places = np.zeros(len(q), kernels.PLACE)
        caches, row = [self._pool(sum(needs) + 1) for _ in range(2)], 0
        for span, table in zip(self.spans, numbers, strict=True):
            count, least = len(span.queries), self._start(span.first)
            for index in range(count):
                place = (0, DEVICE_ADDRESSES + table.ctypes.data), 0, span.first + index, 0, index, count - 1 - index
                places[row + index] = place
            seen = np.arange(least, span.positions.stop)
            for cache, heads in zip(caches, (span.keys, span.values), strict=True):
                self._keep(cache, table[seen // self.tokens], seen % self.tokens, heads[:, seen].swapaxes(0, 1))
            row += count
        y = np.full((len(q), layer.heads * layer.width), np.nan, np.float32)
        tiles = (Tiles.of_rows_apart if apart else Tiles.of)(layer.heads, layer.kv_heads, layer.width)
        room = max(layer.parts(span.positions.stop) for span in self.spans) if in_parts else 1
        partials = np.full(len(q) * layer.heads * room * (layer.width + 4), np.nan, np.float32) if in_parts else None
        shape, reach = (layer.heads, layer.kv_heads, layer.width), Reach(layer.window, layer.chunk)
        width, number = q.shape[1], -(-len(q) // stride)
        given = [*pointers(q), *integers(width), *pointers(places, *caches[0], *caches[1]), *integers(1, self.tokens)]
        given += [*pointers(partials, layer.sinks, y), *integers(width, len(q), *shape)]
        given += [ctypes.c_float(layer.scale), ctypes.c_float(layer.cap), reach]
        given += integers(room, tiles.units, number, stride)
        launch_kernel(f"{tiles.kernel}_{layer.format}", number * tiles.units * room, given, tiles.threads)
        if in_parts:
            given = [*pointers(partials, layer.sinks, y), *integers(width), *pointers(places)]
            given += [*integers(len(q), layer.heads, layer.width), reach, *integers(room)]
            launch_kernel(f"combine_{layer.format}", -(-y.size // kernels.THREADS), given)
        self.held.clear()
        return y

    def _start(self, position: int) -> int:
        """The first position that a row sees."""
        if self.layer.chunk:
            return position - position % self.layer.chunk
        return max(0, position + 1 - self.layer.window) if self.layer.window else 0

    def _pool(self, blocks: int) -> tuple[Array, Array | None]:
        """Numbers and, in a format that has any, scales."""
        layer = self.layer
        shape = (blocks, layer.kv_heads, self.tokens, layer.width)
        if layer.format == "int8":
            return np.full(shape, 77, np.int8), np.full(shape[:-1], np.nan, np.float32)
        return np.full(shape, np.nan, np.float16 if layer.format == "fp16" else np.float32), None

    def _keep(self, cache: tuple[Array, Array | None], blocks: Array, at: Array, heads: F32) -> None:
        """`blocks`, `at`: where each position lies; `heads`: f32[positions, kv_heads, width]."""
        numbers, scales = cache
        if scales is None:
            numbers[blocks, :, at] = heads
        else:
            codes, by = int8_codes(np, heads)
            numbers[blocks, :, at], scales[blocks, :, at] = codes, by[..., 0]


def pointers(*arrays: Array | None) -> list[ctypes.c_void_p]:
    """Arguments that keep their arrays."""
    found = []
    for array in arrays:
        argument = ctypes.c_void_p(None if array is None else array.ctypes.data)
        argument.array = array  # type: ignore[attr-defined]
        found.append(argument)
    return found


def integers(*values: int) -> list[ctypes.c_int]:
    return [*map(ctypes.c_int, values)]


def rows_at(layer: Layer, first: int, count: int, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    queries = rng.standard_normal((count, layer.heads * layer.width)).astype(np.float32)
    kept = rng.standard_normal((2, layer.kv_heads, first + count, layer.width)).astype(np.float32)
    return Rows(first, queries, *kept)


def attended(layer: Layer, rows: Rows) -> F32:
    """The same in float64, of keys and values as they are kept."""
    keys, values = (each.astype(float) for each in (rows.keys, rows.values))
    if layer.format == "fp16":
        keys, values = (each.astype(np.float16).astype(float) for each in (rows.keys, rows.values))
    if layer.format == "int8":
        coded = [int8_codes(np, each) for each in (rows.keys, rows.values)]
        keys, values = (codes.astype(float) * scales for codes, scales in coded)
    results = []
    for position, query in zip(rows.positions, rows.queries.reshape(-1, layer.heads, layer.width), strict=True):
        seen = slice(Step(layer, [rows])._start(position), position + 1)
        for head in range(layer.heads):
            kv = head // (layer.heads // layer.kv_heads)
            scores = keys[kv, seen] @ query[head].astype(float) * layer.scale
            scores = np.tanh(scores / layer.cap) * layer.cap if layer.cap else scores
            sink = np.empty(0) if layer.sinks is None else layer.sinks[head : head + 1]
            weights = np.exp(scores - max([*scores, *sink]))
            results.append(weights @ values[kv, seen] / (weights.sum() + np.exp(sink - max([*scores, *sink])).sum()))
    return np.reshape(results, (len(rows.queries), -1))


@pytest.mark.parametrize("width", [22, 64, 96, 128, 256, 576])
@pytest.mark.parametrize(("window", "chunk", "cap"), [(0, 0, 0.0), (150, 0, 3.0), (0, 150, 0.0)])
@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
def test_attention_is_exact_in_parts_and_for_rows_of_any_sequences(
    width: int, window: int, chunk: int, cap: float, cache_format: str
) -> None:
    """Who has which parts, how long blocks are, and in which order they lie: nothing of it shows."""
    layer = Layer(4, 2, width, cap=cap, window=window, chunk=chunk, format=cache_format)
    spans = [rows_at(layer, at, 1, at) for at in (0, 127, 128, 256, 699)]
    results = [
        Step(layer, spans, tokens, seed).run(in_parts=in_parts)
        for seed, (tokens, in_parts) in enumerate(((32, False), (32, True), (7, True), (700, False)))
    ]
    results += [Step(layer, spans, 32).run(in_parts=in_parts, apart=True) for in_parts in (False, True)]
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    for row, span in enumerate(spans):
        assert np.abs(results[0][row] - attended(layer, span)[0]).max() < 2e-5 * np.abs(span.values).max()


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (1, 4), (1, 7), (1, 8), (1, 20), (1, 40)]))
    reach = draw(st.sampled_from([(0, 0), (0, 0), (9, 0), (40, 0), (0, 32), (0, 50)]))
    sinks = draw(st.sampled_from([None, np.linspace(-1, 2, kv_heads * group, dtype=np.float32)]))
    return Layer(
        heads=kv_heads * group,
        kv_heads=kv_heads,
        width=draw(st.sampled_from([10, 64, 96, 200, 260])),
        cap=draw(st.sampled_from([0.0, 2.0])),
        window=reach[0],
        chunk=reach[1],
        format=draw(st.sampled_from(CACHE_FORMATS)),
        sinks=sinks,
    )


@given(
    layers(),
    st.lists(
        st.tuples(st.integers(0, 90) | st.integers(PART - 20, PART + 20), st.integers(1, 15)), min_size=1, max_size=3
    ),
    st.lists(st.integers(1, 14), max_size=3),
    st.integers(0, 9),
)
@example(Layer(4, 1, 64, window=30), [(PART - 10, 20)], [3], 0)  # rows of a block do not all see the same parts
@example(Layer(1, 1, 64, chunk=50), [(30, 40)], [], 0)
@example(Layer(2, 1, 64), [(2 * PART - 3, 6), (5, 1), (0, 17)], [], 0)
def test_a_row_has_the_same_bits_in_any_company(
    layer: Layer, places: list[tuple[int, int]], cuts: list[int], seed: int
) -> None:
    """Alone, with all rows of its sequence in the step, with those of others, wherever a span is cut in steps, and
    whether or not parts have blocks of their own."""
    spans = [rows_at(layer, first, count, seed + index) for index, (first, count) in enumerate(places)]
    together = Step(layer, spans, 16, seed).run()
    assert np.abs(together[: places[0][1]] - attended(layer, spans[0])).max() < 1e-4
    assert Step(layer, spans, 5, seed + 1).run(in_parts=True).tobytes() == together.tobytes()
    alone = [Step(layer, [span.some(at, at + 1)]).run() for span in spans for at in range(len(span.queries))]
    assert np.concatenate(alone).tobytes() == together.tobytes()
    for in_parts in (False, True):
        assert Step(layer, spans, 16, seed).run(in_parts=in_parts, apart=True).tobytes() == together.tobytes()
    ends = sorted({0, *(cut for cut in cuts if cut < places[0][1]), places[0][1]})
    for stride in (1, layer.tiles.rows):
        cut = [Step(layer, [spans[0].some(*ends_)]).run(stride=stride) for ends_ in pairwise(ends)]
        assert np.concatenate(cut).tobytes() == together[: places[0][1]].tobytes()


@given(st.lists(st.integers(1, 64), min_size=1, max_size=40), st.integers(64, 2000))
def test_rows_attend_together_as_far_as_there_is_room(parts: list[int], room: int) -> None:
    together = rows_that_attend_together(parts, room)
    assert [row for rows, _ in together for row in range(rows.start, rows.stop)] == [*range(len(parts))]
    for rows, most in together:
        assert max(parts[rows]) == most
        assert most * (rows.stop - rows.start) <= room
    for (rows, most), (after, _) in pairwise(together):
        assert max(most, parts[after.start]) * (rows.stop + 1 - rows.start) > room


@given(st.integers(1, 9999), st.sampled_from([0, 1, 2, 150, 256, 4096]), st.sampled_from([(1, 1), (32, 4), (24, 8)]))
def test_no_block_has_more_parts_than_its_launch_is_for(stop: int, window: int, heads: tuple[int, int]) -> None:
    tiles = Tiles.of(*heads, 64)
    first = max(0, stop - tiles.rows)
    start = max(0, first + 1 - window) if window else 0
    assert (stop - 1) // PART - start // PART + 1 <= tiles.most_parts(stop, window) <= -(-stop // PART)
