"""Attention of a step's spans, of which another machine keeps stretches: in as many rounds as there is room for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, cast

import numpy as np
import pytest
from onnx import ModelProto

from motley.plugins.block_holder import Array, Asked, HeldLayer
from motley.plugins.engine import CacheBlocks, CacheSpec, EngineError, RankGraph
from motley.plugins.native.attention import FORMATS, SIGHT, Spans
from motley.plugins.native.library import F32
from motley.plugins.native.matmul import Pool
from motley.plugins.native.summaries import Layer, Summaries
from motley.plugins.onnxruntime import held
from motley.plugins.onnxruntime.held import HeldAttention, check_holder
from tests.plugins.native.native_levels import assert_same
from tests.plugins.native.test_attention import Blocks, Case, Format


@dataclass
class Holder:
    """Answers when it is waited for."""

    summaries: Summaries
    count: int = 9
    lost: str = ""
    calls: list[list[Asked]] = field(default_factory=list)
    failing: ClassVar[BaseException | None] = None

    def begin(self, layers: Sequence[HeldLayer], cache_format: str) -> None:
        raise AssertionError("it has begun")

    def keep(self, block: int, parts: Sequence[Array]) -> None:
        raise AssertionError("nothing moves in a step")

    def ask(self, layer: int, asked: Sequence[Asked]) -> None:
        assert layer == 0
        self.calls.append(list(asked))

    def take(self) -> None:
        if self.failing is not None:
            raise self.failing
        for own in self.calls[-1]:
            table = np.full(int(own.stretches[-1]) + 1, -1, np.int32)
            table[own.stretches] = own.blocks
            self.summaries.answer(own.queries, own.position, table, own.stretches, own.told)


def attend(case: Case, pool: Pool, room: int, monkeypatch: pytest.MonkeyPatch, on_disk: int = 0) -> tuple[F32, Holder]:
    """The result of a case whose stretches before its rows are with a holder, but for the first, which are on a disk;
    and what the holder was asked."""
    monkeypatch.setattr(held, "ROOM", room)
    blocks = Blocks.of([case], SIGHT, order=3).with_far()
    first = blocks.near + on_disk
    here = [np.ascontiguousarray(cache[:first]) for cache in blocks.caches]
    keys, key_scales, values, value_scales = (np.ascontiguousarray(cache[first:]) for cache in blocks.caches)
    scaled = case.format is np.int8
    layer = HeldLayer(case.heads, case.kv_heads, case.size, case.window, case.soft_cap, case.chunked)
    holder = Holder(
        Summaries(Layer(*layer), keys, values, key_scales if scaled else None, value_scales if scaled else None, pool)
    )
    attention = HeldAttention(holder, first, [layer], len(case.qkv), case.capacity)
    spans = Spans(len(case.qkv), 1)
    attention.set(spans, blocks.spans())
    y = np.full((len(case.qkv), case.heads * case.size), np.nan, np.float32)
    near = Blocks(blocks.cases, *here, blocks.numbers, blocks.near)
    attention.bind(near.bind(case.qkv, y, spans, 1, attention.await_told), spans, 0)()
    return y, holder


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("window", "chunked"), [(0, False), (150, False), (300, False), (300, True), (550, True)])
@pytest.mark.parametrize(("room", "on_disk"), [(1, 0), (3000, 0), (1 << 20, 0), (1 << 20, 2)])
def test_a_step_is_told_a_few_rows_at_a_time(
    room: int, on_disk: int, window: int, chunked: bool, format: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit; nothing is asked of stretches that no row sees."""
    case = Case.random(2, 3, 16, 600, 530, 8, window=window, rows=40, format=format)
    case = replace(case, soft_cap=5.0, chunked=chunked)
    with closing(Pool(1)) as pool:
        y, holder = attend(case, pool, room, monkeypatch, on_disk)
    assert_same(y, case.result())
    first = {0: 0, 150: 381, 300: 300 if chunked else 231, 550: 0}[window] // SIGHT
    if window == 550:
        return  # later rows are of the next chunk, and ask for nothing
    assert len(holder.calls) == {1: 40, 3000: 7, 1 << 20: 1}[room]
    assert holder.calls[0][0].stretches.tolist() == [*range(max(first, on_disk), 4)]
    assert sum(len(own.queries) for call in holder.calls for own in call) == 40


def test_what_goes_wrong_while_it_waits_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the attention, though a kernel has called what waits."""
    case = Case.random(1, 2, 8, 300, 280)
    monkeypatch.setattr(Holder, "failing", KeyError("no daemon"))
    with closing(Pool(1)) as pool, pytest.raises(KeyError, match="no daemon"):
        attend(case, pool, 1, monkeypatch)


@pytest.mark.parametrize(
    ("caches", "complaint"),
    [
        ([CacheSpec(0, 2, 16)], ""),
        ([CacheSpec(0, 1, 40, keys_alone=True)], "latent caches"),
        ([CacheSpec(0, 2, 16), CacheSpec(0, 1, 16, keys_alone=True, index=True)], "positions that are chosen for them"),
    ],
)
def test_blocks_that_a_holder_cannot_answer_for_are_refused(caches: list[CacheSpec], complaint: str) -> None:
    blocks, nothing = CacheBlocks(2, SIGHT, far=2, held=2), cast(Summaries, None)
    graph = RankGraph(ModelProto(), Path(), lambda _: {}, 0, caches, blocks, 8, 8, 600, holder=Holder(nothing))
    with pytest.raises(EngineError, match=complaint) if complaint else nullcontext():
        check_holder(graph)
