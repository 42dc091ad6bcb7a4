"""Our own choice of positions against NumPy, and attention to what is chosen against attention to nothing else: every
level and pool, any blocks, and rows in any company."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.plugins.native.attention import FORMATS, LayerBlocks, SpanRows, Spans, bind_attention
from motley.plugins.native.choosing import bind_choice
from tests.plugins.native.native_levels import assert_same, at_all_levels, normal
from tests.plugins.native.test_attention import POOLS, Format

I64 = npt.NDArray[np.int64]
NOTHING = np.zeros((400, 0), np.float32)
"""A table of no angles."""


def whole_numbers(random: np.random.Generator, *shape: int) -> npt.NDArray[np.float32]:
    """So small that what is made of them is exact, and several scores are equal."""
    return random.integers(-2, 3, shape).astype(np.float32)


def blocks_of(rows: npt.NDArray[np.float32], tokens: int, format: Format) -> tuple[LayerBlocks, npt.NDArray[np.int32]]:
    """The blocks of a sequence's rows f32[C, d], in another order, and which these are."""
    count = -(-len(rows) // tokens)
    table = np.random.default_rng(len(rows)).permutation(count).astype(np.int32)
    kept = np.full((count, 1, tokens, rows.shape[1]), 0, format)
    scales = np.full(kept.shape[:3], np.nan, np.float32) if format is np.int8 else None
    for position, row in enumerate(rows):
        at = table[position // tokens], 0, position % tokens
        most = np.abs(row).max()
        kept[at] = row if scales is None else np.rint(row * (np.float32(127) / most)) if most else 0
        if scales is not None:
            scales[at] = most / np.float32(127)
    return LayerBlocks(kept, kept, scales, scales), table


def best(scores: npt.NDArray[np.float32], blocks: int, block: int, latest: int) -> list[int]:
    """The positions of the best blocks of those that are scored, ascending, then -1."""
    starts = range(0, len(scores), block)
    of_blocks = np.array([scores[start : start + block].max() for start in starts])
    of_blocks[max(0, len(starts) - latest) :] = np.inf
    chosen = np.sort(np.argsort(-of_blocks, kind="stable")[:blocks]).tolist()
    positions = [at for number in chosen for at in range(len(scores))[number * block : (number + 1) * block]]
    return [*positions, *[-1] * (blocks * block - len(positions))]


@given(
    format=st.sampled_from(FORMATS),
    heads=st.integers(1, 20),
    size=st.sampled_from([4, 16, 40, 128]),
    blocks=st.sampled_from([1, 5, 130]),
    block=st.sampled_from([1, 3, 16]),
    latest=st.integers(0, 2),
    each_chooses=st.booleans(),
    tokens=st.sampled_from([1, 16, 48, 400]),
    ends=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 20)), min_size=1, max_size=3),
    threads=st.sampled_from([1, 3]),
)
def test_the_best_blocks_of_positions_are_chosen_the_earlier_of_equal_ones(
    format: Format,
    heads: int,
    size: int,
    blocks: int,
    block: int,
    latest: int,
    each_chooses: bool,
    tokens: int,
    ends: list[tuple[int, int]],
    threads: int,
) -> None:
    """Of several spans in a call, each of which ends at a position; by all heads together, or by each."""
    latest, count = min(latest, blocks), blocks * block
    random = np.random.default_rng([heads, size, blocks, tokens])
    spans, expected, given_rows, pools = Spans(len(ends), 1), [], [], []
    rows_of, tables = [min(end, rows) for end, rows in ends], []
    for (end, _), rows in zip(ends, rows_of, strict=True):
        keys = whole_numbers(random, end, size)
        keys[:, 0] = 127  # so that int8 is exact
        q, weights = whole_numbers(random, rows, heads * size), whole_numbers(random, rows, heads)
        own, table = blocks_of(keys, tokens, format)
        for row in range(rows):
            found = q[row].reshape(heads, size) @ keys[: end - rows + row + 1].T
            lists = found if each_chooses else weights[row][None] @ np.maximum(found, 0)
            expected.append([at for scores in lists for at in best(scores, blocks, block, latest)])
        given_rows.append((q, keys[end - rows :], weights))
        pools.append(own.keys)
        tables.append(table)
    firsts = np.cumsum([0, *map(len, pools)])[:-1]
    kept: Any = np.concatenate(pools)
    scales = np.full(kept.shape[:3], 1, np.float32) if format is np.int8 else None
    starts = [0, *accumulate(rows_of)]
    spans.set(
        [
            SpanRows(start, rows, end - rows, (table + first).astype(np.int32), [(NOTHING, NOTHING)])
            for start, rows, (end, _), table, first in zip(starts, rows_of, ends, tables, firsts, strict=False)
        ]
    )
    q, k, weights = (np.concatenate(parts) for parts in zip(*given_rows, strict=True))
    chosen = np.zeros((len(q), count * (heads if each_chooses else 1)), np.int64)
    layer = LayerBlocks(kept, kept, scales, scales)
    more = {"heads": heads, "turned": 0, "context": 300, "pool": POOLS[threads], "block": block, "latest": latest}
    by = None if each_chooses else weights
    choose = bind_choice(q, np.ascontiguousarray(k), by, layer, chosen, spans, 0, **more)

    def result() -> npt.NDArray[np.float32]:
        chosen[:] = 0
        choose()
        return chosen.astype(np.float32)

    at_all_levels(result)
    assert chosen.tolist() == expected


