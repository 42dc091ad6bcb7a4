"""Layers with a window that have fewer blocks: the same bits as with all of them, on every engine that can."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from motley.daemon.models.cutting.units import units
from motley.daemon.rank.blocks.window_blocks import WindowBlocks
from motley.plugins.engine import CACHE_FORMATS, CacheBlocks, EngineError, EngineFactory, EngineOptions
from motley.plugins.installed import abilities
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from motley.plugins.tensorrt.engine import TensorRTEngine
from tests.models.cases import Case, LocalSession, golden_case, uneven_shares
from tests.pairs import pairwise
from tests.plugins.cuda.test_engine import on_host
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
    same_in_fewer_blocks(golden_case(name), *KINDS[kind], cache_format, tmp_path)


@pytest.mark.parametrize(
    ("name", "quantisation"),
    [("mistral-window", "int8"), ("qwen2-some-windows", "fp32"), ("llama4", "int8"), ("gemma4-given-rows", "fp32")],
)
def test_a_window_has_the_same_bits_in_fewer_blocks_of_cuda(quantisation: str, name: str, tmp_path: Path) -> None:
    same_in_fewer_blocks(golden_case(name), on_host, quantisation, False, "fp32", tmp_path)


def same_in_fewer_blocks(
    case: Case, factory: EngineFactory, quantisation: str, exact: bool, cache_format: str, tmp_path: Path
) -> None:
    """Two ranks write the same with a block for every position as with fewer for windows, and with far ones if they
    can."""
    found = []
    shares = uneven_shares(units(case.model, quantisation, 32, exact=exact), 2)
    all_blocks = CacheBlocks(8, TOKENS, cache_format)
    window = max(case.windows)
    fewer = replace(all_blocks, windowed=WindowBlocks.needed(window, TOKENS) + 1, window=window)
    assert fewer.windowed < all_blocks.count, "it goes round and round"
    far = [] if factory is on_host else [replace(fewer, count=2, far=6)]
    for number, blocks in enumerate((all_blocks, fewer, *far)):
        folder = tmp_path / str(number)
        folder.mkdir()
        options = EngineOptions(exact=exact)
        with LocalSession(
            case.folder, factory, shares, folder, quantisation, blocks=blocks, options=options, exact=exact
        ) as ranks:
            found.append(texts(ranks, blocks, [*case.tokens]))
    for others in found[1:]:
        np.testing.assert_array_equal(others, found[0])


def test_an_engine_that_keeps_everything_refuses_fewer_blocks(tmp_path: Path) -> None:
    keep = [abilities(name).keeps_windows for name in ("tensorrt", "onnxruntime", "webgpu", "cuda")]
    assert keep == [False, True, True, True]
    case = golden_case("mistral-window")
    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    blocks = CacheBlocks(1, case.model.context, windowed=1, window=8)
    with pytest.raises(EngineError, match="engine 'tensorrt' cannot give layers with a window fewer blocks"):
        LocalSession(case.folder, TensorRTEngine, shares, tmp_path, blocks=blocks)
