"""The page while a model, or the orchestrator, is away: what it shows is nobody else's, and it goes on by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e.faces.browsing import page_of, text_of, until, what_axe_finds
from tests.e2e.processes import Mesh

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page, Route

CHOSEN = "() => document.querySelector('#chat-model').selectedOptions[0].text"


async def test_the_model_that_is_talked_to_stays_chosen(browser: Browser, there: Mesh) -> None:
    """While its session is planned anew, as after a restart of the orchestrator, and when it is gone."""
    for name in ("first", "second"):
        await there.session(nodes=["a"], name=name)
    state: str | None = "connecting"

    async def unready(route: Route) -> None:
        sessions = (await (await route.fetch()).json())["sessions"]
        kept = [each for each in sessions if each["name"] == "first" or state]
        await route.fulfill(
            json={"sessions": [each | ({"state": state} if each["name"] != "first" else {}) for each in kept]}
        )

    async with page_of(browser, there) as page:
        await page.locator("#send:not([disabled])").wait_for()
        await page.locator("#chat-model").select_option("second")
        await page.route("**/api/sessions", unready)
        await page.locator("#send[disabled]").wait_for()
        assert await page.evaluate(CHOSEN) == "second (connecting)"
        assert await text_of(page, "#chat-waits") == (
            "second is not ready yet. Your message can be sent as soon as it is."
        )
        await page.locator("#prompt").fill("ROMEO:")
        await page.locator("#prompt").press("Enter")
        assert await page.input_value("#prompt") == "ROMEO:", "it waits to be sent"
        assert await page.locator("#log > *").count() == 0
        assert await what_axe_finds(page) == ""

        state = "ready"
        await page.locator("#send:not([disabled])").wait_for()
        assert await page.evaluate(CHOSEN) == "second"
        assert await page.locator("#chat-waits").is_hidden()

        state = None
        await page.locator("#send[disabled]").wait_for()
        assert await page.evaluate(CHOSEN) == "second (not served)"
        assert "second is not served now. Choose another model" in await text_of(page, "#chat-waits")
        await page.locator("#chat-model").select_option("first")
        assert await page.locator("#send").is_enabled()
        assert await page.locator("#chat-waits").is_hidden()


async def test_what_fits_is_planned_again_when_the_orchestrator_is_back(browser: Browser, there: Mesh) -> None:
    """And when there are other machines."""
    answers = False

    async def one(route: Route) -> None:
        models = (await (await route.fetch()).json())["models"]
        await route.fulfill(json={"models": [each for each in models if each["name"] == "qwen2.5-0.5b"]})

    async def plan(route: Route) -> None:
        await (route.continue_() if answers else route.abort())

    async with page_of(browser, there, refusals=None) as page:
        await page.route("**/api/known-models", one)
        await page.route("**/api/plan", plan)
        await page.get_by_text("What fits on these machines").click()
        await until(page, "() => document.querySelector('#fit-told').innerText.startsWith('The orchestrator does not')")
        answers = True
        fits = "() => document.querySelector('#fit-told').innerText.startsWith('1 model of 1 would fit')"
        await until(page, fits)
        async with page.expect_request("**/api/plan"):
            await there.join("d")
        await until(page, fits)


async def test_an_orchestrator_that_is_away_is_asked_less_and_less_often(browser: Browser, there: Mesh) -> None:
    """One call at a time, each of which the browser notes in its console."""
    asked: list[str] = []

    async def nobody(route: Route) -> None:
        asked.append(route.request.url.removeprefix(there.url))
        await route.abort()

    async with page_of(browser, there, refusals=None) as page:
        await page.clock.install(time=0)
        await page.route("**/api/**", nobody)
        await page.locator("#banner").wait_for()
        assert "Trying again every few seconds." in await text_of(page, "#banner")
        await page.clock.pause_at(3600)  # from here on, time passes as the test says
        waited = [await _seconds_until_asked(page, asked) for _ in range(6)]
        assert min(waited[-3:]) >= 4, waited
        assert asked[-3:] == ["/api/nodes"] * 3


async def _seconds_until_asked(page: Page, asked: list[str]) -> int:
    """How far the page's clock has to go."""
    before, seconds = len(asked), 0
    while len(asked) == before:
        await page.clock.run_for(1000)
        seconds += 1
    return seconds
