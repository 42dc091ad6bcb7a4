"""How many of a model's experts nodes have room for, and so how many replicas of each. Pure.

All experts are taken for equally large. Then they find a place, whole and every replica on a node of its own, whenever
there is room for as many, if no node counts for more than one replica of each (Gale and Ryser).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from motley.protocol.mesh_pb2 import ModelProfile
from motley.protocol.wording import human_bytes


def expert_count(profile: ModelProfile) -> int:
    """How many experts a model has in all layers together."""
    return len(profile.expert_layers) * profile.expert_count


def left_for_experts(profile: ModelProfile, free: int) -> int:
    """Bytes that a host has for experts on a node with so many free."""
    return max(0, free - profile.host_fixed_bytes)


def experts_in(profile: ModelProfile, free: int) -> int:
    """Different experts that a host has room for on a node with so many bytes free."""
    return min(expert_count(profile), left_for_experts(profile, free) // profile.expert_bytes)


def replicas_in(profile: ModelProfile, free: Iterable[int]) -> int:
    """Replicas of every whole expert that nodes with so many bytes free have room for."""
    return sum(experts_in(profile, each) for each in free) // expert_count(profile)


def room_told(profile: ModelProfile, free: Mapping[str, int], trunk: Iterable[str], fitting: int) -> str:
    """What each node has room for, for messages.

    Args:
        free: by the name of a node, the bytes that it has free beside the trunk.
        trunk: names of the nodes on which the trunk is.
        fitting: replicas of every expert for which there is room.
    """
    count, size, fixed = expert_count(profile), human_bytes(profile.expert_bytes), human_bytes(profile.host_fixed_bytes)
    lines = [f"Each of {count} experts takes {size}, and a node that has any {fixed} for itself:"]
    on = set(trunk)
    for name, own in free.items():
        held = experts_in(profile, own)
        short = profile.host_fixed_bytes + profile.expert_bytes - own
        room = f"room for {held}" if held else f"{human_bytes(short)} missing for the first"
        lines.append(f"  {name}: {human_bytes(own)} free{' beside the trunk' * (name in on)}, {room}")
    if fitting:
        lines.append(f"There is room for {fitting} of each: `--replicas {fitting}`.")
    lines.append("Free memory, or add a node.")
    return "\n".join(lines)
