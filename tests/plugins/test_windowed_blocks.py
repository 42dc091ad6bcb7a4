"""Layers with a window that have fewer blocks: the same bits as with all of them, on every engine that can."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from motley.daemon.models.cutting.units import units
from motley.daemon.rank.blocks.window_blocks import WindowBlocks
from motley.plugins.cuda.engine import CudaEngine
from motley.plugins.engine import CACHE_FORMATS, CacheBlocks, EngineError, EngineFactory, EngineOptions
from motley.plugins.installed import keeps_windows
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from motley.plugins.tensorrt.engine import TensorRTEngine
from tests.models.cases import LocalSession, golden_case, uneven_shares
from tests.pairs import pairwise
from tests.plugins.reference.strict_arrays import STRICT
from tests.plugins.windows import TOKENS, texts

KINDS: dict[str, tuple[EngineFactory, str, bool]] = {
    "quantised": (OnnxRuntimeEngine, "int8", False),
    "exact": (OnnxRuntimeEngine, "fp32", True),
    "reference": (ReferenceEngine, "fp32", False),
    "reference on a device": (partial(ReferenceEngine, device=STRICT), "fp32", False),
}
"""An engine, what weights are quantised to, and whether it is exact."""


@pytest.mark.parametrize(
    ("name", "cache_format", "kind"),
    pairwise(["gemma3", "gpt-oss", "mistral-window", "qwen2-some-windows"], CACHE_FORMATS, [*KINDS]),
)
def test_a_window_has_the_same_bits_in_fewer_blocks(kind: str, cache_format: str, name: str, tmp_path: Path) -> None:
    factory, quantisation, exact = KINDS[kind]
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
    assert (keeps_windows(name), keeps_windows("onnxruntime"), keeps_windows("webgpu")) == (False, True, True)
    case = golden_case("mistral-window")
    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    blocks = CacheBlocks(1, case.model.context, windowed=1, window=8)
    with pytest.raises(EngineError, match=f"engine '{name}' cannot give layers with a window fewer blocks"):
        LocalSession(case.folder, factory, shares, tmp_path, blocks=blocks)
