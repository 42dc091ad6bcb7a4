"""Which nodes keep far cache blocks for which ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from motley.orchestrator.planning.cutting.shares import PlanError, RankPlan, cached_bytes
from motley.protocol.mesh_pb2 import ModelProfile
from motley.protocol.wording import human_bytes

HOLDER_BYTES = 256 << 20
"""What a cache holder takes beside the blocks: its interpreter, and what it computes with."""


def far_bytes(plan: RankPlan, profile: ModelProfile, tokens: int, windowed: bool = False) -> int:
    """Bytes that so many tokens take in the far caches of a rank.

    Args:
        plan: the rank's share.
        windowed: whether layers with a window have blocks of their own, none of which is far.
    """
    return tokens * cached_bytes(profile, plan.attention, plan.attention_split, without_windows=windowed)


def choose_nodes(
    needed: Sequence[int], ranks: Sequence[str], free: Mapping[str, int], names: Mapping[str, str]
) -> list[str]:
    """Choose a node for the holder of every rank: of the others that have room, one without ranks first, then
    the one with most. What takes most is placed first.

    Args:
        needed: bytes that the blocks of each rank take.
        ranks: the id of the node of each rank.
        free: by id of a node, bytes that are free there beside the ranks.
        names: of the nodes, by id.

    Raises:
        PlanError: some find no room; the message says what is missing.
    """
    left = dict(free)
    chosen: dict[int, str] = {}
    for rank in sorted(range(len(needed)), key=lambda rank: -needed[rank]):
        wanted = needed[rank] + HOLDER_BYTES
        roomy = [node for node, room in left.items() if room >= wanted and node != ranks[rank]]
        if not roomy:
            rooms = "".join(f"\n  {names[node]}: {human_bytes(room)} free" for node, room in left.items())
            raise PlanError(
                f"no other node has room for the far cache blocks of rank {rank}, which take {human_bytes(wanted)} on"
                f" one. Ask for fewer tokens there, or add a node:{rooms}"
            )
        chosen[rank] = min(roomy, key=lambda node: (node in ranks, -left[node]))
        left[chosen[rank]] -= wanted
    return [chosen[rank] for rank in range(len(needed))]
