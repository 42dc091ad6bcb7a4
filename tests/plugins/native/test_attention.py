"""Our own attention against float64, and against itself: every level and pool, any blocks, and a row beside any others
give the same bits, whatever keys and values are cached as."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.plugins.native.attention import (
    FORMATS,
    I32,
    Attending,
    Cached,
    LayerBlocks,
    SpanRows,
    Spans,
    bind_attention,
)
from motley.plugins.native.library import F32
from motley.plugins.native.matmul import Pool
from tests.plugins.native.native_levels import LEVELS, assert_same, at_all_levels, normal, set_level

F64 = np.ndarray[Any, np.dtype[np.float64]]
Format = type[np.float32] | type[np.float16] | type[np.int8]

HALF_ULP = 2.0**-24
POOLS = {threads: Pool(threads) for threads in (1, 2, 3)}


def encode(heads: F32, format: Format) -> tuple[Cached, F32]:
    """Heads [..., d] in what they are cached as, and the scale [...] of each, 1 if the format has none."""
    with np.errstate(all="ignore"):
        if format is not np.int8:
            return heads.astype(format), np.ones(heads.shape[:-1], np.float32)
        most = np.abs(heads).max(-1)
        codes = np.rint(heads * (np.float32(127) / most)[..., None])
        scales = np.where(np.isfinite(most), np.where(most < 2.0**-100, 0, most / np.float32(127)), np.nan)
    return np.where((scales > 0)[..., None], codes, 0).astype(np.int8), scales.astype(np.float32)


def decode(numbers: Cached, scales: F32) -> F64:
    return numbers.astype(np.float64) * scales[..., None]


@dataclass(frozen=True)
class Case:
    """Consecutive tokens of one sequence, and what is cached before them: keys and values f32[kv_heads, C, d], which
    are rounded to the format."""

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
    format: Format = np.float32
    chunked: bool = False
    gains: tuple[F32, F32] | None = None
    warmth: F32 | None = None

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
        format: Format = np.float32,
    ) -> Case:
        random = np.random.default_rng([kv_heads, group, size, capacity, position])
        angles = random.uniform(0, 7, (capacity, turned))
        return cls(
            normal(random, rows, (group + 2) * kv_heads * size),
            normal(random, kv_heads, capacity, size),
            normal(random, kv_heads, capacity, size),
            np.cos(angles).astype(np.float32),
            np.sin(angles).astype(np.float32),
            position,
            group * kv_heads,
            window,
            format=format,
        )

    @property
    def kv_heads(self) -> int:
        return len(self.keys)

    @property
    def capacity(self) -> int:
        return self.keys.shape[1]

    @property
    def size(self) -> int:
        return self.keys.shape[2]

    @property
    def places(self) -> slice:
        """Where the tokens stand."""
        return slice(self.position, self.position + len(self.qkv))

    def result(self, threads: int = 1, tokens: int = 0) -> F32:
        """Alone, in blocks of so many positions; 0: in one block."""
        return attend(Blocks.of([self], tokens or self.capacity), threads)

    def split(self) -> tuple[F64, F64, F64]:
        """f64[H, M, d] of the tokens' queries, keys and values, turned."""
        rows = self.qkv.astype(np.float64).reshape(len(self.qkv), -1, self.size).transpose(1, 0, 2)
        half = self.cos.shape[1]
        a, b, others = np.split(rows[: -self.kv_heads], [half, 2 * half], axis=2)
        cos, sin = self.cos[self.places].astype(np.float64), self.sin[self.places].astype(np.float64)
        turned = np.concatenate([a * cos - b * sin, b * cos + a * sin, others], axis=2)
        queries, keys = turned[: self.heads], turned[self.heads :]
        if self.gains is not None:
            queries, keys = queries * self.gains[0], keys * self.gains[1]
        if self.warmth is not None:
            queries = queries * self.warmth[self.places, None]
        return queries, keys, rows[-self.kv_heads :]

    def exact(self, keys: F64, values: F64) -> F64:
        """f64[M, H * d], of keys and values f64[kv_heads, C, d] as they are cached, the tokens' own among them."""
        queries, _, _ = self.split()
        return np.stack([self._seen(queries[:, row], keys, values, row) for row in range(len(self.qkv))])

    def _seen(self, queries: F64, keys: F64, values: F64, row: int) -> F64:
        """f64[H * d]: what one token sees."""
        position = self.position + row
        first = max(0, position - self.window + 1) if self.window else 0
        seen = slice(position // self.window * self.window if self.chunked else first, position + 1)
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

    def bound(self, keys: F64, values: F64) -> float:
        """Of the values: twice what a score's sum by 16 lanes is off by, and a stretch's sum of 128 positions."""
        queries, _, _ = self.split()
        grouped = np.abs(queries).reshape(self.kv_heads, -1, queries.shape[2])
        largest = self.scale * (grouped @ np.abs(keys).transpose(0, 2, 1)).max()
        return float(HALF_ULP * ((self.size / 16 + 12) * 2 * largest + 170) * np.abs(values).max())

    def cached(self) -> tuple[F64, F64]:
        """Keys and values f64[kv_heads, C, d] as they are cached once the tokens' own are."""
        blocks = Blocks.of([self], self.capacity)
        attend(blocks)
        return blocks.cached(0)

    def check(self, y: F32, tolerance: float = 0.0) -> None:
        """Against float64; the tolerance is of the largest value."""
        cached = self.cached()
        largest = float(np.abs(cached[1]).max())
        assert np.abs(y - self.exact(*cached)).max() <= self.bound(*cached) + tolerance * largest


@dataclass(frozen=True)
class Blocks:
    """Some cases, alike but for their sequences, with what each has cached in blocks [N, kv_heads, tokens, d].

    What is in no case's cache is not a number, or has a scale that is none, so that reading it would show.
    """

    cases: Sequence[Case]
    keys: Cached
    key_scales: F32
    values: Cached
    value_scales: F32
    numbers: Sequence[I32]
    """The blocks of each case."""
    near: int = 2**31
    """From this number on, blocks are far."""

    @property
    def caches(self) -> tuple[Any, ...]:
        """All that a call may write to, but for its results."""
        return self.keys, self.key_scales, self.values, self.value_scales

    @classmethod
    def of(cls, cases: Sequence[Case], tokens: int, order: int = 0) -> Blocks:
        """Cut what is cached in blocks, which are numbered in an order drawn by `order`; two blocks are nobody's."""
        counts = [-(-case.capacity // tokens) for case in cases]
        numbers = np.random.default_rng(order).permutation(sum(counts) + 2).astype(np.int32)
        of_case = [numbers[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]
        format, shape = cases[0].format, (len(numbers), cases[0].kv_heads, tokens)
        caches: list[Any] = []
        for name in ("keys", "values"):
            cache = np.full((*shape, cases[0].size), 99 if format is np.int8 else np.nan, format)
            scales = np.full(shape, np.nan, np.float32)
            for case, own in zip(cases, of_case, strict=True):
                for start, block in zip(range(0, case.capacity, tokens), own, strict=True):
                    part = getattr(case, name)[:, start : start + tokens]
                    place = block, slice(None), slice(part.shape[1])
                    cache[place], scales[place] = encode(part, format)
            caches += cache, scales
        return cls(cases, *caches, of_case)

    def cached(self, n: int) -> tuple[F64, F64]:
        """Keys and values f64[kv_heads, C, d] of one case, as they are now."""
        keys, key_scales, values, value_scales = (
            np.concatenate(list(cache[self.numbers[n]]), axis=1)[:, : self.cases[n].capacity] for cache in self.caches
        )
        return decode(keys, key_scales), decode(values, value_scales)

    def spans(self) -> list[SpanRows]:
        ends = list(accumulate(len(case.qkv) for case in self.cases))
        return [
            SpanRows(end - len(case.qkv), len(case.qkv), case.position, numbers, ((case.cos, case.sin),))
            for case, end, numbers in zip(self.cases, ends, self.numbers, strict=True)
        ]

    def with_far(self) -> Blocks:
        """The same of one case, where all blocks are far that its rows do not go to; they have the last numbers."""
        read = self.numbers[0][: self.cases[0].position // self.keys.shape[2]]
        near = np.setdiff1d(np.arange(len(self.keys)), read)
        order = np.concatenate([near, read])
        caches = (np.ascontiguousarray(cache[order]) for cache in self.caches)
        return Blocks(self.cases, *caches, [np.argsort(order)[self.numbers[0]].astype(np.int32)], len(near))

    def bind(
        self, qkv: F32, y: F32, spans: Spans, threads: int = 1, await_told: Callable[[], None] | None = None
    ) -> Attending:
        case = self.cases[0]
        near, far = slice(self.near), slice(self.near, None)
        arrays: list[Any] = [self.keys, self.values]
        arrays += [self.key_scales, self.value_scales] if case.format is np.int8 else [None, None]
        keys, values, key_scales, value_scales = (each if each is None else each[near] for each in arrays)
        beyond = LayerBlocks(*(each if each is None else each[far] for each in arrays))
        return bind_attention(
            qkv,
            keys,
            values,
            y,
            spans,
            0,
            heads=case.heads,
            kv_heads=case.kv_heads,
            scale=case.scale,
            window=case.window,
            context=max(case.capacity for case in self.cases),
            turned=case.cos.shape[1],
            pool=POOLS[threads],
            soft_cap=case.soft_cap,
            sinks=case.sinks,
            key_scales=key_scales,
            value_scales=value_scales,
            far=beyond if len(beyond.keys) else None,
            await_told=await_told,
            chunked=case.chunked,
            gains=case.gains,
            warmth=case.warmth,
        )


def attend(blocks: Blocks, threads: int = 1) -> F32:
    """All cases in one call, on these blocks."""
    qkv = np.concatenate([case.qkv for case in blocks.cases])
    y = np.full((len(qkv), blocks.cases[0].heads * blocks.cases[0].size), np.nan, np.float32)
    spans = Spans(len(blocks.cases), 1)
    spans.set(blocks.spans())
    blocks.bind(qkv, y, spans, threads)()
    return y


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
        format=draw(st.sampled_from(FORMATS)),
    )


@st.composite
def alike(draw: st.DrawFn, case: Case) -> Case:
    """Another sequence's tokens for the same layer."""
    capacity = draw(st.integers(1, 300))
    position = draw(st.integers(0, capacity - 1))
    other = Case.random(
        case.kv_heads,
        case.heads // case.kv_heads,
        case.size,
        capacity,
        position,
        case.cos.shape[1],
        case.window,
        draw(st.just(1) | st.integers(1, min(20, capacity - position))),
        case.format,
    )
    return replace(other, soft_cap=case.soft_cap, sinks=case.sinks)


block_sizes = st.sampled_from((1, 2, 16, 32, 33, 64, 100, 128, 150, 256, 400)) | st.integers(1, 140)


@given(case=cases())
def test_attention(case: Case) -> None:
    case.check(at_all_levels(case.result))


@given(case=cases(), cap=st.sampled_from((0.0, 0.5, 30.0)), size=st.sampled_from((0.0, 1.0, 8.0)), tokens=block_sizes)
def test_attention_with_a_soft_cap_and_sinks(case: Case, cap: float, size: float, tokens: int) -> None:
    sinks = normal(np.random.default_rng(case.heads), case.heads) * np.float32(size) if size else None
    changed = replace(case, soft_cap=cap, sinks=sinks)
    changed.check(at_all_levels(lambda: changed.result(tokens=tokens)), tolerance=16 * HALF_ULP * cap)


@given(case=cases(), tokens=block_sizes, chunk=st.integers(1, 300), gains=st.booleans(), warm=st.booleans())
def test_attention_in_chunks_with_gains_and_queries_that_grow(
    case: Case, tokens: int, chunk: int, gains: bool, warm: bool
) -> None:
    random = np.random.default_rng(chunk)
    queries, keys = (random.uniform(0.5, 1.5, case.size).astype(np.float32) for _ in "qk")
    changed = replace(
        case,
        window=chunk,
        chunked=True,
        gains=(queries, keys) if gains else None,
        warmth=np.log(np.arange(3.0, 3 + case.capacity)).astype(np.float32) if warm else None,
    )
    changed.check(at_all_levels(lambda: changed.result(tokens=tokens)))


@given(case=cases(), tokens=block_sizes)
def test_keys_may_be_the_values_too(case: Case, tokens: int) -> None:
    """Then there are no values in a row or in a cache, and results have the bits that equal values give."""
    width = (case.heads + case.kv_heads) * case.size
    alone = np.ascontiguousarray(case.qkv[:, :width])
    qkv = np.concatenate([alone, alone[:, case.heads * case.size :]], axis=1)
    unturned = case.cos[:, :0]
    both = Blocks.of([replace(case, qkv=qkv, values=case.keys, cos=unturned, sin=unturned)], tokens)
    expected = attend(both)
    keys = Blocks.of(both.cases, tokens)
    spans, y = Spans(1, 1), np.full_like(expected, np.nan)
    spans.set(keys.spans())
    bind_attention(
        alone,
        keys.keys,
        None,
        y,
        spans,
        0,
        heads=case.heads,
        kv_heads=case.kv_heads,
        scale=case.scale,
        window=case.window,
        context=case.capacity,
        turned=0,
        pool=POOLS[1],
        key_scales=keys.key_scales if case.format is np.int8 else None,
    )()
    assert_same(y, expected)
    np.testing.assert_array_equal(keys.keys, both.keys)


@given(case=cases(), tokens=block_sizes, order=st.integers(0, 99), level=st.sampled_from(LEVELS))
def test_blocks_do_not_change_bits(case: Case, tokens: int, order: int, level: str) -> None:
    """Of any size, in any order, near or far."""
    set_level(level)
    blocks = Blocks.of([case], tokens, order)
    assert_same(attend(blocks.with_far()), case.result())
    assert_same(attend(blocks), case.result())


@given(case=cases(), tokens=block_sizes, level=st.sampled_from(LEVELS), data=st.data())
def test_rows_get_together_what_each_gets_alone(case: Case, tokens: int, level: str, data: st.DataObject) -> None:
    """However they are cut into chunks, to the bit."""
    set_level(level)
    cuts = data.draw(st.sets(st.integers(1, len(case.qkv) - 1))) if len(case.qkv) > 1 else set[int]()
    apart, pieces = Blocks.of([case], tokens), []
    for start, stop in pairwise([0, *sorted(cuts), len(case.qkv)]):
        chunk = replace(case, qkv=np.ascontiguousarray(case.qkv[start:stop]), position=case.position + start)
        pieces.append(attend(replace(apart, cases=[chunk])))
    assert_same(np.concatenate(pieces), case.result())


@given(
    case=cases(),
    tokens=block_sizes,
    level=st.sampled_from(LEVELS),
    threads=st.sampled_from(sorted(POOLS)),
    data=st.data(),
)
def test_spans_get_together_what_each_gets_alone(
    case: Case, tokens: int, level: str, threads: int, data: st.DataObject
) -> None:
    set_level(level)
    together = [case, *data.draw(st.lists(alike(case), max_size=4))]
    assert_same(
        attend(Blocks.of(together, tokens, len(case.qkv)), threads),
        np.concatenate([one.result() for one in together]),
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("window", [pytest.param(0, marks=pytest.mark.soak), 700])
def test_more_spans_than_there_is_scratch_for(level: str, window: int) -> None:
    """They are computed in several goes, of which each is enough for threads, and some are of many spans."""
    set_level(level)
    together = [
        Case.random(2, 8, 64, 1200, 1100 - 9 * n, turned=32, window=window, rows=rows)
        for n, rows in enumerate([1] * 40 + [33, 1, 20, 1, 1, 16, 15] + [1] * 70)
    ]
    apart = np.concatenate([case.result() for case in together])
    for threads in POOLS:
        assert_same(attend(Blocks.of(together, 32), threads), apart)


@given(case=cases(), tokens=block_sizes, level=st.sampled_from(LEVELS), data=st.data())
def test_only_the_tokens_are_written_to_the_blocks(case: Case, tokens: int, level: str, data: st.DataObject) -> None:
    """Keys, once they are turned, and values are rounded to what is nearest."""
    set_level(level)
    together = [case, *data.draw(st.lists(alike(case), max_size=2))]
    blocks = Blocks.of(together, tokens)
    before = [cache.copy() for cache in blocks.caches]
    attend(blocks)
    for n, one in enumerate(together):
        _, key, value = one.split()
        keys, values = blocks.cached(n)
        np.testing.assert_array_equal(values[:, one.places], decode(*encode(value.astype(np.float32), one.format)))
        off = 4 * HALF_ULP * np.abs(one.qkv).max()
        if one.format is np.float16:
            off += 2.0**-11 * np.abs(key) + 2.0**-25
        elif one.format is np.int8:
            off += np.abs(key).max(-1, keepdims=True) / 253.9
        assert (np.abs(keys[:, one.places] - key) <= off).all()
        for at in range(one.position, one.places.stop):
            for cache, was in zip(blocks.caches, before, strict=True):
                place = blocks.numbers[n][at // tokens], slice(None), at % tokens
                was[place] = cache[place]
    for cache, was in zip(blocks.caches, before, strict=True):
        assert cache.tobytes() == was.tobytes()


@pytest.mark.parametrize(("kv_heads", "group", "size"), [(1, 1, 128), (2, 4, 64), (3, 8, 40), (1, 20, 64)])
@pytest.mark.parametrize("window", [0, 4000])
@pytest.mark.parametrize("format", FORMATS)
def test_threads_do_not_change_bits_of_long_contexts(
    kv_heads: int, group: int, size: int, window: int, format: Format
) -> None:
    case = Case.random(kv_heads, group, size, 5000, 4900, turned=size // 2, window=window, format=format)
    set_level(LEVELS[-1])
    expected = case.result()
    case.check(expected)
    for level in LEVELS[1:]:
        set_level(level)
        for threads in POOLS:
            assert_same(case.result(threads, tokens=32), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_spans_are_read_by_every_call(level: str) -> None:
    case = Case.random(2, 4, 16, 200, 0, turned=8)
    set_level(level)
    y, spans, blocks = np.empty((1, 128), np.float32), Spans(2, 1), Blocks.of([case], 32)
    call = blocks.bind(case.qkv, y, spans)
    (span,) = blocks.spans()
    call()  # there are none
    for at in (0, 1, 150, 199):
        expected = attend(replace(blocks, cases=[replace(case, position=at)]))
        spans.set([span._replace(position=at)])
        call()
        assert_same(y, expected)


MISFITS: list[tuple[str, dict[str, Any]]] = [
    ("positions 200 to 201 of at most 200", {"position": 200}),
    ("positions -1 to 0", {"position": -1}),
    ("positions 199 to 201 of at most 200", {"position": 199, "rows": 2}),
    ("rows 3 to 4 of 3", {"row": 3}),
    ("rows -1 to 0 of 3", {"row": -1}),
    ("rows 1 to 4 of 3", {"row": 1, "rows": 3}),
    ("rows 9223372036854775807 to", {"row": 2**63 - 1}),
    ("it has 4 blocks of 32", {"position": 128, "blocks": np.zeros(4, np.int32)}),
    ("it has 0 blocks", {"blocks": np.zeros(0, np.int32)}),
    ("whose numbers must be below 9", {"position": 40, "blocks": np.array([0, 9], np.int32)}),
    ("whose numbers must be below 9", {"position": 40, "blocks": np.array([-1, 0], np.int32)}),
    (r"tables f32\[40, 8\]", {"position": 40, "tables": ((np.ones((40, 8), np.float32),) * 2,)}),
    (r"tables f32\[200, 7\] of 8 angles each", {"tables": ((np.ones((200, 7), np.float32),) * 2,)}),
]


@pytest.mark.parametrize(("message", "changed"), MISFITS)
def test_spans_that_do_not_fit_write_nothing(message: str, changed: dict[str, Any]) -> None:
    case = Case.random(2, 4, 16, 200, 7, turned=8, rows=3)
    y, spans, blocks = np.full((3, 128), 7, np.float32), Spans(2, 1), Blocks.of([case], 32)
    before = [cache.copy() for cache in blocks.caches]
    call = blocks.bind(case.qkv, y, spans)
    (fits,) = blocks.spans()
    fits = fits._replace(rows=1)
    spans.set([fits, fits._replace(**changed)])
    with pytest.raises(IndexError, match=f"^span 1 .*{message}"):
        call()
    assert (y == 7).all()
    for cache, was in zip(blocks.caches, before, strict=True):
        assert_same(cache, was)
    spans.set([fits])
    call()
    assert_same(y[:1], replace(case, qkv=case.qkv[:1]).result())
    assert (y[1:] == 7).all()


def test_far_blocks_are_not_written_to() -> None:
    case = Case.random(2, 4, 16, 200, 70, turned=8, rows=3)
    blocks = Blocks.of([case], 32).with_far()
    y, spans = np.full((3, 128), 7, np.float32), Spans(1, 1)
    call = blocks.bind(case.qkv, y, spans)
    (span,) = blocks.spans()
    spans.set([span._replace(position=60)])
    with pytest.raises(IndexError, match="whose numbers must be below 9, those of its rows below 7"):
        call()
    assert (y == 7).all()
    spans.set([span])
    call()
    assert_same(y, case.result())


def test_blocks_before_the_window_may_be_gone() -> None:
    case = Case.random(2, 4, 16, 300, 290, turned=8, window=40, rows=3)
    blocks = Blocks.of([case], 32)
    expected = case.result()
    blocks.numbers[0][: (290 - 39) // 32] = -1
    assert_same(attend(blocks), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_one_position_gives_its_value(format: Format) -> None:
    case = Case.random(2, 3, 24, 4, 0, format=format)
    y = at_all_levels(case.result).reshape(6, 24)
    value = decode(*encode(case.qkv[0, -48:].reshape(2, 24), format))
    np.testing.assert_array_equal(y, value.astype(np.float32).repeat(3, axis=0))


@pytest.mark.parametrize("level", LEVELS)
def test_all_numbers_of_fp16(level: str) -> None:
    """Each, and floats all around it, is rounded and read as numpy does it."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = np.unique(halves[np.isfinite(halves)].astype(np.float32))
    between = (finite[1:].astype(np.float64) + finite[:-1]).astype(np.float32) / 2
    ends = np.array([65519, 65519.996, 65520, 7e4, 3e38, np.inf, 1e-45], np.float32)
    near = [np.nextafter(between, np.float32(side)) for side in (-np.inf, np.inf)]
    value = np.concatenate([finite, between, *near, ends, -ends])
    nothing = np.zeros((1, 1, value.size), np.float32)
    none = np.zeros((1, 0), np.float32)
    qkv = np.concatenate([np.zeros(2 * value.size, np.float32), value])[None]
    case = Case(qkv, nothing, nothing, none, none, 0, 1, format=np.float16)
    set_level(level)
    blocks = Blocks.of([case], 1)
    y = attend(blocks)
    with np.errstate(over="ignore"):
        expected = value.astype(np.float16)
    (block,) = blocks.numbers[0]
    assert blocks.values[block].tobytes() == expected.tobytes()
    np.testing.assert_array_equal(y[0], expected.astype(np.float32))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("part", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_does_not_vanish_in_int8(level: str, part: int, value: float) -> None:
    """Its head's results are not numbers."""
    case = Case.random(2, 3, 24, 40, 35, format=np.int8)
    set_level(level)
    finite = case.result().reshape(2, 72)
    case.qkv[0, (3 + part - 1) * 48 + 30] = value  # of the second head
    y = case.result().reshape(2, 72)
    assert_same(y[0], finite[0])
    assert np.isnan(y[1]).all()


@pytest.mark.parametrize("magnitude", [0.0, 2.0**-101, 2.0**-99, 1e38])
def test_int8_of_all_magnitudes(magnitude: float) -> None:
    """Numbers too small for an inverse are 0."""
    case = Case.random(2, 3, 24, 40, 0, format=np.int8)
    case.qkv[0, -24:] *= np.float32(magnitude) / np.abs(case.qkv[0, -24:]).max()
    y = at_all_levels(case.result).reshape(6, 24)
    value = decode(*encode(case.qkv[0, -48:].reshape(2, 24), np.int8)).astype(np.float32)
    np.testing.assert_array_equal(y, value.repeat(3, axis=0))
    assert (y[3:] == 0).all() == (magnitude < 2.0**-100)


def test_scores_of_all_magnitudes() -> None:
    """The largest is subtracted first, and stretches far below it count for nothing."""
    case = Case.random(1, 4, 8, 600, 599)
    case.keys[0, 300] *= 1e4
    for scale in (1e-30, 1e3, 1e30):
        scaled = replace(case, scale=scale)
        y = at_all_levels(scaled.result)
        assert np.isfinite(y).all()
        if scale != 1e3:
            np.testing.assert_allclose(y, scaled.exact(*scaled.cached()), atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cache", ["keys", "values"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", FORMATS[:2])
def test_what_is_not_finite_does_not_vanish(level: str, cache: str, value: float, format: Format) -> None:
    case = Case.random(2, 3, 24, 400, 350, format=format)
    set_level(level)
    finite = case.result()
    getattr(case, cache)[1, 200, 5] = value
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
@pytest.mark.parametrize("tokens", [32, 400])
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_seen_may_be_anything(level: str, tokens: int, format: Format) -> None:
    case = Case.random(2, 3, 24, 400, 350, turned=8, window=60, format=format)
    set_level(level)
    expected = case.result()
    for cache in (case.keys, case.values):
        cache[:, 351:] = np.nan
        cache[:, : 350 - 59] = np.inf
        cache[:, 350] = np.nan
    assert_same(case.result(tokens=tokens), expected)


BEYOND = """
import numpy as np
from motley.plugins.native.attention import FORMATS, SpanRows, Spans, bind_attention
from motley.plugins.native.matmul import Pool
from tests.plugins.native.native_levels import LEVELS, at_the_end, set_level

def ones(*shape, dtype=np.float32):
    return at_the_end(np.ones(shape, dtype))

pool = Pool(1)
for level in LEVELS:
    set_level(level)
    for size in (1, 3, 4, 8, 9, 15, 16, 17, 24, 33, 63):
        for turned in {0, size // 2}:
            for tokens, count in ((1, 1), (2, 1), (7, 1), (130, 1), (1, 3), (5, 30)):
                places = tokens * count
                blocks = at_the_end(np.arange(count, dtype=np.int32))
                spans, angles = Spans(1, 1), (ones(places, turned), ones(places, turned))
                spans.set([SpanRows(0, 1, places - 1, blocks, (angles,))])
                for dtype in FORMATS:
                    caches = [ones(count, 2, tokens, size, dtype=dtype) for _ in "kv"]
                    scales = [ones(count, 2, tokens) if dtype == np.int8 else None for _ in "kv"]
                    bind_attention(
                        ones(1, 10 * size), *caches, ones(1, 6 * size), spans, 0, heads=6, kv_heads=2, scale=1,
                        window=0, context=places, turned=turned, pool=pool, key_scales=scales[0],
                        value_scales=scales[1],
                    )()
print("done")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="pages are fenced by mprotect")
def test_nothing_is_touched_beyond_the_last_byte() -> None:
    root = Path(__file__).parents[3]
    ran = subprocess.run([sys.executable, "-c", BEYOND], capture_output=True, text=True, timeout=200, cwd=root)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("format", FORMATS)
def test_operands_may_lie_anywhere(level: str, format: Format) -> None:
    case = Case.random(2, 3, 24, 40, 30, turned=12, format=format)
    set_level(level)

    def moved(array: Any) -> Any:
        memory = np.zeros(array.size + 1, array.dtype)
        memory[1:] = array.ravel()
        return memory[1:].reshape(array.shape)

    blocks = Blocks.of([replace(case, cos=moved(case.cos), sin=moved(case.sin))], 8)
    names = ("keys", "key_scales", "values", "value_scales")
    blocks = replace(blocks, **{name: moved(getattr(blocks, name)) for name in names})
    y, spans = moved(np.empty((1, 144), np.float32)), Spans(1, 1)
    spans.set(blocks.spans())
    blocks.bind(moved(case.qkv), y, spans)()
    assert_same(y, case.result())


def ones(*shape: int, dtype: Any = np.float32, writeable: bool = True) -> Any:
    array = np.ones(shape, dtype)
    array.flags.writeable = writeable
    return array


def bind(**changed: Any) -> None:
    shapes = {"qkv": (1, 64), "keys": (3, 2, 9, 8), "values": (3, 2, 9, 8), "y": (1, 32)}
    numbers = {"rope": 0, "heads": 4, "kv_heads": 2, "scale": 1.0, "window": 0, "context": 20, "turned": 4}
    others = {"spans": Spans(1, 1), "pool": POOLS[1]}
    bind_attention(**{name: ones(*shape) for name, shape in shapes.items()} | numbers | others | changed)  # type: ignore[arg-type]


REFUSED: list[tuple[str, Any]] = [
    ("gains", (ones(7), ones(8))),
    ("gains", (ones(8), ones(7))),
    ("warmth", ones(19)),
    ("qkv", ones(1, 63)),
    ("qkv", ones(0, 64)),
    ("y", ones(2, 32)),
    ("y", ones(1, 64)),
    ("y", ones(1, 32, writeable=False)),
    ("keys", ones(2, 9, 8)),
    ("keys", ones(3, 1, 9, 8)),
    ("keys", ones(3, 2, 0, 8)),
    ("keys", ones(3, 2, 9, 0)),
    ("keys", ones(3, 2, 9, 8, writeable=False)),
    ("keys", ones(3, 2, 9, 8, dtype=np.float64)),
    ("values", ones(3, 2, 9, 8, dtype=np.float16)),
    ("key_scales", ones(3, 2, 9)),
    ("value_scales", ones(3, 2, 9)),
    ("values", ones(3, 2, 8, 8)),
    ("values", ones(3, 2, 9, 8, writeable=False)),
    ("values", ones(3, 2, 9, 16)[..., ::2]),
    ("sinks", ones(3)),
    ("heads", 3),
    ("heads", 0),
    ("window", -1),
    ("context", 0),
    ("context", 2**31),
    ("turned", 5),
    ("turned", -1),
    ("rope", 1),
    ("rope", -1),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str, value: Any) -> None:
    bind()
    with pytest.raises(ValueError, match=f"^{name} must"):
        bind(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("values", ones(3, 2, 9, 8)),
        ("key_scales", None),
        ("value_scales", None),
        ("key_scales", ones(3, 2, 8)),
        ("value_scales", ones(3, 2, 9, dtype=np.float16)),
        ("value_scales", ones(3, 2, 9, writeable=False)),
    ],
)
def test_scales_that_do_not_fit_are_refused_by_name(name: str, value: Any) -> None:
    caches = {name: ones(3, 2, 9, 8, dtype=np.int8) for name in ("keys", "values")}
    scales = {name: ones(3, 2, 9) for name in ("key_scales", "value_scales")}
    bind(**caches, **scales)
    with pytest.raises(ValueError, match=f"^{name} must"):
        bind(**caches | scales | {name: value})


REFUSED_SPANS: list[tuple[str, dict[str, Any]]] = [
    ("a span must have a row", {"rows": 0}),
    ("a span must have 1 tables", {"tables": ()}),
    ("a span must have 1 tables", {"tables": ((ones(5, 4), ones(5, 4)),) * 2}),
    ("cos must", {"tables": ((ones(5), ones(5)),)}),
    ("cos must", {"tables": ((ones(5, 4, dtype=np.float64), ones(5, 4)),)}),
    ("sin must", {"tables": ((ones(5, 4), ones(4, 4)),)}),
    ("blocks must", {"blocks": ones(3, dtype=np.int64)}),
    ("blocks must", {"blocks": ones(3, 1, dtype=np.int32)}),
    ("blocks must", {"blocks": ones(6, dtype=np.int32)[::2]}),
]


@pytest.mark.parametrize(("message", "changed"), REFUSED_SPANS)
def test_spans_that_are_none_are_refused(message: str, changed: dict[str, Any]) -> None:
    """Then there are no spans, and what fits is taken again."""
    case = Case.random(2, 4, 16, 200, 7, turned=8, rows=3)
    y, spans, blocks = np.full((3, 128), 7, np.float32), Spans(2, 1), Blocks.of([case], 32)
    call = blocks.bind(case.qkv, y, spans)
    (fits,) = blocks.spans()
    spans.set([fits])
    with pytest.raises(ValueError, match=f"^{message}"):
        spans.set([fits._replace(**changed)])
    call()
    assert (y == 7).all()
    spans.set([fits])
    call()
    assert_same(y, case.result())
    with pytest.raises(ValueError, match="at most 2 spans, not 3"):
        spans.set([fits] * 3)
