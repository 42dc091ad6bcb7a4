"""Under which address a node tells others to reach it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from motley.daemon.node.joining.control import OrchestratorLost, _admitted, _reachable
from motley.daemon.node.network.address import listening_host
from motley.daemon.node.settings import NodeSettings
from motley.daemon.weights.cache import ShareCache
from motley.protocol import mesh_pb2 as pb


class Call:
    """A stream on which only the orchestrator's initial metadata has come."""

    def __init__(self, **metadata: str) -> None:
        self._metadata = metadata

    async def initial_metadata(self) -> list[tuple[str, str]]:
        return [(name.replace("_", "-"), value) for name, value in self._metadata.items()]

    async def read(self) -> None:
        """The stream has ended."""


@pytest.mark.parametrize(
    ("own", "known", "told"),
    [
        ("127.0.0.1", "192.168.1.10", "192.168.1.10"),
        ("::1", "fd00::10", "fd00::10"),
        ("localhost", "192.168.1.10", "192.168.1.10"),
        ("::ffff:127.0.0.1", "192.168.1.10", "192.168.1.10"),
        ("127.0.0.1", "", "127.0.0.1"),
        ("10.8.0.2", "192.168.1.10", "10.8.0.2"),
        ("gaming-pc", "192.168.1.10", "gaming-pc"),
    ],
)
async def test_one_that_has_dialled_loopback_learns_where_others_reach_it(
    tmp_path: Path, own: str, known: str, told: str
) -> None:
    settings = NodeSettings("pc", own, pb.Capabilities(), None, ShareCache(tmp_path), 1)
    assert _reachable(settings, await _admitted(Call(motley_address=known), 10.0)).address == told


async def test_a_stream_that_ends_before_the_token_was_taken_is_no_welcome() -> None:
    with pytest.raises(OrchestratorLost):
        await _admitted(Call(), 10.0)


async def test_an_orchestrator_that_waits_for_a_hello_is_taken_for_an_older_one() -> None:
    class Waits(Call):
        async def initial_metadata(self) -> list[tuple[str, str]]:
            await asyncio.Event().wait()
            raise AssertionError

    with pytest.raises(OrchestratorLost, match=r"not taken the join token .* older motley .* same on both"):
        await _admitted(Waits(), 0.01)


def test_workers_listen_where_others_reach_them() -> None:
    hosts = {"127.0.0.1": "127.0.0.1", "::1": "::1", "localhost": "localhost", "::ffff:127.0.0.1": "::ffff:127.0.0.1"}
    hosts |= {"192.168.1.10": "0.0.0.0", "fd00::1": "::", "gaming-pc": "0.0.0.0"}
    assert {address: listening_host(address) for address in hosts} == hosts
