"""What admins do on the page, in a real browser on a real mesh: let machines in and out, keys, tokens, adapters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from motley.cli.reaching.client import Client
from motley.daemon.node.joining.pairing import pair
from tests.e2e.answers.test_adapters import an_adapter
from tests.e2e.faces.browsing import page_of, until, what_axe_finds
from tests.e2e.processes import BUNDLED, Mesh

if TYPE_CHECKING:
    from playwright.async_api import Browser, Route


async def test_a_machine_is_let_in_by_the_code_on_the_page_and_shut_out(
    browser: Browser, there: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _, port = there.target.rpartition(":")
    async with page_of(browser, there) as page:

        async def read_code(_: int) -> str:
            wants = page.locator("#pairings > li", has_text="attic")
            await wants.wait_for()
            assert await what_axe_finds(page) == ""
            return (await wants.locator(".code").inner_text()).replace(" ", "")

        monkeypatch.setattr(there, "token", await pair(host, int(port), "attic", read_code))
        await there.join("attic")
        await page.locator("#access summary", has_text="Machines that belong here").click()
        attic = page.locator("#members > li", has_text="attic")
        await attic.filter(has_text="here, at").wait_for()
        await page.locator("#pairings > li").wait_for(state="detached")  # who is in needs no code
        await there.nodes.pop("attic").end()
        await attic.filter(has_text="not here now").wait_for()
        await page.get_by_role("button", name="Shut out: attic").click()
        assert await what_axe_finds(page) == ""
        await page.get_by_role("button", name="Cancel").click()
        await page.get_by_role("button", name="Shut out: attic").click()
        await page.get_by_role("button", name="Shut out", exact=True).click()
        await attic.wait_for(state="detached")


async def test_keys_and_tokens_are_made_shown_once_and_removed(browser: Browser, there: Mesh) -> None:
    async with page_of(browser, there) as page:
        await page.locator("#access summary", has_text="API keys").click()
        await page.get_by_label("For whom or what").fill("a phone")
        await page.get_by_role("button", name="Make a key").click()
        assert (await page.locator("#new-key-made code").inner_text()).startswith("motley-")
        async with Client(there.url) as client:
            keys = (await client.call("GET", "/api/keys"))["keys"]
        assert [each["scope"] for each in keys if each["note"] == "a phone"] == ["use"]

        await page.locator("#access summary", has_text="Join tokens").click()
        await page.get_by_label("What for").fill("the attic")
        await page.get_by_label("For one machine").check()
        await page.get_by_role("button", name="Make a token").click()
        assert "motley join HOST:PORT --token " in await page.locator("#new-token-made code").inner_text()
        token = page.locator("#tokens > li", has_text="the attic")
        assert "1 machine ·" in await token.inner_text()
        for what, button in (("a phone", "Remove key"), ("the attic", "Remove token")):
            await page.get_by_role("button", name=f"Remove: {what}").click()
            await page.get_by_role("button", name=button, exact=True).click()
            await page.locator(f"#access li:has-text('{what}')").wait_for(state="detached")
        async with Client(there.url) as client:
            told = [(await client.call("GET", f"/api/{each}"))[each] for each in ("keys", "tokens")]
        assert not {"a phone", "the attic"} & {each["note"] for listed in told for each in listed}


async def test_who_may_only_use_models_does_not_see_who_may_what(browser: Browser, there: Mesh) -> None:
    refused = {"error": {"message": "that takes a key of scope admin", "code": "insufficient_scope"}}
    async with page_of(browser, there) as page:
        await page.locator("#access").wait_for()
    async with page_of(browser, there, refusals=4) as page:
        asked: list[str] = []

        async def refuse(route: Route) -> None:
            asked.append(route.request.url)
            await route.fulfill(status=403, json=refused)

        await page.goto("about:blank")  # whoever may do everything asks no more
        for each in ("keys", "tokens", "members", "pairings"):
            await page.route(f"**/api/{each}", refuse)
        await page.goto(there.url)
        await page.locator("#nodes > li").first.wait_for()
        async with page.expect_response("**/api/nodes"):
            pass  # another second's
        assert await page.locator("#access").is_hidden()
        assert "3 machines" in await page.locator("#summary").inner_text()
        assert len(asked) == 4, "it does not ask again"


async def test_adapters_are_added_pinned_and_removed(browser: Browser, there: Mesh, tmp_path: Path) -> None:
    folder = an_adapter(BUNDLED, tmp_path / "letters", 1)
    await there.session(nodes=["a"], adapters=2)
    async with page_of(browser, there, refusals=1) as page:
        await page.locator(".adapters > summary").click()
        await page.get_by_label("Name", exact=True).last.fill("letters")
        await page.get_by_label("Folder on one of its machines").fill(str(tmp_path / "nowhere"))
        await page.get_by_role("button", name="Add adapter").click()
        await page.get_by_role("button", name="All right").click()
        await page.get_by_label("Folder on one of its machines").fill(str(folder))
        await page.get_by_role("button", name="Add adapter").click()
        await page.get_by_role("button", name="Keep loaded: letters").click()
        await page.get_by_role("button", name="Let it give way: letters").wait_for()
        assert "room for 2 at a time" in await page.locator(".adapters > summary").inner_text()
        await page.get_by_role("button", name="Remove: letters").click()
        await page.get_by_role("button", name="Remove adapter").click()
        await until(page, "() => document.querySelector('.adapters').innerText.includes('None is known yet')")
