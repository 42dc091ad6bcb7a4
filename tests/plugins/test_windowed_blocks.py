"""Layers with a window that have fewer blocks: the same bits as with all of them, on every engine that can."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import ceil
from pathlib import Path

import numpy as np
import pytest

from motley.daemon.models.cutting.units import units
from motley.daemon.rank.blocks.window_blocks import WindowBlocks
from motley.plugins.cuda.engine import CudaEngine
from motley.plugins.engine import CACHE_FORMATS, F32, CacheBlocks, EngineError, EngineFactory, EngineOptions, Span
from motley.plugins.installed import keeps_windows
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from motley.plugins.tensorrt.engine import TensorRTEngine
from tests.models.cases import LocalSession, golden_case, uneven_shares
from tests.plugins.reference.strict_arrays import STRICT

TOKENS = 3
CUTS = [0, 2, 5, 6, 7, 9, 10, 12, *range(13, 25)]


def texts(ranks: LocalSession, blocks: CacheBlocks, tokens: list[int]) -> F32:
    """The logits of all tokens of a sequence that has far blocks for its first positions, if there are any, and takes
    windowed ones round and round: those that its rows no longer see have no number."""
    near = [*range(blocks.count)]
    table = own = np.empty(0, np.int32)
    logits = []
    for start, end in pairwise(CUTS):
        while len(table) < ceil(end / blocks.tokens):
            if not near:
                place = int(np.flatnonzero(table < blocks.count)[0])
                far = blocks.count + place
                ranks.move([(int(table[place]), far)])
                near.append(int(table[place]))
                table[place] = far
            own = np.append(own, np.int32(len(table) % max(1, blocks.windowed)))
            table = np.append(table, np.int32(near.pop()))
        if blocks.windowed:
            own[: max(0, start - blocks.window + 1) // blocks.tokens] = -1
        span = Span(table.copy(), start, end - start, end - start, windowed=own.copy() if blocks.windowed else None)
        logits.append(ranks.run([span], tokens[start:end]))
    return np.concatenate(logits)


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "mistral-window", "qwen2-some-windows"])
@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize(
    ("factory", "quantisation", "exact"),
    [
        (OnnxRuntimeEngine, "int8", False),
        (OnnxRuntimeEngine, "fp32", True),
        (ReferenceEngine, "fp32", False),
        (partial(ReferenceEngine, device=STRICT), "fp32", False),
    ],
    ids=["quantised", "exact", "reference", "reference on a device"],
)
def test_a_window_has_the_same_bits_in_fewer_blocks(
    factory: EngineFactory, quantisation: str, exact: bool, cache_format: str, name: str, tmp_path: Path
) -> None:
    case, found = golden_case(name), []
    shares = uneven_shares(units(case.model, quantisation, 32, exact=exact), 2)
    all_blocks = CacheBlocks(8, TOKENS, cache_format)
    window = max(case.windows)
    fewer = replace(all_blocks, windowed=WindowBlocks.needed(window, TOKENS) + 1, window=window)
    assert fewer.windowed < all_blocks.count, "it goes round and round"
    for number, blocks in enumerate((all_blocks, fewer, replace(fewer, count=2, far=6))):
        folder = tmp_path / str(number)
        folder.mkdir()
        options = EngineOptions(exact=exact)
        with LocalSession(
            case.folder, factory, shares, folder, quantisation, blocks=blocks, options=options, exact=exact
        ) as ranks:
            found.append(texts(ranks, blocks, [*case.tokens]))
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


@pytest.mark.parametrize(("name", "factory"), [("cuda", CudaEngine), ("tensorrt", TensorRTEngine)])
def test_an_engine_that_keeps_everything_refuses_fewer_blocks(
    name: str, factory: EngineFactory, tmp_path: Path
) -> None:
    assert (keeps_windows(name), keeps_windows("onnxruntime"), keeps_windows("reference")) == (False, True, True)
    case = golden_case("mistral-window")
    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    blocks = CacheBlocks(1, case.model.context, windowed=1, window=8)
    with pytest.raises(EngineError, match=f"engine '{name}' cannot give layers with a window fewer blocks"):
        LocalSession(case.folder, factory, shares, tmp_path, blocks=blocks)
