"""The page: what a browser is given, what it may do with it, and that names of strangers stay text in it."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from motley.orchestrator.api.web import PAGE_PATHS
from motley.orchestrator.app import Orchestrator, OrchestratorConfig
from motley.orchestrator.session_request import SessionRequest
from tests.browser import CHROMIUM, FLAGS

from ..conftest import DEADLINE_S

WEB = files("motley.orchestrator") / "web"
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


async def fetch(http: aiohttp.ClientSession, path: str, **headers: str) -> tuple[aiohttp.ClientResponse, str]:
    async with http.get(path, headers=headers) as response:
        return response, await response.text()


async def test_every_file_is_served_with_a_strict_policy(mesh: Any) -> None:
    types = {"/": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    served = set()
    for path in PAGE_PATHS:
        response, body = await fetch(mesh.http, path)
        assert response.status == 200
        assert response.content_type == types[path.rpartition(".")[2]]
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        served.add(body)
    assert served == {file.read_text("utf-8") for file in WEB.iterdir()}


async def test_nothing_else_is_served(mesh: Any) -> None:
    for path in ("/web/", "/web/index.htm", "/web/../app.py", "/web/%2e%2e/app.py", "/favicon.ico"):
        response, _ = await fetch(mesh.http, path)
        assert (response.status, response.content_type) == (404, "application/json")


async def test_the_page_needs_no_key_but_what_it_shows_does(tmp_path: Path) -> None:
    config = OrchestratorConfig(host="127.0.0.1", grpc_port=0, http_port=0, state_dir=tmp_path, api_key="sesame")
    orchestrator = Orchestrator(config)
    await orchestrator.start()
    try:
        async with aiohttp.ClientSession(orchestrator.http_url) as http:
            for path in PAGE_PATHS:
                assert (await fetch(http, path))[0].status == 200
            for path in ("/api/nodes", "/api/sessions", "/v1/models", "/web/", "/web", "/index.html"):
                assert (await fetch(http, path))[0].status == 401
    finally:
        await orchestrator.stop()


async def test_the_page_is_not_for_other_hosts(mesh: Any) -> None:
    assert (await fetch(mesh.http, "/", Host="evil.example"))[0].status == 403


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed((WEB / "index.html").read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_is_complete_without_a_network_and_obeys_its_policy() -> None:
    tags = Page().tags
    links = {value for _, attributes in tags for name, value in attributes.items() if name in ("src", "href")}
    assert {f"/{link}" for link in links if link and not link.startswith("#")} < PAGE_PATHS
    assert not [tag for tag, _ in tags if tag == "style"]
    assert all("src" in attributes for tag, attributes in tags if tag == "script")
    assert not [name for _, attributes in tags for name in attributes if name == "style" or name.startswith("on")]


def test_scripts_use_only_what_is_there() -> None:
    ids = {attributes["id"] for _, attributes in Page().tags if "id" in attributes}
    for script in (file for file in WEB.iterdir() if file.name.endswith(".js")):
        text = script.read_text("utf-8")
        assert set(re.findall(r"\$\(\"([^\"]+)\"\)", text)) <= ids
        for imported in re.findall(r"from \"\./([^\"]+)\"", text):
            assert f"/web/{imported}" in PAGE_PATHS


def test_every_field_has_a_label() -> None:
    tags = Page().tags
    labels = {attributes.get("for") for tag, attributes in tags if tag == "label"}
    wrapped = re.findall(
        r"<label[^>]*>[^<]*<(?:input|select|textarea)[^>]*name=\"(\w+)\"", (WEB / "index.html").read_text("utf-8")
    )
    for tag, attributes in tags:
        if tag in ("input", "select", "textarea"):
            assert attributes.get("name") in wrapped or attributes.get("id") in labels or "aria-label" in attributes


def test_every_option_of_a_session_is_in_the_form() -> None:
    options = (WEB / "options.js").read_text("utf-8")
    assert sorted(re.findall(r"{ name: \"(\w+)\"", options)) == sorted(own.name for own in fields(SessionRequest))
    for name, kind in re.findall(r"{ name: \"(\w+)\", .*choices: \[(.*?)\]", options):
        first = str(getattr(SessionRequest("any"), name))
        assert kind.split(",")[0].strip('" ') == first, f"what {name} is if nobody chooses"


def test_scripts_never_turn_text_into_markup_or_code() -> None:
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|createContextualFragment|DOMParser|srcdoc|document\.write|\beval\b"
    for script in (file for file in WEB.iterdir() if file.name.endswith(".js")):
        assert not re.search(rf"{sinks}|\bFunction\(|\"on(?!nx)[a-z]+\"", script.read_text("utf-8"))


async def shown(url: str, tmp_path: Path) -> str:
    """What a real browser makes of the page."""
    browser = await asyncio.create_subprocess_exec(
        *(str(CHROMIUM), "--headless", *FLAGS),
        *(f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=3000", "--dump-dom"),
        url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            output, _ = await browser.communicate()
    finally:
        if browser.returncode is None:
            browser.kill()
    return output.decode()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
async def test_hostile_names_are_text_in_a_real_browser(mesh: Any, new_node: Any, tmp_path: Path) -> None:
    await mesh.join(new_node(HOSTILE))
    await mesh.serve(name=HOSTILE)
    page = await shown(mesh.orchestrator.http_url, tmp_path)
    escaped = HOSTILE.replace("<", "&lt;").replace(">", "&gt;")
    assert page.count(f">{escaped}</h3>") == 2  # the node and the session
    assert "<title>Motley</title>" in page
    assert page.count("<img") == 1  # the logo


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
async def test_a_node_that_is_forgotten_has_a_colour_where_a_session_names_it(
    mesh: Any, bard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.orchestrator.mesh.nodes.FORGET_S", 0.0)
    await bard.leave()
    await mesh.poll("/api/nodes", lambda body: not body["nodes"])
    page = await shown(mesh.orchestrator.http_url, tmp_path)
    assert 'class="swatch c-forgotten"' in page
    assert "undefined" not in page
