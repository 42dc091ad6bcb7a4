"""Sets of experts as the control plane writes them."""

from __future__ import annotations

from collections.abc import Iterable

from motley.orchestrator.planning.placement.terms import ExpertKey
from motley.protocol.mesh_pb2 import ExpertSet, HostedExperts


def to_message(keys: Iterable[ExpertKey]) -> HostedExperts:
    """A set of experts, without digests."""
    by_layer: dict[int, list[int]] = {}
    for layer, index in sorted(keys):
        by_layer.setdefault(layer, []).append(index)
    return HostedExperts(sets=[ExpertSet(layer=layer, indices=own) for layer, own in by_layer.items()])


def from_message(hosted: HostedExperts) -> list[ExpertKey]:
    """The experts in the order in which they are told, which is that of the digests."""
    return [(own.layer, index) for own in hosted.sets for index in own.indices]
