"""Stretches of a sequence that another machine has: whichever they are, the bits are those of having all here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.plugins.native.attention import FORMATS, I32, SIGHT, Away, Spans
from motley.plugins.native.library import F32
from motley.plugins.native.matmul import Pool
from motley.plugins.native.summaries import Layer, Summaries, summary_floats
from tests.plugins.native.native_levels import LEVELS, assert_same, normal, set_level
from tests.plugins.native.test_attention import Blocks, Case

THERE = {threads: Pool(threads) for threads in (1, 3)}
"""An attention that awaits what is told keeps its pool to itself."""


@st.composite
def long_cases(draw: st.DrawFn) -> Case:
    """Rows behind some whole stretches."""
    position = draw(st.integers(SIGHT, 4 * SIGHT + 9))
    rows = draw(st.just(1) | st.integers(1, 40))
    capacity = position + rows + draw(st.integers(0, 40))
    size = draw(st.sampled_from((8, 24, 64, 72)))
    case = Case.random(
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 9)),
        size=size,
        capacity=capacity,
        position=position,
        turned=size // 2,
        window=draw(st.just(0) | st.integers(1, capacity + 9)),
        rows=rows,
        format=draw(st.sampled_from(FORMATS)),
    )
    sinks = normal(np.random.default_rng(case.heads), case.heads) if draw(st.booleans()) else None
    return replace(case, sinks=sinks, soft_cap=draw(st.sampled_from((0.0, 5.0))))


def there(blocks: Blocks, numbers: I32, case: Case, threads: int = 1) -> Summaries:
    """What has only the blocks of these numbers; the others hold nothing that may be seen."""
    copies = [cache.copy() for cache in blocks.caches]
    others = np.setdiff1d(np.arange(len(blocks.keys)), numbers)
    for cache in copies:
        cache[others] = 99 if cache.dtype == np.int8 else np.nan
    keys, key_scales, values, value_scales = copies
    layer = Layer(case.heads, case.kv_heads, case.size, case.window, case.soft_cap, chunked=False)
    scaled = case.format is np.int8
    return Summaries(
        layer, keys, values, key_scales if scaled else None, value_scales if scaled else None, THERE[threads]
    )


def attend_apart(case: Case, stretches: I32, tokens: int, threads: int) -> F32:
    """The result of a case of which these stretches are elsewhere, in blocks of so many tokens."""
    blocks = Blocks.of([case], tokens)
    own = blocks.numbers[0]
    in_stretch = SIGHT // tokens
    away = (stretches[:, None] * in_stretch + np.arange(in_stretch, dtype=np.int32)).ravel()
    elsewhere = there(blocks, own[away], case, 3 if threads == 1 else 1)
    table_there = np.full(len(own), -1, np.int32)
    table_there[away] = own[away]
    for cache in blocks.caches:
        cache[own[away]] = 99 if cache.dtype == np.int8 else np.nan
    own[away] = -1

    rows = len(case.qkv)
    told = np.full(len(stretches) * rows * summary_floats(case.heads, case.size), np.nan, np.float32)
    spans = Spans(1, 1)
    (span,) = blocks.spans()
    spans.set([span._replace(away=Away(stretches, told))])
    queries = np.empty((rows, case.heads, case.size), np.float32)

    def tell() -> None:
        out = told.reshape(len(stretches), rows, case.heads, case.size + 2)
        elsewhere.answer(queries, case.position, table_there, stretches, out)

    y = np.full((rows, case.heads * case.size), np.nan, np.float32)
    attend = blocks.bind(case.qkv, y, spans, threads, tell)
    attend.queries(0, queries)
    attend()
    return y


@given(
    case=long_cases(),
    tokens=st.sampled_from((16, 32, 128)),
    level=st.sampled_from(LEVELS),
    threads=st.sampled_from(sorted(THERE)),
    data=st.data(),
)
def test_where_stretches_are_does_not_change_bits(
    case: Case, tokens: int, level: str, threads: int, data: st.DataObject
) -> None:
    set_level(level)
    chosen = data.draw(st.sets(st.integers(0, case.position // SIGHT - 1), min_size=1))
    stretches = np.array(sorted(chosen), np.int32)
    assert_same(attend_apart(case, stretches, tokens, threads), case.result())


def test_spans_with_and_without_stretches_elsewhere_share_a_call() -> None:
    far = Case.random(2, 4, 64, 600, 500, 32, rows=20)
    near = Case.random(2, 4, 64, 300, 290, 32, rows=1)
    blocks = Blocks.of([far, near], 32)
    own = blocks.numbers[0]
    stretches = np.array([0, 2], np.int32)
    answers = there(blocks, own, far)
    told = np.empty(2 * 20 * summary_floats(far.heads, far.size), np.float32)
    first, second = blocks.spans()
    spans = Spans(2, 1)
    spans.set([first._replace(away=Away(stretches, told)), second])
    queries = np.empty((20, far.heads, far.size), np.float32)
    y = np.empty((21, far.heads * far.size), np.float32)
    awaited = []

    def tell() -> None:
        awaited.append(1)
        answers.answer(queries, 500, own, stretches, told.reshape(2, 20, far.heads, far.size + 2))

    attend = blocks.bind(np.concatenate([far.qkv, near.qkv]), y, spans, 1, tell)
    attend.queries(0, queries)
    attend()
    assert_same(y, np.concatenate([far.result(), near.result()]))
    spans.set([first, second])  # nothing is elsewhere any more
    attend()
    assert_same(y, np.concatenate([far.result(), near.result()]))
    assert awaited == [1]


def test_many_stretches_are_answered_a_few_at_a_time() -> None:
    """More than scratch has room for."""
    case = Case.random(1, 8, 256, 128 * 130 + 16, 128 * 130, 128, rows=16)
    stretches = np.arange(130, dtype=np.int32)
    assert_same(attend_apart(case, stretches, 32, 2), case.result())


@pytest.mark.parametrize("stretches", [[3], [1, 0], [0, 0], [-1], [2]])
def test_a_question_that_makes_no_sense_is_refused(stretches: list[int]) -> None:
    """Of stretches that are not all before the rows, out of order, or without blocks."""
    case = Case.random(1, 2, 8, 400, 384)
    blocks = Blocks.of([case], 32)
    own = blocks.numbers[0]
    own[2 * 4] = len(blocks.keys)
    asked = np.array(stretches, np.int32)
    out = np.zeros((len(asked), 1, 2, 10), np.float32)
    with pytest.raises(IndexError, match="cannot be told to rows at position 384"):
        there(blocks, own[own < len(blocks.keys)], case).answer(np.zeros((1, 2, 8), np.float32), 384, own, asked, out)
    assert not out.any()


def test_a_span_with_stretches_elsewhere_that_it_does_not_have_is_refused() -> None:
    case = Case.random(1, 2, 8, 300, 200)
    spans = Spans(1, 1)
    blocks = Blocks.of([case], 32)
    (span,) = blocks.spans()
    spans.set([span._replace(away=Away(np.array([1], np.int32), np.zeros(20, np.float32)))])
    with pytest.raises(IndexError):
        blocks.bind(case.qkv, np.empty((1, 16), np.float32), spans)()
