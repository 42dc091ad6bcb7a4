"""Blocks that are read where they lie: far ones give the same bits as near ones, on every engine that has them."""

from __future__ import annotations

import errno
import math
import os
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import ceil
from pathlib import Path

import numpy as np
import pytest

from motley.daemon.models.cutting.units import units
from motley.daemon.rank.blocks.far_file import DiskFull, FarFile
from motley.plugins.cuda.engine import CudaEngine
from motley.plugins.engine import (
    CACHE_FORMATS,
    F32,
    SCALES,
    CacheBlocks,
    CacheSpec,
    EngineError,
    EngineFactory,
    EngineOptions,
    Span,
)
from motley.plugins.installed import abilities
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from motley.plugins.tensorrt.engine import TensorRTEngine
from tests.models.cases import LocalSession, golden_case, uneven_shares
from tests.plugins.reference.strict_arrays import STRICT

CUTS = [0, 2, 5, 6, 7, 9, 10, 12, *range(13, 25)]
NEAR = CacheBlocks(2, 3)
"""A quarter of what the last of these positions needs."""


def texts(ranks: LocalSession, blocks: CacheBlocks) -> F32:
    """The logits of all tokens of a sequence; what no longer fits near moves, its first positions first."""
    tokens, near = golden_case("llama-mqa").tokens, [*range(blocks.count)]
    far = [*range(blocks.count, blocks.count + blocks.far)]
    far = far[::2] + far[1::2]  # in any order
    table: list[int] = []
    logits = []
    for start, end in pairwise(CUTS):
        while len(table) < ceil(end / blocks.tokens):
            if not near:
                place = next(place for place, block in enumerate(table) if block < blocks.count)
                assert (place + 1) * blocks.tokens <= start, "it has been written"
                ranks.move([(table[place], far[0])])
                near.append(table[place])
                table[place] = far.pop(0)
            table.append(near.pop())
        span = Span(np.array(table, np.int32), start, end - start, wanted=end - start)
        logits.append(ranks.run([span], tokens[start:end]))
    return np.concatenate(logits)


@pytest.mark.parametrize("name", ["llama-mqa", "mistral-window", "minimax-m3", "glm5-next", "qwen4-exp"])
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
def test_a_context_four_times_the_near_blocks_has_the_same_bits(
    factory: EngineFactory, quantisation: str, exact: bool, cache_format: str, name: str, tmp_path: Path
) -> None:
    case, found = golden_case(name), []
    shares = uneven_shares(units(case.model, quantisation, 32, exact=exact), 2)
    for blocks in (CacheBlocks(8, 3, cache_format), replace(NEAR, format=cache_format, far=6)):
        folder = tmp_path / str(blocks.far)
        folder.mkdir()
        options = EngineOptions(exact=exact)
        with LocalSession(
            case.folder, factory, shares, folder, quantisation, blocks=blocks, options=options, exact=exact
        ) as ranks:
            found.append(texts(ranks, blocks))
        assert sorted(each.name for each in folder.iterdir()) == ["rank0", "rank1"], "nothing is left"
    np.testing.assert_array_equal(found[1], found[0])


@pytest.mark.parametrize(("name", "factory"), [("cuda", CudaEngine), ("tensorrt", TensorRTEngine)])
def test_an_engine_that_cannot_have_far_blocks_refuses_them(name: str, factory: EngineFactory, tmp_path: Path) -> None:
    read = [abilities(each).reads_far_blocks for each in (name, "onnxruntime", "reference")]
    assert read == [False, True, True]
    case = golden_case("llama-mqa")
    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    blocks = CacheBlocks(1, case.model.context, far=1)
    with pytest.raises(EngineError, match=f"engine '{name}' cannot keep KV caches on a disk"):
        LocalSession(case.folder, factory, shares, tmp_path, blocks=blocks)


def test_a_disk_with_too_little_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    a_lot = CacheBlocks(1, 1 << 20, far=1 << 20)
    with pytest.raises(DiskFull, match=r"for 1099511627776 tokens of KV caches cannot be taken in .*Make room there"):
        FarFile(tmp_path, a_lot, [CacheSpec(0, 8, 128)])
    assert not [*tmp_path.iterdir()]


