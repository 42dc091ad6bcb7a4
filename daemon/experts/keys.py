"""Which expert is meant, and who holds which, as the control plane says it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from motley.protocol import mesh_pb2 as pb

ExpertKey: TypeAlias = tuple[int, int]
"""A layer, and the number of an expert in it."""


def keys_of(hosted: pb.HostedExperts) -> Iterator[ExpertKey]:
    """The experts that a host holds, or shall hold, in the order in which the message has them."""
    return ((own.layer, index) for own in hosted.sets for index in own.indices)


def replicas(hosts: Iterable[pb.HostedExperts]) -> dict[ExpertKey, list[int]]:
    """Which hosts hold each expert, by ascending number; `hosts` is what each of them holds, by number."""
    held: defaultdict[ExpertKey, list[int]] = defaultdict(list)
    for number, host in enumerate(hosts):
        for key in keys_of(host):
            held[key].append(number)
    return dict(held)
