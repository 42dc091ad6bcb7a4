"""The choice of positions without a GPU: what the kernels choose of whole numbers, of which several score alike."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from motley.plugins.cuda import kernels
from motley.plugins.cuda.nodes.choosing import SCORED
from motley.plugins.engine import CACHE_FORMATS
from tests.plugins.cuda.launching import launch_kernel
from tests.plugins.cuda.test_attention import integers, pointers
from tests.plugins.native.test_choosing import best
from tests.transport.cuda.host_driver import DEVICE as DEVICE_ADDRESSES


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize(
    ("heads", "width", "count", "block", "latest"),
    [(1, 8, 1, 1, 0), (5, 40, 7, 1, 0), (16, 128, 150, 1, 0), (3, 40, 21, 7, 0), (5, 16, 64, 16, 2)],
)
@pytest.mark.parametrize("each_chooses", [False, True])
def test_the_best_blocks_of_positions_are_chosen_the_earlier_of_equal_ones(
    cache_format: str, heads: int, width: int, count: int, block: int, latest: int, each_chooses: bool
) -> None:
    """By all heads together, or by each."""
    rng, tokens, capacity = np.random.default_rng(heads), 16, 320
    lists = heads if each_chooses else 1
    stands = [0, 3, count - 1, count, 130, 319]
    kept: Any = {"fp32": np.float32, "fp16": np.float16, "int8": np.int8}[cache_format]
    keys = rng.integers(-2, 3, (capacity // tokens, 1, tokens, width)).astype(kept)
    scales = np.full(keys.shape[:3], 0.5, np.float32) if cache_format == "int8" else None
    table = rng.permutation(capacity // tokens).astype(np.int32)
    q = rng.integers(-2, 3, (len(stands), heads * width)).astype(np.float32)
    weights = rng.integers(-2, 3, (len(stands), heads)).astype(np.float32)
    places = np.zeros(len(stands), kernels.PLACE)
    for row, position in enumerate(stands):
        places[row] = (DEVICE_ADDRESSES + table.ctypes.data, 0), 0, position, 0, 1, 1
    scores, room = np.full((len(stands), lists, capacity), np.nan, np.float32), capacity
    by = pointers(None if each_chooses else weights)
    given = [*pointers(q), *integers(q.shape[1]), *by, *integers(heads), *pointers(places, keys, scales)]
    given += [*integers(tokens), *pointers(scores), *integers(heads, width, width, each_chooses, count, room, 1)]
    launch_kernel(f"score_index_{cache_format}", len(stands) * -(-room // SCORED), given)
    found = [launched(scores[:, own], places, tokens, (own, lists), count, block, latest) for own in range(lists)]
    rows = (table[:, None] * tokens + np.arange(tokens)).ravel()
    for row, position in enumerate(stands):
        products = q[row].reshape(heads, width) @ keys.reshape(-1, width)[rows[: position + 1]].astype(np.float32).T
        scored = products if each_chooses else weights[row][None] @ np.maximum(products, 0)
        for own, (slots, chosen) in enumerate(found):
            seen = np.array(best(scored[own], count // block, block, latest))
            seen = seen[seen >= 0]
            at = (table[seen // tokens] * lists + own) * tokens + seen % tokens
            assert slots[row].tolist() == [*at, *[-1] * (count - len(at))]
            assert chosen[row]["position"] == len(at) - 1
            assert chosen[row]["blocks"].tolist() == [DEVICE_ADDRESSES + slots[row].ctypes.data] * 2
            assert (chosen[row]["before"], chosen[row]["after"]) == (0, 0)


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize(("width", "block"), [(8, 2), (40, 5), (128, 16)])
def test_the_best_blocks_by_pooled_keys_are_chosen_and_what_follows_them(
    cache_format: str, width: int, block: int
) -> None:
    rng, tokens, capacity, heads, blocks = np.random.default_rng(width), 24, 240, 3, 2
    stands, count = [0, block - 1, 3 * block - 1, 100, 4 * block + 1, 239], blocks * block + block - 1
    kept: Any = {"fp32": np.float32, "fp16": np.float16, "int8": np.int8}[cache_format]
    keys = (rng.standard_normal((capacity // tokens, 1, tokens, 2 * width)) * (40 if kept is np.int8 else 1)).astype(
        kept
    )
    scales = np.full(keys.shape[:3], 1 / 40, np.float32) if kept is np.int8 else None
    table, ends = rng.permutation(capacity // tokens).astype(np.int32), np.arange(block - 1, capacity, block)
    at = (table[:, None] * tokens + np.arange(tokens)).ravel()
    rows, pooling = (
        rng.standard_normal((capacity, 2 * width)).astype("f4"),
        rng.standard_normal((block, width)).astype("f4"),
    )
    places = np.zeros(capacity, kernels.PLACE)
    for row in range(capacity):
        places[row] = (DEVICE_ADDRESSES + table.ctypes.data, 0), 0, row, 0, 1, 1

    def stored() -> Any:
        of_all = keys.reshape(capacity, -1)[at].astype(float)
        return of_all if scales is None else of_all * scales.reshape(-1)[at][:, None]

    before = stored()
    before[ends] = rows[ends]  # their own are not rounded
    apart = before.reshape(-1, block, 2 * width)
    odds = np.exp(apart[..., width:] + pooling)
    expected = (odds * apart[..., :width]).sum(axis=1) / odds.sum(axis=1)
    given = [*pointers(rows), *integers(2 * width), *pointers(pooling, places, keys, scales)]
    launch_kernel(
        f"pool_index_{cache_format}",
        -(-capacity * 32 // kernels.THREADS),
        [*given, *integers(tokens, capacity, width, block)],
    )
    of_blocks = stored()[ends]
    np.testing.assert_allclose(
        of_blocks[:, :width], expected, atol={"fp32": 1e-5, "fp16": 2e-3, "int8": 2e-2}[cache_format]
    )
    assert not of_blocks[:, width:].any()
    others = np.delete(np.arange(capacity), ends)
    np.testing.assert_array_equal(stored()[others], before[others])

    q, weights = (rng.standard_normal((len(stands), each)).astype("f4") for each in (heads * width, heads))
    own_places, room = places[stands], capacity // block
    scores = np.full((len(stands), 1, room), np.nan, np.float32)
    given = [*pointers(q), *integers(q.shape[1]), *pointers(weights), *integers(heads)]
    given += [*pointers(own_places, keys, scales), *integers(tokens), *pointers(scores)]
    given += integers(heads, width, 2 * width, False, count, room, block)
    launch_kernel(f"score_index_{cache_format}", len(stands) * -(-room // SCORED), given)
    slots, chosen = launched(scores[:, 0], own_places, tokens, (0, 1), count, block, 0, pooled=True)
    for row, position in enumerate(stands):
        seen = (position + 1) // block
        found = weights[row] @ np.maximum(q[row].reshape(heads, width) @ of_blocks[:seen, :width].T, 0)
        picked = np.sort(np.argsort(-found, kind="stable")[:blocks])
        all_of = [*(picked[:, None] * block + np.arange(block)).ravel(), *range(seen * block, position + 1)]
        assert slots[row].tolist() == [*at[all_of], *[-1] * (count - len(all_of))]
        assert chosen[row]["position"] == len(all_of) - 1


def launched(
    scores: Any,
    places: Any,
    tokens: int,
    head: tuple[int, int],
    count: int,
    block: int,
    latest: int,
    pooled: bool = False,
) -> tuple[Any, Any]:
    """What is chosen by a list's scores for a KV head of so many: slots, and rows that have these as their blocks."""
    slots, chosen = np.full((len(scores), count), -1, np.int32), np.zeros(len(scores), kernels.PLACE)
    given = [*pointers(scores), *integers(scores.strides[0] // 4), *pointers(places), *integers(tokens, *head)]
    given += [ctypes.c_ulonglong(DEVICE_ADDRESSES + slots.ctypes.data), *pointers(chosen)]
    launch_kernel("choose_positions", len(scores), [*given, *integers(count, block, latest, pooled)])
    return slots, chosen