def test_the_file_is_nobody_elses_and_its_room_is_taken(tmp_path: Path) -> None:
    blocks = CacheBlocks(2, 32, "int8", far=40)
    file = FarFile(tmp_path / "new", blocks, [CacheSpec(3, 2, 64)])
    status = os.fstat(file._file.fileno())
    assert (status.st_mode & 0o777, status.st_blocks * 512 >= file.size) == (0o600, True)
    assert file.size == 40 * 32 * 2 * 2 * (64 + 4)
    values = np.arange(2 * 32 * 64, dtype=np.int8).reshape(2, 32, 64)
    file.write("value_cache.3", 39, values)
    np.testing.assert_array_equal(file.read("value_cache.3")[39], values)
    assert not file.read("value_cache.3")[:39].any()
    assert not file.read("key_cache.3").any()
    file.close()
    assert not [*(tmp_path / "new").iterdir()]


def test_what_reading_a_block_costs_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the system's cache of files, or from the disk where that has no room for the file; what is measured leaves
    no trace of damage, and a disk that cannot be written to is the last choice."""
    file = FarFile(tmp_path, CacheBlocks(2, 32, far=40, held=10), [CacheSpec(3, 2, 64)])
    assert file.size == 30 * 32 * 2 * 2 * 64 * 4, "what another machine keeps is not here"
    for room in (1 << 40, 0):
        monkeypatch.setattr("motley.daemon.rank.blocks.far_file.available_memory", lambda room=room: room)
        assert 0 < file.block_s(10) < 1
    nothing = FarFile(tmp_path, CacheBlocks(2, 32, far=40, held=10), [])
    assert nothing.block_s(10) == 0, "of a rank without heads"
    nothing.close()
    values = np.ones((2, 32, 64), np.float32)
    for name in ("key_cache.3", "value_cache.3"):
        file.write(name, 0, values)
    both = np.array([2, 2 + 30, 2 + 39], np.int32)
    file.verify(both, both)
    assert file.lost == ""

    def full(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("motley.daemon.rank.blocks.far_file.write_all", full)
    assert file.block_s(10) == math.inf
    file.close()


def test_what_a_disk_has_damaged_is_told(tmp_path: Path) -> None:
    """Of blocks that a sequence begins with at once, of those that it goes on with in as many steps as they are."""
    file = FarFile(tmp_path, CacheBlocks(2, 32, "int8", far=9), [CacheSpec(3, 2, 64), CacheSpec(4, 2, 64)])
    for name in ("key_cache", "value_cache"):
        for number in range(8):
            for layer in (3, 4):
                file.write(f"{name}.{layer}", number, np.full((2, 32, 64), number, np.int8))
                file.write(f"{name}.{layer}{SCALES}", number, np.full((2, 32), number, np.float32))
    everything, nothing = np.arange(2 + 8, dtype=np.int32), np.array([0, 1], np.int32)
    file.verify(everything, everything)
    assert file.lost == ""
    kept = file.read("value_cache.4")[5]
    os.pwrite(file._file.fileno(), b"\x04", kept.ctypes.data - file._bytes.ctypes.data + 7)
    for used in (nothing, everything[:-3], everything, everything, everything[::-1]):
        file.verify(nothing, used)
    assert file.lost == ""
    file.verify(np.array([1, 2 + 5], np.int32), nothing)
    assert file.lost == f"KV caches on the disk of {tmp_path} are damaged"
    file._damaged = False
    for _ in range(8):
        file.verify(nothing, everything)
    assert file.lost
    file.close()


def test_what_the_disk_cannot_read_any_more_is_zeros_and_told(tmp_path: Path) -> None:
    file = FarFile(tmp_path, CacheBlocks(2, 32, far=40), [CacheSpec(3, 2, 64)])
    values = np.ones((2, 32, 64), np.float32)
    for number in range(40):
        file.write("value_cache.3", number, values)
    assert file.read("value_cache.3").all()
    assert file.lost == ""
    os.ftruncate(file._file.fileno(), file.size - 2 * values.nbytes)
    kept = file.read("value_cache.3")
    assert kept[:38].all()
    assert not kept[39].any()
    assert file.lost == f"KV caches cannot be read from the disk of {tmp_path}"
    file.close()
