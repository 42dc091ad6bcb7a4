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
from tests.transport.cuda.host_driver import DEVICE as DEVICE_ADDRESSES


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize(("heads", "width", "count"), [(1, 8, 1), (5, 40, 7), (16, 128, 150)])
def test_the_best_positions_are_chosen_the_earlier_of_equal_ones(
    cache_format: str, heads: int, width: int, count: int
) -> None:
    rng, tokens, capacity = np.random.default_rng(heads), 16, 320
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
    scores, room = np.full((len(stands), capacity), np.nan, np.float32), capacity
    given = [*pointers(q), *integers(q.shape[1]), *pointers(weights), *integers(heads), *pointers(places, keys, scales)]
    given += [*integers(tokens), *pointers(scores), *integers(heads, width, count, room)]
    launch_kernel(f"score_index_{cache_format}", len(stands) * -(-room // SCORED), given)
    slots, chosen = np.full((len(stands), count), -1, np.int32), np.zeros(len(stands), kernels.PLACE)
    given = [*pointers(scores, places), *integers(tokens), ctypes.c_ulonglong(DEVICE_ADDRESSES + slots.ctypes.data)]
    launch_kernel("choose_positions", len(stands), [*given, *pointers(chosen), *integers(count, room)])

    numbers = (table[:, None] * tokens + np.arange(tokens)).ravel()
    for row, position in enumerate(stands):
        seen = keys.reshape(-1, width)[numbers[: position + 1]].astype(np.float32)
        found = np.maximum(seen @ q[row].reshape(heads, width).T, 0) @ weights[row]
        best = np.sort(np.argsort(-found, kind="stable")[:count])
        assert slots[row].tolist() == [*numbers[best], *[-1] * (count - len(best))]
        assert chosen[row]["position"] == len(best) - 1
        assert chosen[row]["blocks"].tolist() == [DEVICE_ADDRESSES + slots[row].ctypes.data] * 2
        assert (chosen[row]["before"], chosen[row]["after"]) == (0, 0)
