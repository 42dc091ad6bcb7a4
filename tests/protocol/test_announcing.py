"""A mesh announces itself by real mDNS, on loopback, and is found."""

from __future__ import annotations

import secrets

import pytest

from motley.protocol.announcing import Announced, announced, meshes_here

LOOPBACK = ["127.0.0.1"]


async def test_a_mesh_is_found_as_long_as_it_is_announced() -> None:
    mesh = Announced("gaming-pc", ("192.168.1.10", "fd00::1"), 7337, secrets.token_hex(8))
    try:
        async with announced(mesh, LOOPBACK):
            assert mesh in await meshes_here(interfaces=LOOPBACK)
    except OSError as error:
        pytest.skip(f"no multicast on loopback here: {error}")
    assert mesh not in await meshes_here(0.5, LOOPBACK)
