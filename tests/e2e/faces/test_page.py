"""The page in a real browser, on a real mesh: what a person sees and clicks."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from motley.bench.random_models.writing import synthesise
from motley.cli.reaching.client import Client
from motley.orchestrator.known_models.shapes import SHAPES
from tests.e2e.answers.test_experts import CONTEXT, SMALL
from tests.e2e.faces.browsing import DESKTOP, PHONE, page_of, text_of, until, what_axe_finds
from tests.e2e.processes import BUNDLED, Mesh, chatting_model

if TYPE_CHECKING:
    from playwright.async_api import Browser, Route


async def test_nodes_and_shares_are_shown(browser: Browser, there: Mesh) -> None:
    session = await there.session(nodes=["a", "b", "c"], shares=[3, 2, 1])
    async with page_of(browser, there) as page:
        assert "3 machines" in await text_of(page, "#summary")
        assert "1 model ready" in await text_of(page, "#summary")
        cards = await page.locator("#nodes > li").all()  # in the order in which they joined
        nodes = {await node.locator("h3").inner_text(): node for node in cards}
        assert sorted(nodes) == ["a", "b", "c"]
        for rank, name in enumerate("abc"):
            assert await nodes[name].locator(".badge").inner_text() == "alive"
            assert f"Serves\n{BUNDLED.name}" in await nodes[name].inner_text()
            held = f"{100 * session['ranks'][rank]['share']['fraction']:.1f} %"
            assert f"{name} holds {held}" in (await page.locator("#picture svg").get_attribute("aria-label") or "")
        assert await page.locator("#picture .link").count() == 3
        areas = [float(await disc.get_attribute("r") or "") ** 2 for disc in await page.locator("circle.held").all()]
        shares = [rank["share"]["fraction"] for rank in session["ranks"]]
        assert sorted(area / sum(areas) for area in areas) == pytest.approx(sorted(shares), abs=0.01)
        card = page.locator("#sessions article")
        assert await card.locator(".badge").inner_text() == "ready"
        fractions = [f"{100 * rank['share']['fraction']:.1f} %" for rank in session["ranks"]]
        told = [await piece.get_attribute("title") for piece in await card.locator(".cut > span").all()]
        assert told == [f"{name}: {fractions[rank]}" for rank, name in enumerate("abc")]
        widths = [(await piece.bounding_box() or {})["width"] for piece in await card.locator(".cut > span").all()]
        assert widths == sorted(widths, reverse=True)
        rows = [await row.inner_text() for row in await card.locator(".ranks > li").all()]
        assert all(fraction in row for fraction, row in zip(fractions, rows, strict=True))


async def test_a_chat_is_streamed_stopped_and_cleared(browser: Browser, there: Mesh) -> None:
    await there.session(nodes=["a", "b"])
    async with page_of(browser, there) as page:
        await page.locator("#send:not([disabled])").wait_for()
        assert await page.input_value("#chat-model") == BUNDLED.name
        prompt, said = page.locator("#prompt"), page.locator("#log .assistant")
        await page.get_by_label("Max tokens").fill("24")
        await prompt.fill("ROMEO:")
        await prompt.press("Shift+Enter")
        await prompt.press("Enter")
        await until(page, "() => / tokens? · .*first after/.test(document.querySelector('#log').innerText)")
        assert await prompt.input_value() == ""
        await page.locator("#send").wait_for()
        await until(page, "() => document.querySelector('#log').innerText.includes('cut at max tokens')")
        assert "24 tokens" in await said.inner_text()
        assert await text_of(page, "#log .user .words") == "ROMEO:\n"
        assert len(await said.locator(".words").inner_text()) > 24
        # What a token's time went into is known now, and drawn; and what the caches hold.
        await page.locator("#sessions .time").first.wait_for()
        await until(page, "() => document.querySelectorAll('.timeline path').length === 6")  # two machines, three parts
        assert await page.locator(".timeline li").all_inner_texts() == ["a", "b"]
        await page.locator("#sessions figure polyline").wait_for(state="attached")
        await until(page, "() => document.querySelector('.tally').innerText.includes('Tokens generated\\n24')")
        caches = await page.locator(".blocks").get_attribute("aria-label") or ""
        assert re.fullmatch(r"0 in use, [1-9]\d* kept for prompts that begin alike, \d+ free", caches)
        assert [await each.inner_text() for each in await page.locator(".tally dd").all()][:2] == ["0", "0"]

        await page.get_by_label("Max tokens").fill("900")
        await prompt.fill("JULIET:")
        await page.get_by_role("button", name="Send").click()
        await until(page, "() => [...document.querySelectorAll('.assistant .words')].at(-1).innerText.length > 5")
        half = await said.last.locator(".words").inner_text()
        await until(
            page,
            "(half) => [...document.querySelectorAll('.assistant .words')].at(-1).innerText.length > half",
            len(half),
        )
        await page.get_by_role("button", name="Stop").click()
        await until(page, "() => document.querySelector('#log').innerText.includes('stopped')")
        await page.locator("#send").wait_for()
        assert await page.locator("#stop").is_hidden()
        await page.get_by_label("Max tokens").fill("8")
        await page.get_by_role("button", name="Answer again").click()
        await until(page, "() => document.querySelector('#log').lastChild.innerText.includes('8 tokens')")
        assert await text_of(page, "#log .user:nth-last-child(2) .words") == "JULIET:"
        assert await said.count() == 2

        await page.get_by_role("button", name="Clear").click()
        assert await page.locator("#log > *").count() == 0
        await page.get_by_label("Max tokens").fill("4")
        await prompt.fill("KING:")
        await page.get_by_role("button", name="Send").click()
        await until(page, "() => document.querySelector('#log').innerText.includes('4 tokens')")
        assert await said.count() == 1

        await page.get_by_label("Max tokens").fill("")  # as it is at first
        await prompt.fill("QUEEN:")
        await page.get_by_role("button", name="Send").click()
        await until(page, "() => document.querySelector('#log').innerText.includes('own limit')")
        await page.get_by_role("button", name="Clear").click()
        await prompt.fill("QUEEN:\n" * 280)
        await page.get_by_role("button", name="Send").click()
        await until(page, "() => document.querySelector('#log').innerText.includes('the context is full')")


async def test_a_model_with_a_template_is_talked_to_and_a_base_model_continues(
    browser: Browser, there: Mesh, tmp_path: Path
) -> None:
    """Both see all that was said."""
    models = {chatting_model(tmp_path): "user: KING:\nassistant: {}\nuser: QUEEN:\n", BUNDLED: "KING:{}\nQUEEN:"}
    for model in models:
        await there.session(model=str(model), nodes=["a"])
    async with page_of(browser, there) as page, Client(there.url) as client:
        await page.get_by_label("Max tokens").fill("8")
        await page.get_by_label("Temperature").fill("0")
        said = page.locator("#log .assistant .words")
        for model, prompt in models.items():
            await page.locator("#chat-model").select_option(model.name)
            for count, words in enumerate(("KING:", "QUEEN:"), start=1):
                await page.locator("#prompt").fill(words)
                await page.locator("#prompt").press("Enter")
                await until(page, "(count) => document.querySelectorAll('#log .assistant').length === count", count)
                await until(page, "() => document.querySelector('#log').lastChild.innerText.includes('8 tokens')")
                await page.locator("#send").wait_for()
            texts = [await words.text_content() or "" for words in await said.all()]
            if model != BUNDLED:  # a chat is shown as markdown, in which ends of lines are elements
                texts = [await words.inner_text() for words in await said.all()]
            asked = {"model": model.name, "prompt": prompt.format(texts[0]), "max_tokens": 8, "temperature": 0}
            answer = await client.call("POST", "/v1/completions", asked)
            same_words = answer["choices"][0]["text"].split() == texts[1].split()
            assert same_words if model != BUNDLED else answer["choices"][0]["text"] == texts[1]
            await page.get_by_role("button", name="Clear").click()


async def test_a_machine_joins_and_dies(browser: Browser, there: Mesh) -> None:
    async with page_of(browser, there) as page:
        assert await page.locator("#nodes > li").count() == 3
        node = await there.join("d")
        card = page.locator("#nodes > li", has_text="d").filter(has=page.get_by_role("heading", name="d", exact=True))
        await card.wait_for()
        assert await page.locator("#picture circle.ring").count() == 4
        await card.locator("summary").click()
        await card.get_by_role("button", name="Have it leave: d").click()
        assert "leave" in await text_of(page, "#confirm")
        await page.get_by_role("button", name="Cancel").click()
        await node.kill()
        await card.locator(".badge.lost").wait_for()
        assert "Lost" in await card.inner_text()
        assert "motley join" in await card.inner_text(), "what to do"
        assert await page.locator("#picture .lost").count() == 1
        assert await what_axe_finds(page) == ""


MARKDOWN = [
    ("a **bold** and *it* `co*d*e`", "<p>a <strong>bold</strong> and <em>it</em> <code>co*d*e</code></p>"),
    ("# One\ntwo\nthree", "<h4>One</h4><p>two<br>three</p>"),
    ("- a\n- b\n  1. c\n  2. d\n\nend", "<ul><li>a</li><li>b<ol><li>c</li><li>d</li></ol></li></ul><p>end</p>"),
    ("3. x\n\n   y", '<ol start="3"><li>x<p>y</p></li></ol>'),
    ("> q\n> r", "<blockquote><p>q<br>r</p></blockquote>"),
    ("```py\nif a < b:\n  *x*", '<pre tabindex="0" data-language="py"><code>if a &lt; b:\n  *x*</code></pre>'),
    ("~~~\n```\n~~~\nx", '<pre tabindex="0"><code>```</code></pre><p>x</p>'),
    ("snake_case_name 2 * 3 * 4 \\*no\\*", "<p>snake_case_name 2 * 3 * 4 *no*</p>"),
    ("---", "<hr>"),
    ("<img src=x onerror=alert(1)> <b>", "<p>&lt;img src=x onerror=alert(1)&gt; &lt;b&gt;</p>"),
    ("[x](javascript:alert(1)) ![y](data:a)", "<p>[x](javascript:alert(1)) ![y](data:a)</p>"),
]
LINK = '<a href="{0}" rel="noopener noreferrer nofollow" target="_blank">{1}</a>'
LINKS = LINK.format("https://a.b/c_(d)", "<strong>x</strong>"), LINK.format("https://e.f/g_h", "https://e.f/g_h")
HEAD = '<thead><tr><th scope="col">a</th><th scope="col">b</th></tr></thead>'
TABLE = f"<table>{HEAD}<tbody><tr><td>1</td><td><code>x</code></td></tr></tbody></table>"
MARKDOWN += [
    ("[**x**](https://a.b/c_(d)) https://e.f/g_h.", f"<p>{LINKS[0]} {LINKS[1]}.</p>"),
    ("|a|b|\n|-|:-:|\n|1|`x`|", f'<div class="scroll" tabindex="0">{TABLE}</div>'),
]


async def test_markdown_becomes_elements_and_nothing_else(browser: Browser, there: Mesh) -> None:
    async with page_of(browser, there) as page:
        made = await page.evaluate(
            """async (texts) => {
                const { markdown } = await import("./web/markdown.js");
                return texts.map((text) => markdown(text).map((each) => each.outerHTML).join(""));
            }""",
            [text for text, _ in MARKDOWN] + ["*" * 5000 + "`" * 5000 + "> " * 5000 + "[" * 5000],
        )
    assert made[:-1] == [html for _, html in MARKDOWN]


PACES: list[
    tuple[int, list[str], float | None, str]
] = [  # tokens, the pieces of text with when they come, mean ms per token, what is said
    (1, ["", "Yes"], None, r"^1 token · first after [\d.]+ ms$"),
    (3, ["", "Yes"], None, r"^3 tokens · first after [\d.]+ ms$"),
    (5, ["", "Yes", ", ", "no"], 250.0, r"^5 tokens · 4\.0 tokens/s · first after [\d.]+ ms$"),
    (1, [""], None, r"^1 token$"),
]


def answered(tokens: int, pieces: list[str], mean: float | None) -> str:
    """What a server sends that answers with some pieces of text."""
    deltas = [{"role": "assistant", "content": pieces[0]}, *({"content": piece} for piece in pieces[1:]), {}]
    events: list[dict[str, object]] = [
        {"choices": [{"delta": delta, "text": delta.get("content", ""), "finish_reason": None}]} for delta in deltas
    ]
    events[-1]["timings"] = {"ttft_ms": 1.0, "ms_per_token": mean}
    events.append({"choices": [], "usage": {"completion_tokens": tokens}})
    return "".join(f"data: {data}\n\n" for data in (*map(json.dumps, events), "[DONE]"))


async def test_the_pace_of_an_answer_is_of_its_tokens(browser: Browser, there: Mesh) -> None:
    """Not of its pieces, of which the first opens the stream, and which here come all at once."""
    await there.session(nodes=["a"])
    bodies = [answered(tokens, pieces, mean) for tokens, pieces, mean, _ in PACES]

    async def answer(route: Route) -> None:
        await route.fulfill(body=bodies.pop(0), content_type="text/event-stream")

    async with page_of(browser, there) as page:
        for path in ("completions", "chat/completions"):
            await page.route(f"**/v1/{path}", answer)
        for *_, told in PACES:
            await page.locator("#send:not([disabled])").wait_for()
            await page.locator("#prompt").fill("KING:")
            await page.locator("#prompt").press("Enter")
            await page.locator("#log .assistant").wait_for()
            await page.locator("#send").wait_for()
            assert re.match(told, await text_of(page, "#log .assistant .note"))
            await page.reload()
    assert not bodies


async def test_a_refusal_is_shown_and_the_message_is_there_to_be_sent_again(browser: Browser, there: Mesh) -> None:
    await there.session(nodes=["a"], context=64)
    async with page_of(browser, there, refusals=1) as page:
        await page.locator("#send:not([disabled])").wait_for()
        await page.locator("#prompt").fill("word " * 300)
        await page.get_by_role("button", name="Send").click()
        await page.locator("#log .failure").wait_for()
        assert "maximum context length is 64 tokens" in await text_of(page, "#log .failure")
        assert await page.locator("#prompt").input_value() == "word " * 300


async def test_a_session_is_started_and_closed_by_hand(browser: Browser, there: Mesh) -> None:
    async with page_of(browser, there) as page:
        refused: list[str] = []
        page.on("dialog", lambda dialog: refused.append(dialog.message))  # the browser's own, of which there are none
        assert "No model is served yet" in await text_of(page, "#no-sessions")
        assert await page.locator("#send").is_disabled()
        await page.get_by_label("Model", exact=True).fill(str(BUNDLED))
        await page.get_by_label("Quantisation", exact=True).select_option("int8")
        await page.get_by_label("Shares").fill("2, 1, 1")
        await page.get_by_role("button", name="Forecast only").click()
        await until(page, "() => document.querySelector('#planned').innerText.includes('This plan')")
        await page.get_by_text("All settings").click()
        await page.get_by_label("Cache format", exact=True).select_option("fp16")
        await page.get_by_label("When a machine is lost").uncheck()
        await page.get_by_role("button", name="Start session").click()
        card = page.locator("#sessions article.ready")
        await card.wait_for()
        assert "int8" in await card.inner_text()
        assert await page.locator("#new").get_attribute("open") is None
        async with Client(there.url) as client:
            (session,) = await client.sessions()
        fractions = [rank["share"]["fraction"] for rank in session["ranks"]]
        assert fractions[0] > 1.3 * fractions[1]
        assert (session["cache_format"], session["recover"], session["queue"]) == ("fp16", False, 256)
        await page.get_by_role("button", name="What if I add").click()
        await page.get_by_label("Machine", exact=True).fill("rtx 4070")
        await page.locator("#whatif-go").click()
        await until(page, "() => document.querySelector('#whatif-result').innerText.includes('With rtx 4070, 1Gbit')")
        assert await what_axe_finds(page) == ""
        await page.locator("#whatif-close").click()

        await card.get_by_role("button", name="Close").click()
        assert "answers under way break off" in await text_of(page, "#confirm")
        await page.get_by_role("button", name="Cancel").click()
        assert await card.locator(".badge").inner_text() == "ready"
        await card.get_by_role("button", name="Close").click()
        await page.get_by_role("button", name="Close session", exact=True).click()
        await page.locator("#no-sessions").wait_for()
        assert refused == []
        assert await page.locator("#sessions article").count() == 0


async def test_experts_are_mapped_and_rebalanced(
    browser: Browser, there: Mesh, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("models") / "moe"
    synthesise(SHAPES["mixtral-quarter"] | SMALL, folder)
    await there.session(model=str(folder), context=CONTEXT, experts="parallel", nodes=["a", "b", "c"], replicas=2)
    async with page_of(browser, there) as page:
        table = page.locator(".experts table")
        await table.wait_for()
        assert await table.locator("tbody tr").count() == 8
        cells = [await cell.get_attribute("aria-label") or "" for cell in await table.locator("tbody td").all()]
        assert all(cell.count("it serves") == 2 for cell in cells)
        assert "2 of each asked for, 2 there at least" in await text_of(page, ".experts figcaption")
        assert await what_axe_finds(page) == ""
        async with page.expect_response("**/experts/rebalance") as answered:
            await page.get_by_role("button", name="Rebalance").click()
        assert (await answered.value).ok


async def test_what_fits_is_told_and_chosen(browser: Browser, there: Mesh) -> None:
    async def three(route: Route) -> None:
        models = (await (await route.fetch()).json())["models"]
        await route.fulfill(
            json={"models": [each for each in models if each["name"] in ("deepseek-v3", "qwen2.5-0.5b", "qwen3-8b")]}
        )

    async def outdated(route: Route) -> None:
        if "qwen3-8b" in (route.request.post_data or ""):
            told = {"message": "update the motley on a", "code": "outdated_node", "param": None, "type": "server_error"}
            await route.fulfill(status=422, json={"error": told})
        else:
            await route.continue_()

    async with page_of(browser, there, PHONE, refusals=2) as page:
        await page.route("**/api/known-models", three)
        await page.route("**/api/plan", outdated)
        await page.get_by_text("What fits on these machines").click()
        await until(page, "() => document.querySelector('#fit-told').innerText.startsWith('1 model of 3 would fit')")
        first, *others = await page.locator("#fit-models tr").all_inner_texts()
        assert re.match(r"qwen2\.5-0\.5b\s+\d.* tokens/s\s+\S+ [MG]B\s+int8", first)
        told = dict(each.split(maxsplit=1) for each in others)
        assert told == {"deepseek-v3": "does not fit", "qwen3-8b": "update the motley on a"}
        assert await page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        assert await page.evaluate(
            "(table) => table.scrollWidth <= table.clientWidth", await page.query_selector("#fit-table")
        )
        assert await what_axe_finds(page) == ""
        await page.get_by_role("button", name="qwen2.5-0.5b").click()
        assert await page.get_by_label("Model", exact=True).input_value() == "qwen2.5-0.5b"
        await until(
            page, "() => document.querySelector('#known-models').options.length === 3"
        )  # what is typed is completed


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
async def test_many_machines_are_told_apart(size: tuple[int, int], browser: Browser, there: Mesh) -> None:
    """As the API tells of a dozen."""
    async with Client(there.url) as client:
        first = (await client.call("GET", "/api/nodes"))["nodes"][0]
    names = [f"machine-with-a-long-name-{number:02}" for number in range(12)]
    link = {"latency_ms": 0.2, "bandwidth": 1e8, "failure": None, "relay": None}
    nodes = [
        {**first, "name": name, "links": [{**link, "to": other} for other in names if other != name]} for name in names
    ]
    nodes[0]["links"][3]["bandwidth"] = 1e6
    async with page_of(browser, there, size) as page:
        await page.route("**/api/nodes", lambda route: route.fulfill(json={"nodes": nodes}))
        await until(page, "() => document.querySelectorAll('#picture circle.ring').length === 12")
        assert await page.locator("#picture .link").count() == 0, "all of them would hide the machines"
        assert await page.locator("#picture .key.line").is_hidden()
        boxes = [await each.bounding_box() or {} for each in await page.locator("#picture :is(text, .ring)").all()]
        for index, one in enumerate(boxes):
            for other in boxes[:index]:
                overlaps = [
                    min(one[at] + one[long], other[at] + other[long]) - max(one[at], other[at])
                    for at, long in (("x", "width"), ("y", "height"))
                ]
                assert min(overlaps) < 7, (one, other)  # the outlines of letters may touch
        card = page.locator("#nodes > li").first
        assert f"11, the slowest to {names[4]}: 0.2 ms, 8 Mbit/s" in await card.inner_text()
        await card.locator("summary").click()
        words = await card.inner_text()
        assert all(f"{name}: 0.2 ms" in words for name in names[1:])


async def test_a_training_is_a_card_with_curves(browser: Browser, there: Mesh) -> None:
    """As the API tells of one; that trains nothing here."""
    points = [{"step": step, "steps": 40, "loss": 4.0 / step, "tokens_per_s": 900.0} for step in range(1, 31)]
    trains = {"leads": False, "state": "there", "why": None, "deaths": 0, "memory_bytes": 4 << 30}
    members = [
        {**trains, "member": 0, "node": "a", "leads": True, "latest": None, "curve": []},
        {**trains, "member": 1, "node": "b", "latest": {**points[-1], "peak_bytes": 7e8}, "curve": points},
        {**trains, "member": 2, "node": "c", "state": "waiting", "why": "'game' has it", "latest": None, "curve": []},
    ]
    told = {"id": "12345678", "name": "letters", "model": "bard", "mode": "chain", "owner": "a", "state": "running"}
    job = {**told, "others": ["d"], "why": None, "result": None, "served_as": None, "members": members}
    async with page_of(browser, there) as page:
        await page.route("**/api/jobs", lambda route: route.fulfill(json={"jobs": [job]}))
        card = page.locator("#jobs > article")
        await card.wait_for()
        words = await card.inner_text()
        for shown in (
            "letters",
            "running",
            "a, d have data of their own",
            "step 30 of 40",
            "loss 0.133",
            "700 MB",
            "'game' has it",
        ):
            assert shown in words
        label = await card.locator("svg").get_attribute("aria-label")
        assert label == "Loss on b: 4.000 at step 1, 0.133 at step 30"
        assert await what_axe_finds(page) == ""
        if folder := os.environ.get("MOTLEY_SCREENSHOTS"):
            await page.screenshot(path=f"{folder}/jobs.png", full_page=True)
        stopped: list[str] = []

        async def stop(route: Route) -> None:
            stopped.append(route.request.method)
            await route.fulfill(json={})

        await page.route("**/api/jobs/*", stop)
        await card.get_by_role("button", name="Stop").click()
        await page.get_by_role("button", name="Stop training").click()
        async with asyncio.timeout(30):
            while not stopped:
                await page.wait_for_timeout(50)
        assert stopped == ["DELETE"]
