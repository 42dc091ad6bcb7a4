"""How much the caches of a session hold, and the blocks of which every rank keeps them."""

from __future__ import annotations

import pytest

from motley.orchestrator.planning.caches import Blocks, Caches, blocks_of, with_blocks, with_tables
from motley.orchestrator.planning.cost import Pace
from motley.orchestrator.planning.cutting.shares import Candidate
from motley.orchestrator.planning.setup import Setup
from motley.protocol import SNAPSHOTS
from motley.protocol.mesh_pb2 import ModelProfile


@pytest.mark.parametrize(
    ("caches", "whole", "blocks"),
    [
        (Caches(4096, 4096), False, Blocks(128, 32)),
        (Caches(4096, 4097), False, Blocks(129, 32)),
        (Caches(1, 1), False, Blocks(1, 32)),
        (Caches(4096, 4096), True, Blocks(1, 4096)),
        (Caches(1000, 2001), True, Blocks(3, 1000)),
        (Caches(4096, 1024, 3073), False, Blocks(32, 32, 97)),
    ],
)
def test_blocks_hold_what_was_asked_for(caches: Caches, whole: bool, blocks: Blocks) -> None:
    assert caches.blocks(whole) == blocks
    assert caches.tokens <= blocks.room < caches.tokens + blocks.tokens


A_SEQUENCE = 25
"""Blocks of 32 tokens for a window of 512 positions and the rows of a step."""


@pytest.mark.parametrize(
    ("caches", "windowed"),
    [
        pytest.param(Caches(32768, 32768), 256, id="a quarter"),
        pytest.param(Caches(8192, 8192), 4 * A_SEQUENCE, id="four sequences"),
        pytest.param(Caches(3200, 3200), 0, id="as many as there are"),
        pytest.param(Caches(8192, 1024, 32768), 32, id="no more than others have in memory"),
        pytest.param(Caches(8192, 64, 32768), A_SEQUENCE, id="but one sequence's"),
    ],
)
def test_layers_with_a_window_have_fewer_blocks(caches: Caches, windowed: int) -> None:
    blocks = caches.blocks(False, 512)
    assert (blocks.windowed, blocks.window) == (windowed, 512 if windowed else 0)


def test_only_engines_that_can_give_layers_with_a_window_fewer_blocks() -> None:
    profile = ModelProfile(cache_bytes_per_token=60, windowed_bytes_per_token=50, window=512)
    able, unable = Setup("able", "int4", on_gpu=False, keeps_windows=True), Setup("unable", "int4", on_gpu=False)
    whole = Setup("whole", "int4", on_gpu=False, has_whole_caches=True)
    caches, on_disk = Caches(32768, 32768), Caches(32768, 16384, 16384)
    assert blocks_of(caches, profile, [able, able]).windowed == 256
    assert not blocks_of(caches, profile, [able, unable]).windowed
    assert blocks_of(caches, profile, [able, whole]) == Blocks(1, 32768)
    assert blocks_of(on_disk, profile, [able]).windowed
    profile.shared_cache_bytes_per_token, profile.windowed_bytes_per_token = 10, 60
    assert blocks_of(on_disk, profile, [able]).windowed
    profile.shared_cache_bytes_per_token = 0
    assert not blocks_of(on_disk, profile, [able]).windowed, "nothing would be on the disk"


def test_a_token_costs_less_where_layers_with_a_window_have_fewer_blocks() -> None:
    profile = ModelProfile(cache_bytes_per_token=60, windowed_bytes_per_token=50, window=512)
    assert with_blocks(profile, Blocks(1024, 32, windowed=256, window=512)).cache_bytes_per_token == 10 + 13
    assert with_blocks(profile, Blocks(1024, 32)) is profile
    assert profile.cache_bytes_per_token == 60


def test_rotary_tables_are_as_long_as_the_context() -> None:
    """Of a million positions, and heads of 128, they are half a gigabyte on every rank."""
    profile = ModelProfile(fixed_bytes=1000, position_bytes=512)
    assert with_tables(profile, 1 << 20).fixed_bytes == 1000 + (512 << 20)
    assert profile.fixed_bytes == 1000


def test_states_are_as_many_as_sequences_or_eight() -> None:
    profile, setup = ModelProfile(cache_bytes_per_token=60, state_bytes=1000), Setup("any", "int4", on_gpu=False)
    some, many = (blocks_of(Caches(4096, 4096, sequences=count), profile, [setup]) for count in (3, 64))
    assert (some.slots, many.slots) == (3, 8)
    assert with_blocks(profile, some).state_bytes == 3000 * (1 + SNAPSHOTS), "as many are remembered"
    assert not blocks_of(Caches(4096, 4096), ModelProfile(cache_bytes_per_token=60), [setup]).slots


def test_several_rows_read_the_experts_of_all_of_them() -> None:
    profile = ModelProfile(layers=1, mlp_unit_bytes=900, trunk_mlp_unit_bytes=100, expert_count=8, experts_per_token=2)
    profile.expert_layers.append(0)

    def mlp(rows: int, row_speed: float = 0.0) -> float:
        return Pace(profile, Candidate("a", speed=1.0, memory=0, row_speed=row_speed), 1, rows, 0).mlp_s

    assert [mlp(rows) for rows in (1, 2, 1000)] == pytest.approx([100 + 200, 100 + 800 * (1 - 0.75**2), 900])
    assert mlp(1000, row_speed=10.0) == pytest.approx(1000 * 300 / 10), "each row is multiplied by its own experts"


def test_caches_are_read_at_a_speed_of_their_own() -> None:
    """Of floats, where weights are codes: a GPU may compute these slower than it reads memory."""
    profile = ModelProfile(layers=1, kv_groups=2, attention_splits=[1], cache_bytes_per_token=1000)
    slow, quick = (
        Pace(profile, Candidate("a", speed=1e9, memory=0, cache_speed=speed), 1, 1, 1000) for speed in (0.0, 4e9)
    )
    assert slow.attention_s(range(2)) == 4 * quick.attention_s(range(2)) > 0
