"""Which nodes keep far cache blocks, and how much of their memory that takes."""

from __future__ import annotations

import pytest

from motley.daemon.caches.wire import block_bytes
from motley.orchestrator.planning.cache_holders import HOLDER_BYTES, choose_nodes, far_bytes
from motley.orchestrator.planning.caches import Blocks, Caches
from motley.orchestrator.planning.cutting.shares import Candidate, PlanError, plan_shares
from motley.plugins.block_holder import HeldLayer
from motley.plugins.native.attention import SIGHT
from motley.protocol import CACHE_STRETCH
from motley.protocol.mesh_pb2 import ModelProfile

NAMES = {"1": "pc", "2": "laptop", "3": "box"}


def room(blocks: int) -> int:
    return HOLDER_BYTES + blocks


def test_blocks_on_other_nodes_are_stretches_of_attention() -> None:
    """So a stretch is either here or there; and planned is what a holder is asked for."""
    assert CACHE_STRETCH == SIGHT
    assert Caches(1000, 256, node_tokens=769).blocks(False) == Blocks(2, SIGHT, on_nodes=7)
    layers = [HeldLayer(8, 2, 64, 0, 0.0)] * 3
    assert 7 * block_bytes(layers, "int8") == 7 * SIGHT * 3 * 2 * 2 * (64 + 4)


def test_a_rank_has_the_caches_of_every_head_that_it_touches(profile: ModelProfile) -> None:
    plans = plan_shares(
        [profile] * 3, [Candidate(str(rank), speed, 10**9) for rank, speed in enumerate((3, 2, 1))], 100
    )
    each = [far_bytes(plan, profile, 10) for plan in plans]
    assert all(own % (10 * profile.cache_bytes_per_token) == 0 for own in each)
    assert sum(each) >= 10 * profile.kv_groups * profile.cache_bytes_per_token
    (alone,) = plan_shares([profile], [Candidate("0", 1.0, 10**9)], 100)
    assert far_bytes(alone, profile, 10) == 10 * profile.kv_groups * profile.cache_bytes_per_token


@pytest.mark.parametrize(
    ("needed", "free", "chosen"),
    [
        ([5, 5], {"1": 0, "2": 0, "3": room(100)}, None),
        ([5], {"1": room(100), "2": room(90), "3": room(5)}, ["3"]),
        ([5], {"1": room(100), "2": room(90), "3": room(4)}, ["2"]),
        ([5, 50], {"1": room(40), "2": room(9), "3": room(50)}, ["2", "3"]),
    ],
)
def test_nodes_without_ranks_come_first_then_those_with_most_room(
    needed: list[int], free: dict[str, int], chosen: list[str] | None
) -> None:
    if chosen is None:
        with pytest.raises(
            PlanError, match=r"(?s)no other node has room for the far cache blocks of rank 1.*box: 95 bytes free"
        ):
            choose_nodes(needed, ["1", "2"], free, NAMES)
    else:
        assert choose_nodes(needed, ["1", "2"], free, NAMES) == chosen
