"""`motley bench serve`: real daemons, and servers that refuse or break off."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from typer.testing import CliRunner

import motley.cli
from motley.bench.measurements.serving.serve import Load, LoadError, measure_load, random_prompts
from motley.cli.app import app
from motley.cli.commands.bench.serving.serve import parse_rates

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"
WHOLE = [
    {"choices": [{"text": "to"}]},
    {"choices": [{"text": ""}]},  # a token that is not a whole character yet
    {"choices": [{"text": " be"}]},
    {
        "choices": [],
        "usage": {
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 5},
            "completion_tokens_details": {"accepted_prediction_tokens": 2},
        },
    },
]
KEYS = {
    *("rate", "requests", "output_tokens_per_s", "ttft_ms", "gap_ms", "cached_tokens", "accepted_drafts", "refused")
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    made = web.Application()
    made.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(made)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def events(request: web.Request, told: list[dict[str, object]], done: bool = True) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in told:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    if done:
        await response.write(b"data: [DONE]\n\n")
    return response


def load(requests: int) -> Load:
    return Load("m", ["one", "two"], requests, tokens=3)


@pytest.mark.parametrize("rate", [pytest.param("20", marks=pytest.mark.soak), "5,50"])
def test_a_mesh_that_is_started_here(rate: str, tmp_path: Path) -> None:
    plot = tmp_path / "served.png"
    options = ["--ranks", "2", "--requests", "6", "--rate", rate, "--prompt-tokens", "9", "--shared-prefix", "4"]
    result = CliRunner().invoke(
        app, ["bench", "serve", "--model", str(BUNDLED), *options, "--tokens", "5", "--plot", str(plot), "--json"]
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    rows = told["rows"] if "," in rate else [told]
    assert [row["rate"] for row in rows] == [float(one) for one in rate.split(",")]
    for row in rows:
        assert row.keys() == KEYS
        assert (row["requests"], row["refused"]) == (6, 0)
        assert row["cached_tokens"] <= 6 * 4  # no prompt comes twice
        assert row["output_tokens_per_s"] > 0
        for waited in (row["ttft_ms"], row["gap_ms"]):
            assert waited.keys() == {"p50", "p95", "p99"}
            assert 0 < waited["p50"] <= waited["p95"] <= waited["p99"]
    assert plot.read_bytes().startswith(b"\x89PNG")


async def test_refusals_are_counted_and_details_are_summed() -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
        assert request.headers["Authorization"] == "Bearer key"
        asked.append(body["prompt"])
        if len(asked) % 3 == 0:
            return web.json_response({"error": {"message": "too many"}}, status=429)
        return await events(request, WHOLE)

    heard: list[tuple[int, int]] = []
    async with server(answer) as url:
        (row,) = await measure_load(url, "key", load(8), [1000.0], lambda *ended: heard.append(ended))
    assert (len(asked), asked[0], set(asked)) == (9, "one", {"one", "two"})  # with one before the clock starts
    assert (row.refused, row.cached_tokens, row.accepted_drafts) == (3, 25, 10)
    assert heard == [(number, 8) for number in range(1, 9)]


@pytest.mark.parametrize(
    ("told", "done", "status", "words"),
    [
        (WHOLE, False, 200, r"ended without \[DONE\]"),
        ([*WHOLE[:1], {"error": {"message": "node b is lost"}}], False, 200, "node b is lost"),
        ([], True, 200, "without text"),
        ([], True, 404, "answers 404: no model 'm'"),
    ],
)
async def test_what_breaks_off_is_no_measurement(
    told: list[dict[str, object]], done: bool, status: int, words: str
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await events(request, told, done) if status == 200 else web.Response(status=404, text="no model 'm'")

    async with server(answer) as url:
        with pytest.raises(LoadError, match=words):
            await measure_load(url, "", load(3), [1000.0])


def test_rates_may_say_that_they_are_per_second() -> None:
    assert parse_rates("4/s") == [4.0]
    assert parse_rates("0.5/s, 1,2/s") == [0.5, 1.0, 2.0]


def test_prompts_begin_alike() -> None:
    prompts = random_prompts(1000, requests=3, tokens=20, shared=8)
    assert [len(prompt) for prompt in prompts] == [20] * 3
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 1
    assert len({tuple(prompt[8:]) for prompt in prompts}) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rate", "0"], "--rate wants numbers"),
        (["--rate", "1,x"], "--rate wants numbers"),
        (["--shared-prefix", "9", "--prompt-tokens", "8"], "--shared-prefix 9 is more than --prompt-tokens 8"),
        (["--prompts", "/nowhere/prompts.txt"], "cannot read /nowhere/prompts.txt"),
        (["--url", "http://127.0.0.1:9"], "the server breaks off"),
    ],
)
def test_bad_input_is_named(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", "--model", str(BUNDLED), *options])
    assert result.exit_code == 1
    assert words in str(result.exception)
