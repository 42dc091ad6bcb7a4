"""A real browser with the page of a mesh: what tests of the page share. The fixture `browser` is in conftest.py."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tests.browser import CHROMIUM, FLAGS
from tests.e2e.processes import Mesh

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

DESKTOP, PHONE = (1280, 900), (360, 740)
SOON_MS = 60_000
"""Enough on a busy machine; the page itself asks every second."""


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    try:
        from playwright.async_api import async_playwright
    except ImportError:
        _missing("Playwright is not installed: pip install motley-mesh[dev]")
    if CHROMIUM is None:
        _missing("there is no Chromium: apt-get install chromium-headless-shell")
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        await opened.close()


def _missing(what: str) -> None:
    """Somebody without a browser tests the rest; CI has one."""
    if "CI" in os.environ:
        pytest.fail(what)
    pytest.skip(what)


@asynccontextmanager
async def page_of(
    browser: Browser, there: Mesh, size: tuple[int, int] = DESKTOP, scheme: str = "light", refusals: int | None = 0
) -> AsyncIterator[Page]:
    """The page, drawn from the mesh once. Errors in its console fail the test, but so many requests that are refused
    (None: any number), which the browser notes there by itself."""
    width, height = size
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        has_touch=size == PHONE,
    )
    try:
        page = await context.new_page()
        page.set_default_timeout(SOON_MS)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type in ("error", "warning") else None)
        await page.goto(there.url)
        await page.locator("#nodes > li").first.wait_for()
        yield page
        assert all(said.startswith("Failed to load resource") for said in errors), errors
        assert refusals in (None, len(errors)), errors
    finally:
        await context.close()


async def text_of(page: Page, selector: str) -> str:
    return await page.locator(selector).inner_text()


async def until(page: Page, condition: str, *arguments: object) -> None:
    """Wait for a JavaScript function of `arguments` to be true in the page."""
    await page.wait_for_function(f"(values) => ({condition})(...values)", arg=list(arguments), polling=100)


async def what_axe_finds(page: Page) -> str:
    """What a screen reader or weak eyes cannot make out on the page as it is now, in light and dark; "": nothing.

    It is axe-core that looks (https://github.com/dequelabs/axe-core), for the rules of WCAG and for good practice.
    """
    from axe_playwright_python.async_playwright import Axe

    found = ""
    for scheme, options in (("light", {"resultTypes": ["violations"]}), ("dark", {"runOnly": ["color-contrast"]})):
        await page.emulate_media(color_scheme=scheme)
        results = await Axe().run(page, options=options)
        if results.violations_count:
            found += f"In {scheme}: {results.generate_report()}\n"
    return found
