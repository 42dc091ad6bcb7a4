"""The page is for everybody: on a phone, in light and dark, to a screen reader, and by keyboard alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from motley.cli.reaching.client import Client
from tests.e2e.faces.browsing import DESKTOP, PHONE, page_of, until, what_axe_finds
from tests.e2e.processes import BUNDLED, Mesh

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page


async def test_on_a_phone_the_chat_is_a_touch_away(browser: Browser, there: Mesh) -> None:
    await there.session(nodes=["a"])
    async with page_of(browser, there, PHONE) as page:
        await page.locator("#send:not([disabled])").wait_for()
        await page.mouse.wheel(0, 700)  # wherever one is
        await page.get_by_role("link", name="Chat").tap()
        await until(
            page,
            """() => {
                const box = (of) => document.querySelector(of).getBoundingClientRect();
                return box("#chat-title").top >= box("nav").bottom && box("#send").bottom <= innerHeight;
            }""",
        )
        assert await page.locator("#prompt").get_attribute("placeholder") == (
            "A text for the model to continue: it was not trained to chat."
        ), "there is no Shift+Enter"


CUT_OFF = """() => [...document.querySelectorAll('input, textarea')]
    .filter((each) => each.placeholder && !each.value && each.checkVisibility())
    .filter((each) => {
        const { type, placeholder } = each;
        if (type !== 'textarea') each.type = 'text';
        each.value = placeholder;
        const cut = each.scrollWidth > each.clientWidth || each.scrollHeight > each.clientHeight + 1;
        each.value = '';
        if (type !== 'textarea') each.type = type;
        return cut;
    }).map((each) => each.placeholder)"""
"""Placeholders that have no room."""

BEYOND = """() => [...document.querySelectorAll('body *')]
    .filter((each) => each.checkVisibility() && !each.closest('.scroll, .unseen'))
    .filter((each) => each.getBoundingClientRect().right > innerWidth + 1)
    .map((each) => each.outerHTML.slice(0, 80))"""
"""What is wider than the window."""

OVER_THE_EDGE = """() => [...document.querySelectorAll('.panel *')]
    .filter((each) => each.checkVisibility() && !each.closest('.scroll, .unseen, svg, .bar'))
    .filter((each) => each.getBoundingClientRect().right > each.closest('.panel').getBoundingClientRect().right)
    .map((each) => each.outerHTML.slice(0, 80))"""
"""What is wider than the panel that it is in."""

BETWEEN = (1100, 800)
"""Just wide enough for the chat beside the machines."""
SMALL_WINDOW = (360, 700)
"""Of a computer with a keyboard."""

FITS = [
    (DESKTOP, "light"),
    pytest.param(BETWEEN, "light", marks=pytest.mark.soak),  # at every commit the first page is made so narrow
    pytest.param(SMALL_WINDOW, "light", marks=pytest.mark.soak),
    pytest.param(DESKTOP, "dark", marks=pytest.mark.soak),
    pytest.param(PHONE, "light", marks=pytest.mark.soak),
    (PHONE, "dark"),
]


@pytest.mark.parametrize(("size", "scheme"), FITS)
async def test_everything_fits_in_light_and_dark(
    size: tuple[int, int], scheme: str, browser: Browser, there: Mesh, tmp_path: Path
) -> None:
    await there.session(nodes=["a", "b", "c"], adapters=2)
    async with Client(there.url) as client:
        await client.call("POST", "/v1/completions", {"model": BUNDLED.name, "prompt": "ROMEO:", "max_tokens": 40})
    async with page_of(browser, there, size, scheme) as page:
        await page.locator("#sessions figure polyline").wait_for(state="attached")
        await page.locator("#new > summary").click()
        await page.get_by_text("All settings").click()
        for part in await page.locator("#access summary, .adapters > summary").all():
            await part.click()
        await page.get_by_role("button", name="Make a token").click()
        await page.locator("#new-token-made code").wait_for()
        await page.locator("#chat summary").get_by_text("Settings").click()
        await page.get_by_label("Max tokens").fill("20")
        await page.locator("#prompt").fill("A-very-long-word-without-a-break-" * 8)
        await page.locator("#prompt").press("Enter")
        await until(page, "() => document.querySelector('#log').innerText.includes('tokens')")
        await until(page, "() => document.querySelector('#again').checkVisibility()")  # as full as it gets
        if size == DESKTOP:
            await page.set_viewport_size({"width": BETWEEN[0], "height": BETWEEN[1]})
            await assert_all_fits(page)
            await page.set_viewport_size({"width": DESKTOP[0], "height": DESKTOP[1]})
        await assert_all_fits(page)
        ground, ink = await page.evaluate(
            "() => ['backgroundColor', 'color'].map((name) => getComputedStyle(document.body)[name])"
        )
        assert (_lightness(ground) > _lightness(ink)) == (scheme == "light")
        if folder := os.environ.get("MOTLEY_SCREENSHOTS"):
            await page.screenshot(path=Path(folder) / f"{size[0]}-{scheme}.png", full_page=True)
        assert await what_axe_finds(page) == ""
        await page.get_by_role("button", name="Close session").click()
        asked = await page.locator("#confirm").bounding_box() or {}
        assert asked["x"] >= 8
        assert asked["x"] + asked["width"] <= size[0] - 8


async def assert_all_fits(page: Page) -> None:
    assert await page.evaluate(BEYOND) == []
    assert await page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert await page.evaluate(
        "() => [...document.querySelectorAll('.scroll, pre')].every((each) => each.scrollWidth <= each.clientWidth)"
    )
    assert await page.evaluate(CUT_OFF) == []
    assert await page.evaluate(OVER_THE_EDGE) == []
    again, send = [await page.locator(each).bounding_box() or {} for each in ("#again", "#send")]
    assert abs(again["y"] - send["y"]) < 1, "they are in one line"


async def test_a_banner_hides_nothing_of_the_chat(browser: Browser, there: Mesh) -> None:
    async with page_of(browser, there, DESKTOP, refusals=None) as page:
        await page.route("**/api/**", lambda route: route.abort())
        await page.locator("#banner").wait_for()
        for scrolled in (0, 300):
            await page.evaluate("(to) => scrollTo(0, to)", scrolled)
            banner, chat = [await page.locator(each).bounding_box() or {} for each in ("#banner", "#chat")]
            assert banner["y"] + banner["height"] <= chat["y"]
            assert chat["y"] + chat["height"] <= DESKTOP[1], "all of it is seen"


def _lightness(colour: str) -> int:
    """Of ``rgb(1, 2, 3)``."""
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))


async def test_a_session_is_made_talked_to_and_closed_by_keyboard_alone(browser: Browser, there: Mesh) -> None:
    async with page_of(browser, there, refusals=None) as page:  # it may look at the session while that is closed
        press, write = page.keyboard.press, page.keyboard.type
        await _tab_to(page, "Model")  # the form is open where nothing is served yet
        await write(str(BUNDLED))
        await _tab_to(page, "Context, tokens")
        await write("256")
        await _tab_to(page, "All settings")
        await press("Enter")
        await _tab_to(page, "Cache format")
        await press("ArrowDown")
        await _tab_to(page, "Start session")
        await press("Enter")
        await page.locator("#sessions article.ready").wait_for()
        async with Client(there.url) as client:
            (session,) = await client.sessions()
        assert (session["context"], session["cache_format"]) == (256, "fp16")

        await page.route("**/v1/completions", lambda _: None)  # no answer comes, so that there is time to stop it
        await _tab_to(page, "Message")
        await write("ROMEO:")
        await press("Enter")
        await _tab_to(page, "Stop")
        await press("Enter")
        await until(page, "() => document.querySelector('#log .assistant .note').innerText === 'stopped'")
        await page.unroute("**/v1/completions")
        assert await _focused(page) == "Send", "it stands where Stop stood"
        await press("Enter")
        await until(page, "() => document.querySelector('#log').lastChild.innerText.includes('own limit')")
        await _tab_to(page, "Clear", back=True)
        await press("Space")
        assert await page.locator("#log > *").count() == 0

        await _tab_to(page, f"Close session {BUNDLED.name}", back=True)
        await press("Enter")
        assert await _focused(page) == "Cancel", "a question holds the focus"
        await _tab_to(page, "Close session")
        await press("Enter")
        await page.locator("#no-sessions").wait_for()


FOCUSED = """() => {
    const { activeElement: at } = document;
    const named = at.ariaLabel ?? at.labels?.[0]?.firstChild.textContent ?? at.textContent;
    return { name: named.trim(), seen: at === document.body || getComputedStyle(at).outlineStyle !== "none" };
}"""
MOST_STOPS = 100


async def _focused(page: Page) -> str:
    """The name of what the keyboard acts on, which a person has to see."""
    at = await page.evaluate(FOCUSED)
    assert at["seen"], f"nothing shows that {at['name']!r} has the focus"
    return at["name"]


async def _tab_to(page: Page, name: str, back: bool = False) -> None:
    """Press Tab, or Shift and Tab, until what is named so has the focus."""
    passed = []
    for _ in range(MOST_STOPS):
        await page.keyboard.press("Shift+Tab" if back else "Tab")
        passed.append(await _focused(page))
        if passed[-1] == name:
            return
    pytest.fail(f"Tab does not lead to {name!r}, but to {passed}")
