"""The memory that room for LoRA adapters takes. Pure."""

from __future__ import annotations

from motley.protocol.mesh_pb2 import ModelProfile

ELEMENT_BYTES = 4
"""Of an adapter's matrices, which ranks keep as their files have them: float32 at most."""


def with_adapters(profile: ModelProfile, slots: int, rank: int) -> ModelProfile:
    """A model's costs where every rank, and every expert host, has slots for adapters.

    Of most matrices of an adapter a rank needs one factor as a whole and a part of the other; both are counted as a
    whole here, so the room suffices for whatever share it gets. What an adapter adds to experts is no more than an
    adapter may have in all.

    Args:
        rank: the largest of an adapter's products.
    """
    costs = ModelProfile()
    costs.CopyFrom(profile)
    room = slots * rank * ELEMENT_BYTES * profile.adapter_elements
    costs.fixed_bytes += room
    costs.host_fixed_bytes += room
    return costs
