"""Two machines that cannot reach each other, as guests of a wireless network, and a third that both reach."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from motley.cli.reaching.client import Client
from tests.e2e.losses.test_survival import GREEDY, undisturbed
from tests.e2e.network.house import CAN_BE_BUILT, house
from tests.e2e.processes import BUNDLED, mesh

pytestmark = pytest.mark.skipif(not CAN_BE_BUILT, reason="machines that can be kept apart are made by root on Linux")


@pytest.mark.soak
async def test_they_have_ranks_of_one_session_by_the_third(tmp_path: Path) -> None:
    with house("a", "b", "c") as built:
        built.keep_apart("a", "b")
        async with mesh(tmp_path, host=built.address) as there, Client(there.url) as client:
            await asyncio.gather(*(there.join(name, on=built.on(name)) for name in "abc"))
            async with asyncio.timeout(120):
                links: list[dict[str, object]] = []
                while len(links) < 6:
                    await asyncio.sleep(0.2)
                    nodes = (await client.call("GET", "/api/nodes"))["nodes"]
                    links = [{"of": node["name"], **link} for node in nodes for link in node["links"]]
            apart = {(link["of"], link["to"], link["relay"]) for link in links if link["failure"]}
            assert apart == {("a", "b", "c"), ("b", "a", "c")}
            how = {"model": str(BUNDLED), "exact": True}
            session = await there.session(nodes=["c"], **how)
            expected = await undisturbed(there.url, GREEDY)
            await client.call("DELETE", f"/api/sessions/{session['id']}")
            session = await there.session(nodes=["a", "b"], **how)
            assert [rank["node"] for rank in session["ranks"]] == ["a", "b"]
            assert await undisturbed(there.url, GREEDY) == expected
            told = await client.call("GET", f"/api/sessions/{session['id']}")
            assert (told["epoch"], told["losses"]) == (1, [])