@given(
    format=st.sampled_from(FORMATS),
    size=st.sampled_from([4, 20, 64]),
    block=st.sampled_from([2, 5, 16]),
    tokens=st.sampled_from([1, 16, 24]),
    cuts=st.lists(st.integers(1, 149), max_size=4, unique=True).map(sorted),
    guessed=st.integers(0, 20),
)
def test_pooled_keys_do_not_depend_on_chunks_and_the_best_blocks_are_chosen(
    format: Format, size: int, block: int, tokens: int, cuts: list[int], guessed: int
) -> None:
    """Nor on guesses that were wrong before a chunk; and what follows the last whole block is seen besides."""
    random, end, heads, blocks = np.random.default_rng([size, block, tokens]), 150, 6, 2
    count = blocks * block + block - 1
    keys, q, weights = normal(random, end, 2 * size), normal(random, end, heads * size), normal(random, end, heads)
    pooling, table = normal(random, block, size), random.permutation(-(-end // tokens)).astype(np.int32)

    def chosen_in(cuts: list[int], guessed: int) -> tuple[I64, Any, Any]:
        kept: Any = np.zeros((len(table), 1, tokens, 2 * size), format)
        scales = np.ones(kept.shape[:3], np.float32) if format is np.int8 else None
        chosen = np.zeros((end, count), np.int64)

        def act(k: Any, own: I64, start: int) -> None:
            spans, rows = Spans(1, 1), slice(start, start + len(k))
            spans.set([SpanRows(0, len(k), start, table, [(NOTHING, NOTHING)])])
            layer = LayerBlocks(kept, kept, scales, scales)
            more = {"heads": heads, "turned": 0, "context": end, "pool": POOLS[2], "block": block, "pooling": pooling}
            bind_choice(q[rows], k, weights[rows], layer, own, spans, 0, **more)()

        for start, stop in pairwise([0, *cuts, end]):
            if wrong := min(guessed, end - start):
                act(-keys[start : start + wrong], np.zeros((wrong, count), np.int64), start)
            act(keys[start:stop], chosen[start:stop], start)
        return chosen, kept, scales

    chosen, kept, scales = at_first = chosen_in([], 0)
    at_all_levels(lambda: chosen_in([], 0)[0].astype(np.float32))
    for own, other in zip(at_first, chosen_in(cuts, guessed), strict=True):
        np.testing.assert_array_equal(own, other)
    positions = np.arange(end)
    rows = kept[table[positions // tokens], 0, positions % tokens].astype(float)
    if scales is not None:
        rows *= scales[table[positions // tokens], 0, positions % tokens][:, None]
    of_blocks, whole = rows[block - 1 :: block, :size], end // block * block
    apart = keys[:whole].reshape(-1, block, 2 * size).astype(float)
    odds = np.exp(apart[..., size:] + pooling)
    pooled = (odds * apart[..., :size]).sum(axis=1) / odds.sum(axis=1)
    np.testing.assert_allclose(of_blocks, pooled, atol={np.float32: 1e-5, np.float16: 4e-3, np.int8: 5e-2}[format])
    for row in range(end):
        seen = (row + 1) // block
        scores = weights[row] @ np.maximum(q[row].reshape(heads, size) @ of_blocks[:seen].T, 0)
        picked = np.sort(np.argsort(-scores, kind="stable")[:blocks])
        expected = [*(picked[:, None] * block + np.arange(block)).ravel(), *range(seen * block, row + 1)]
        assert chosen[row].tolist() == [*expected, *[-1] * (count - len(expected))]


@given(
    format=st.sampled_from(FORMATS),
    size=st.sampled_from([4, 20, 64]),
    turned=st.booleans(),
    block=st.sampled_from([2, 5, 16]),
    copies=st.sampled_from([1, 3]),
    tokens=st.sampled_from([1, 16, 24]),
    cuts=st.lists(st.integers(1, 149), max_size=4, unique=True).map(sorted),
    guessed=st.integers(0, 20),
)
def test_keys_that_are_means_do_not_depend_on_chunks_and_are_turned_as_their_first_positions(
    format: Format,
    size: int,
    turned: bool,
    block: int,
    copies: int,
    tokens: int,
    cuts: list[int],
    guessed: int,
) -> None:
    """Nor on guesses that were wrong before a chunk; all heads count alike, and each list is told as often as asked."""
    random, end, heads, blocks = np.random.default_rng([size, block, tokens]), 150, 6, 2
    count, half = blocks * block + block - 1, size // 4 if turned else 0
    keys, q, gain = normal(random, end, size), normal(random, end, heads * size), normal(random, size)
    table = random.permutation(-(-end // tokens)).astype(np.int32)
    angles = random.uniform(-3, 3, (end, half))
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def turn(rows: Any, at: Any) -> Any:
        one, other, rest = np.split(rows.astype(float), [half, 2 * half], axis=-1)
        cosines, sines = (each[at].astype(float) for each in tables)
        return np.concatenate([one * cosines - other * sines, other * cosines + one * sines, rest], axis=-1)

    def chosen_in(cuts: list[int], guessed: int) -> tuple[I64, Any, Any]:
        kept: Any = np.zeros((len(table), 1, tokens, size), format)
        scales = np.ones(kept.shape[:3], np.float32) if format is np.int8 else None
        chosen = np.zeros((end, copies * count), np.int64)

        def act(k: Any, own: I64, start: int) -> None:
            spans, rows = Spans(1, 1), slice(start, start + len(k))
            spans.set([SpanRows(0, len(k), start, table, [tables])])
            layer = LayerBlocks(kept, kept, scales, scales)
            more = {"heads": heads, "turned": half, "context": end, "pool": POOLS[2], "block": block, "copies": copies}
            bind_choice(q[rows], k, None, layer, own, spans, 0, gain=gain, epsilon=1e-3, **more)()

        for start, stop in pairwise([0, *cuts, end]):
            if wrong := min(guessed, end - start):
                act(-keys[start : start + wrong], np.zeros((wrong, copies * count), np.int64), start)
            act(keys[start:stop], chosen[start:stop], start)
        return chosen, kept, scales

    chosen, kept, scales = at_first = chosen_in([], 0)
    at_all_levels(lambda: chosen_in([], 0)[0].astype(np.float32))
    for own, other in zip(at_first, chosen_in(cuts, guessed), strict=True):
        np.testing.assert_array_equal(own, other)
    positions = np.arange(end)
    rows = kept[table[positions // tokens], 0, positions % tokens].astype(float)
    if scales is not None:
        rows *= scales[table[positions // tokens], 0, positions % tokens][:, None]
    near, whole = {np.float32: 1e-5, np.float16: 4e-3, np.int8: 5e-2}[format], end // block * block
    others = np.delete(positions, positions[block - 1 :: block])
    np.testing.assert_allclose(rows[others], keys[others], atol=near)
    of_blocks, starts = rows[block - 1 :: block], positions[:whole:block]
    means = keys[:whole].reshape(-1, block, size).astype(float).mean(axis=1)
    normed = means / np.sqrt(np.square(means).mean(axis=1, keepdims=True) + 1e-3) * gain
    np.testing.assert_allclose(of_blocks, turn(normed, starts), atol=12 * near)
    lists = chosen.reshape(end, copies, count)
    assert (lists == lists[:, :1]).all()
    for row in range(end):
        seen = (row + 1) // block
        queries = turn(q[row].reshape(heads, size), np.full(heads, row))
        scores = np.maximum(queries @ of_blocks[:seen].T, 0).sum(axis=0)
        picked = np.sort(np.argsort(-scores, kind="stable")[:blocks])
        expected = [*(picked[:, None] * block + np.arange(block)).ravel(), *range(seen * block, row + 1)]
        assert lists[row, 0].tolist() == [*expected, *[-1] * (count - len(expected))]


def attended(
    q: npt.NDArray[np.float32],
    rows: npt.NDArray[np.float32],
    tokens: int,
    format: Format,
    chosen: I64 | None = None,
    count: int = 1,
) -> npt.NDArray[np.float32]:
    """f32[M, H d]: the attention of the last `count` rows of a sequence f32[C, d] of keys that are values, each with
    the same queries f32[H d]."""
    blocks, table = blocks_of(rows, tokens, format)
    size, heads = rows.shape[1], q.size // rows.shape[1]
    qkv = np.concatenate([np.tile(q, (count, 1)), rows[len(rows) - count :]], axis=1)
    spans, y = Spans(1, 1), np.full((count, q.size), np.nan, np.float32)
    spans.set([SpanRows(0, count, len(rows) - count, table, [(NOTHING, NOTHING)])])
    bound: Any = {"heads": heads, "kv_heads": 1, "scale": size**-0.5, "window": 0, "context": 400, "turned": 0}
    bound |= {"key_scales": blocks.key_scales, "value_scales": blocks.key_scales, "chosen": chosen}
    bind_attention(qkv, blocks.keys, None, y, spans, 0, pool=POOLS[2], **bound)()
    return y


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("heads", "size", "choices", "tokens"), [(3, 40, 20, 16), (16, 576, 150, 48), (1, 24, 1, 1)])
def test_what_is_chosen_is_seen_as_if_there_were_nothing_else(
    format: Format, heads: int, size: int, choices: int, tokens: int
) -> None:
    """To the bit; and rows that see no more positions than are chosen see what they see where nothing is chosen."""
    random = np.random.default_rng([heads, size])
    q, rows, count = normal(random, heads * size), normal(random, 380, size), 30
    picked = [
        [*np.sort(random.permutation(380 - count + row)[: choices - 1]).tolist(), 380 - count + row]
        for row in range(count)
    ]
    got = at_all_levels(lambda: attended(q, rows, tokens, format, np.array(picked), count))
    for row, own in zip(got, picked, strict=True):
        assert_same(row, attended(q, rows[own], 32, format)[0])
    short = rows[:choices]
    unused = np.full((len(short), choices), -1)
    expected = attended(q, short, tokens, format, count=len(short))
    assert_same(attended(q, short, tokens, format, unused, len(short)), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_each_kv_head_sees_what_is_chosen_for_it(format: Format) -> None:
    """As many as there are before -1, as if the others were not there; keys and values apart."""
    random = np.random.default_rng(5)
    kv_heads, group, size, choices, position = 2, 3, 40, 150, 379
    rows = normal(random, kv_heads, position + 1, size)
    q, lists = normal(random, kv_heads * group * size), np.full((kv_heads, choices), -1)
    for own, count in zip(lists, (130, 150), strict=True):
        own[:count] = np.sort(random.permutation(position + 1)[:count])
    of_heads = [blocks_of(each, 16, format) for each in rows]
    table = of_heads[0][1]
    kept: Any = [np.concatenate([own.keys for own, _ in of_heads], axis=1), np.ones((len(table), kv_heads, 16), "f4")]
    if format is np.int8:
        kept[1] = np.concatenate([own.key_scales for own, _ in of_heads], axis=1)
    values = [each[:, ::-1].copy() for each in kept]  # the other head's, but for what the row writes itself
    for own, other in zip(values, kept, strict=True):
        own[table[position // 16], :, position % 16] = other[table[position // 16], :, position % 16]
    qkv = np.concatenate([q, *[rows[:, -1].ravel()] * 2])[None]
    bound: Any = {"scale": size**-0.5, "window": 0, "context": 400, "turned": 0, "pool": POOLS[2]}
    if format is np.int8:
        bound |= {"key_scales": kept[1], "value_scales": values[1]}

    def see(chosen: I64) -> npt.NDArray[np.float32]:
        spans, y = Spans(1, 1), np.full((1, q.size), np.nan, np.float32)
        spans.set([SpanRows(0, 1, position, table, [(NOTHING, NOTHING)])])
        more = bound | {"heads": kv_heads * group, "kv_heads": kv_heads, "chosen": chosen.reshape(1, -1)}
        bind_attention(qkv, kept[0], values[0], y, spans, 0, **more)()
        return y

    got = at_all_levels(lambda: see(lists)).reshape(kv_heads, -1)
    for head, own in enumerate(lists):
        seen = own[own >= 0]
        assert_same(got[head], see(np.tile(seen, (kv_heads, 1))).reshape(kv_heads, -1)[head])
        at = table[seen // 16], head, seen % 16
        keys, numbers = (numbers[at] * scales[at][:, None].astype(float) for numbers, scales in (kept, values))
        odds = np.exp(q.reshape(kv_heads, group, size)[head] @ keys.T * size**-0.5)
        np.testing.assert_allclose(got[head], (odds @ numbers / odds.sum(axis=1, keepdims=True)).ravel(), atol=1e-5)


@pytest.mark.parametrize("picked", [[1, 1, 3], [2, 1, 3], [-1, 1, 3], [1, 2, 10], [1, -1, 3], [1, 2, -2], [-1, -1, -1]])
def test_a_choice_that_cannot_be_is_refused(picked: list[int]) -> None:
    rows = normal(np.random.default_rng(0), 10, 8)
    with pytest.raises(IndexError, match="3 positions are chosen"):
        attended(rows[0], rows, 16, np.float32, np.array([picked]))
