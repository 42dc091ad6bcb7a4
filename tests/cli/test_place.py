"""Where commands find the mesh that this machine belongs to, and what they say if it does not answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from motley.cli.errors import CliError
from motley.cli.reaching import place
from motley.cli.reaching.client import Client, Unreachable
from motley.cli.reaching.home import meshes
from motley.cli.reaching.joining import find_mesh, last_name
from motley.cli.reaching.place import find_place
from motley.daemon.node.joining.membership import Membership
from motley.orchestrator.app import Orchestrator, OrchestratorConfig

LAPTOP = Membership("laptop", "ab" * 32, "key", "192.0.2.1:7337", "http://127.0.0.1:1", "", "")
"""Of a mesh that nobody serves any more."""


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a home of its own, on which no orchestrator runs."""
    monkeypatch.setenv("MOTLEY_HOME", str(tmp_path))
    monkeypatch.setattr(place, "USUAL_URL", "http://127.0.0.1:2")


async def test_the_mesh_that_was_joined_is_named_though_it_does_not_answer() -> None:
    assert (await find_place("", "")).url == "http://127.0.0.1:2"
    LAPTOP.keep(meshes())
    assert (await find_place("", "")).url == LAPTOP.api_url
    assert (await find_place("http://elsewhere/", "")).url == "http://elsewhere"
    with pytest.raises(
        Unreachable, match=r"that this machine has joined as 'laptop' does not answer at http://127.*:1: "
    ):
        async with Client() as client:
            await client.sessions()
    with pytest.raises(Unreachable, match=r"no orchestrator answers at http://127.0.0.1:3; start one"):
        async with Client("http://127.0.0.1:3") as client:
            await client.sessions()


async def test_a_mesh_that_was_joined_is_known_at_any_address(tmp_path: Path) -> None:
    """And no other one is told what this machine keeps for it."""
    own, other = (
        Orchestrator(OrchestratorConfig("127.0.0.1", 0, "0.0.0.0", 0, state_dir=tmp_path / name)) for name in "ab"
    )
    await own.start()
    await other.start()
    try:
        of_own = replace(LAPTOP, key=own.operator_key, api_trust=own.api_trust.decode(), api_name=own.api_name)
        of_own.keep(meshes())
        async with Client(f"{own.http_url}/") as client:
            assert await client.sessions() == []
        assert (await find_place(other.http_url, "")).key == ""
        with pytest.raises(CliError, match="is not known to this machine"):
            async with Client(other.http_url) as client:
                await client.sessions()
    finally:
        await own.stop()
        await other.stop()


async def test_it_is_told_that_nobody_may_read_which_mesh_this_machine_belongs_to() -> None:
    meshes().write_text("no folder")
    with pytest.raises(Unreachable, match=r"which mesh this machine belongs to cannot be read \(.*: give this user"):
        async with Client() as client:
            await client.sessions()
    with pytest.raises(Unreachable, match=r"no orchestrator answers at http://127.0.0.1:3; start one"):
        async with Client("http://127.0.0.1:3") as client:
            await client.sessions()


def test_a_machine_is_called_as_it_was_the_last_time() -> None:
    assert last_name() is None
    LAPTOP.keep(meshes())
    assert last_name() == "laptop"


async def test_an_address_that_is_typed_without_a_port_is_joined_at_the_usual_one() -> None:
    assert await find_mesh("192.0.2.1", "token", "laptop") == ("192.0.2.1:7337", "token")
