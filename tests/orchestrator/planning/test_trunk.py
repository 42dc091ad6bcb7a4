"""Where the trunk is best, by numbers of real machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from motley.orchestrator.planning.experts.room import experts_in, replicas_in
from motley.orchestrator.planning.experts.trunk import Forecast, forecast
from motley.orchestrator.planning.placement.terms import Host
from motley.protocol.mesh_pb2 import ModelProfile

GB = 10**9
TRUNK = 1 * GB
"""What a token reads of it."""


@pytest.fixture
def mixtral() -> ModelProfile:
    """8x7B in int4."""
    return ModelProfile(
        expert_layers=range(32), expert_count=8, experts_per_token=2, expert_bytes=90_000_000, host_fixed_bytes=GB // 4
    )


def host(name: str, memory: float, speed: float) -> Host:
    return Host(name, int(memory * GB), speed * GB, latency=0.5e-3, bandwidth=110e6)


def beside(profile: ModelProfile, hosts: list[Host], trunk: str, replicas: int = 1) -> Forecast:
    """With the trunk on one of the nodes, in whose memory it is."""
    left = [replace(each, memory=each.memory - TRUNK * (each.name == trunk)) for each in hosts]
    speed = next(each.speed for each in hosts if each.name == trunk)
    return forecast(profile, [(TRUNK, speed)], [trunk], left, replicas, 2 * 4 * 4096)


def best(profile: ModelProfile, *hosts: Host, replicas: int = 1) -> str:
    return min((each.name for each in hosts), key=lambda name: beside(profile, list(hosts), name, replicas))


def test_it_is_on_the_fastest_node_if_that_is_large(mixtral: ModelProfile) -> None:
    assert best(mixtral, host("old", 32, 15), host("new", 32, 60), host("newer", 32, 62)) == "newer"


def test_nearly_as_fast_and_with_experts_is_better(mixtral: ModelProfile) -> None:
    hosts = host("small", 1.1, 62), host("large", 32, 60), host("old", 32, 15)
    assert best(mixtral, *hosts) == "large"
    assert beside(mixtral, list(hosts), "small") > beside(mixtral, list(hosts), "large")


def test_a_much_slower_node_is_not_though_it_has_all_experts(mixtral: ModelProfile) -> None:
    assert best(mixtral, host("small", 1.1, 60), host("large", 32, 8)) == "small"


def test_before_all_there_is_room_for_what_was_asked_for(mixtral: ModelProfile) -> None:
    hosts = host("small", 23.5, 60), host("large", 32, 8)
    assert best(mixtral, *hosts) == "small"
    assert best(mixtral, *hosts, replicas=2) == "large"
    assert beside(mixtral, list(hosts), "small", replicas=2).lacking == 256 - 22_500 // 90


def test_a_token_is_forecast(mixtral: ModelProfile) -> None:
    """All on one node: reading the trunk, and of each layer two experts."""
    (alone,) = [beside(mixtral, [host("pc", 32, 10)], "pc")]
    assert alone == Forecast(0, pytest.approx(TRUNK / 10e9 + 32 * 2 * 90e6 / 10e9))


def test_what_there_is_room_for(mixtral: ModelProfile) -> None:
    fixed, size = mixtral.host_fixed_bytes, mixtral.expert_bytes
    rooms = [0, fixed + size - 1, fixed + size, fixed + 10_000 * size]
    assert [experts_in(mixtral, room) for room in rooms] == [0, 0, 1, 256]
    assert replicas_in(mixtral, rooms) == 1
    assert replicas_in(mixtral, [*rooms, fixed + 255 * size]) == 2
