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
    given += [*integers(tokens), *pointers(scores), *integers(heads, width, count, room)]
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


def launched(
    scores: Any, places: Any, tokens: int, head: tuple[int, int], count: int, block: int, latest: int
) -> tuple[Any, Any]:
    """What is chosen by a list's scores for a KV head of so many: slots, and rows that have these as their blocks."""
    slots, chosen = np.full((len(scores), count), -1, np.int32), np.zeros(len(scores), kernels.PLACE)
    given = [*pointers(scores), *integers(scores.strides[0] // 4), *pointers(places), *integers(tokens, *head)]
    given += [ctypes.c_ulonglong(DEVICE_ADDRESSES + slots.ctypes.data), *pointers(chosen)]
    launch_kernel("choose_positions", len(scores), [*given, *integers(count, block, latest)])
    return slots, chosen
