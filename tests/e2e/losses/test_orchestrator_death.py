"""Sessions live on their own links: cuts of the control plane and the orchestrator's death do not end their ranks."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest

from motley.cli.reaching.client import Client
from tests.e2e.faces.browsing import page_of, text_of, until
from tests.e2e.losses.test_survival import GREEDY, SAMPLED, streamed, undisturbed, worker_of
from tests.e2e.processes import BUNDLED, Mesh, MotleyProcess, mesh

if TYPE_CHECKING:
    from playwright.async_api import Browser


def workers(there: Mesh, *names: str) -> list[psutil.Process]:
    return [worker_of(there.nodes[name]) for name in names]


async def session_of(there: Mesh, number: str) -> dict[str, Any]:
    async with Client(there.url) as client:
        told: dict[str, Any] = await client.call("GET", f"/api/sessions/{number}")
        return told


async def until_ready(there: Mesh, number: str) -> dict[str, Any]:
    """The session, once it is ready and nobody is cut off."""
    async with asyncio.timeout(90):
        while True:
            told = await session_of(there, number)
            if told["state"] == "ready" and all(rank["state"] == "ready" for rank in told["ranks"]):
                return told
            await asyncio.sleep(0.1)


async def until_one_worker(node: MotleyProcess) -> None:
    async with asyncio.timeout(30):
        while True:
            if len(node.workers()) == 1:
                return
            await asyncio.sleep(0.1)


async def restarted(there: Mesh, folder: Path) -> None:
    """Start the orchestrator again where it was, with the same state."""
    ports = (there.target.rpartition(":")[2], re.search(r":(\d+)$", there.url)[1])  # type: ignore[index]
    arguments = ("up", "--no-node", "--host", "127.0.0.1", "--port", ports[0], "--http-port", ports[1])
    there.orchestrator = await MotleyProcess.start(*arguments, "--state", str(folder / "state"))
    await there.orchestrator.line(r"API: http://")


async def test_a_killed_orchestrator_takes_its_sessions_up_again(tmp_path: Path) -> None:
    """The same session, epoch and processes; one whose rank ended meanwhile is planned anew; ranks of a session that
    nobody knows are ended."""
    async with mesh(tmp_path, "a", "b", "c") as there:
        session = await there.session(nodes=["a", "b"], exact=True, name="kept")
        other = await there.session(nodes=["c"], name="other")
        forgotten = await there.session(nodes=["c"], name="forgotten")
        texts = [await undisturbed(there.url, {**body, "model": "kept"}) for body in (GREEDY, SAMPLED)]
        before = workers(there, "a", "b")
        of_c = there.nodes["c"].workers()
        assert len(of_c) == 2
        (tmp_path / "state" / "sessions" / f"{forgotten['id']}.json").unlink()
        await there.orchestrator.end(signal.SIGKILL)
        min(of_c, key=lambda process: process.create_time()).kill()
        await restarted(there, tmp_path)
        told = await until_ready(there, session["id"])
        assert (told["epoch"], told["name"], told["losses"]) == (1, "kept", [])
        assert workers(there, "a", "b") == before
        assert [await undisturbed(there.url, {**body, "model": "kept"}) for body in (GREEDY, SAMPLED)] == texts
        told = await until_ready(there, other["id"])
        assert told["epoch"] == 2
        assert told["losses"][0]["message"] == "node 'c' (rank 0): its worker process was killed by signal 9"
        await until_one_worker(there.nodes["c"])
        async with Client(there.url) as client:
            names = {each["name"] for each in (await client.call("GET", "/api/sessions"))["sessions"]}
            assert names == {"kept", "other"}
            await client.call("DELETE", f"/api/sessions/{session['id']}")
        kept = [json.loads(file.read_bytes())["name"] for file in (tmp_path / "state" / "sessions").iterdir()]
        assert kept == ["other"]


async def test_a_stopped_orchestrator_begins_its_sessions_anew(tmp_path: Path) -> None:
    """As a service manager stops and starts it; what was closed before stays so."""
    async with mesh(tmp_path, "a") as there:
        await there.session(name="kept")
        closed = await there.session(name="closed")
        expected = await undisturbed(there.url, {**GREEDY, "model": "kept"})
        async with Client(there.url) as client:
            await client.call("DELETE", f"/api/sessions/{closed['id']}")
        assert await there.orchestrator.end(signal.SIGTERM) == 130
        await restarted(there, tmp_path)
        async with Client(there.url) as client, asyncio.timeout(60):
            while True:
                if listed := (await client.call("GET", "/api/sessions"))["sessions"]:
                    break
                await asyncio.sleep(0.1)
        assert [each["name"] for each in listed] == ["kept"]
        await until_ready(there, listed[0]["id"])
        assert await undisturbed(there.url, {**GREEDY, "model": "kept"}) == expected
        assert len(there.nodes["a"].workers()) == 1


@pytest.mark.soak
async def test_a_cut_of_the_control_plane_alone_ends_no_stream(tmp_path: Path) -> None:
    """The orchestrator stands still for longer than nodes wait for it: they come back, ranks are what they were, and
    what was being written goes on, token by token."""
    async with mesh(tmp_path, "a", "b") as there:
        session = await there.session(nodes=["a", "b"], exact=True)
        expected = await undisturbed(there.url, SAMPLED)
        before = workers(there, "a", "b")

        def cut() -> None:
            there.orchestrator.process.send_signal(signal.SIGSTOP)
            asyncio.get_running_loop().call_later(12, there.orchestrator.process.send_signal, signal.SIGCONT)

        text, told = await streamed(there.url, SAMPLED, 20, cut)
        assert text == expected
        assert told == SAMPLED["max_tokens"]
        assert workers(there, "a", "b") == before
        assert (await until_ready(there, session["id"]))["epoch"] == 1


async def test_a_machine_that_does_not_come_back_is_lost_to_a_restarted_orchestrator(tmp_path: Path) -> None:
    async with mesh(tmp_path, "a", "b") as there:
        session = await there.session(nodes=["a", "b"], exact=True, model=str(BUNDLED))
        expected = await undisturbed(there.url, GREEDY)
        await there.orchestrator.end(signal.SIGKILL)
        await there.nodes.pop("b").kill()
        await restarted(there, tmp_path)
        told = await until_ready(there, session["id"])
        assert told["epoch"] == 2
        assert [rank["node"] for rank in told["ranks"]] == ["a"]
        lost = "node 'b' (rank 1) is lost: it has not come back since the orchestrator was started again"
        assert told["losses"][0]["message"] == lost, "and not a, whose rank has ended because of that"
        assert await undisturbed(there.url, GREEDY) == expected


@pytest.mark.soak
async def test_an_answer_is_taken_up_after_the_orchestrator_s_death(tmp_path: Path) -> None:
    """By its key, from the first token on or from the last event that the client has, with its log-probabilities."""
    async with mesh(tmp_path, "a", "b") as there:
        session = await there.session(nodes=["a", "b"], exact=True)
        async with Client(there.url) as client:
            expected = (await client.call("POST", "/v1/completions", SAMPLED))["choices"][0]
        body, headers = {**SAMPLED, "stream": True}, {"Idempotency-Key": "mine"}
        has: list[dict[str, Any]] = []
        async with aiohttp.ClientSession(there.url) as http:
            with suppress(aiohttp.ClientError):
                async with http.post("/v1/completions", json=body, headers=headers) as response:
                    async for line in response.content:
                        if line.startswith(b"data: "):
                            has.append(json.loads(line[6:]))
                        if len(has) == 30:
                            there.orchestrator.process.kill()
            assert 30 <= len(has) < SAMPLED["max_tokens"]
            await there.orchestrator.wait()
            await restarted(there, tmp_path)
            headers["Last-Event-ID"] = str(len(has))
            async with http.post("/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200
                lines = (await response.text()).splitlines()
            has += [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert "".join(event["choices"][0]["text"] for event in has) == expected["text"]
            whole = {**headers, "Last-Event-ID": "0"}
            async with http.post("/v1/completions", json=body, headers=whole) as response:
                lines = (await response.text()).splitlines()
            told = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        rows = [choice["logprobs"] for choice in told if choice["logprobs"]]
        assert [value for row in rows for value in row["token_logprobs"]] == expected["logprobs"]["token_logprobs"]
        assert (await until_ready(there, session["id"]))["epoch"] == 1


@pytest.mark.soak
async def test_after_a_power_cut_everything_wanted_is_there_again(tmp_path: Path) -> None:
    """All processes are killed; the node needs no token to come back, clients need no other key."""
    home = str(tmp_path / "home of a")
    async with mesh(tmp_path) as there:
        await there.join("a", MOTLEY_HOME=home)
        session = await there.session()
        async with Client(there.url) as client:
            key = await client.call("POST", "/api/keys", {"note": "a client"})
        await there.orchestrator.kill()
        await there.nodes["a"].kill()
        await restarted(there, tmp_path)
        there.token = ""
        await there.join("a", MOTLEY_HOME=home)
        again = await until_ready(there, session["id"])
        assert again["name"] == session["name"]
        async with Client(there.url) as client:
            assert [each["id"] for each in (await client.call("GET", "/api/keys"))["keys"]] == [key["id"]]
            assert [each["name"] for each in (await client.call("GET", "/api/members"))["members"]] == ["a"]
            request = {"model": BUNDLED.name, "prompt": "ROMEO:", "max_tokens": 5}
            answer = await client.call("POST", "/v1/completions", request)
        assert answer["choices"][0]["text"]


@pytest.mark.soak
async def test_a_chat_of_the_page_goes_on_where_it_stood(browser: Browser, tmp_path: Path) -> None:
    async with mesh(tmp_path, "a", "b") as there:
        await there.session(nodes=["a", "b"])
        async with page_of(browser, there, refusals=None) as page:
            await page.get_by_label("Max tokens").fill("300")
            await page.locator("#prompt").fill("ROMEO:")
            await page.locator("#prompt").press("Enter")
            await until(page, "() => document.querySelector('#log .assistant .words').innerText.length > 40")
            await there.orchestrator.kill()
            await until(page, "() => document.querySelector('#log').innerText.includes('The orchestrator is away')")
            before = await text_of(page, "#log .assistant .words")
            await restarted(there, tmp_path)
            await until(page, "() => document.querySelector('#log').innerText.includes('300 tokens')")
            assert (await text_of(page, "#log .assistant .words")).startswith(before)
