"""What a token is forecast to take with the trunk on some nodes and the experts on hosts: where to put the trunk. Pure.

The trunk reads all its bytes for every token and waits for its slowest rank. For each layer rows go to the hosts of the
chosen experts together, without a link where that is the trunk's own node, and are back when these have been read, one
after another. Experts are poured over the hosts by answer times (see `motley.orchestrator.planning.placement.place`),
within what each has room for beside the trunk: so a trunk also costs what it drives out of a fast node's memory.

This compares places for the trunk, with links that are taken to be alike; it is no measure of time. What it leaves out
(the slowest of a layer's answers, sums between the trunk's ranks, requests that share a step) hardly depends on the
place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from motley.orchestrator.planning.cutting.shares import pour
from motley.orchestrator.planning.experts.room import expert_count
from motley.orchestrator.planning.placement.terms import Host
from motley.protocol.mesh_pb2 import ModelProfile


@dataclass(frozen=True, order=True)
class Forecast:
    """What is expected of a trunk on some nodes. Forecasts compare: the least one is the best trunk."""

    lacking: int
    """Replicas for which the hosts have no room beside this trunk."""
    seconds: float
    """How long a token takes that is alone in the mesh."""


def forecast(
    profile: ModelProfile,
    trunk: Sequence[tuple[int, float]],
    own: Collection[str],
    hosts: Sequence[Host],
    replicas: int,
    row_bytes: int,
) -> Forecast:
    """What to expect with the trunk on some nodes.

    Args:
        trunk: for each rank of the trunk, the bytes that it reads for a token, and those that it reads in a second.
        own: the names of the trunk's nodes.
        hosts: every node that may have experts, with the bytes that are left for them beside this trunk.
        replicas: of every expert.
        row_bytes: of one row on the wire, there and back.
    """
    count = expert_count(profile)
    slots = [min(count, host.memory // profile.expert_bytes) for host in hosts]
    placed = min(replicas * count, sum(slots))
    links = [host.latency + row_bytes / host.bandwidth for host in hosts]
    reads = [profile.expert_bytes / host.speed for host in hosts]
    rates = [1 / (link + read) for link, read in zip(links, reads, strict=True)]
    answer = sum(
        part * (profile.experts_per_token * read + (0.0 if host.name in own else link))
        for part, read, link, host in zip(pour(placed, rates, slots), reads, links, hosts, strict=True)
    ) / max(1, placed)
    slowest = max(size / speed for size, speed in trunk)
    return Forecast(replicas * count - placed, slowest + len(profile.expert_layers) * answer)
