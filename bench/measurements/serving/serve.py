"""How a server of OpenAI's API answers when requests come at their own pace, whether or not it keeps up.

Arrivals are open-loop: a Poisson process says when each request comes, and none waits for another's end. So a server
that is too slow shows as waiting that grows, and not as a load that adapts to it (Tene's *coordinated omission*).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from motley.bench.measurements.percentiles import percentiles

SILENCE_S = 330.0
"""Seconds without a byte after which an answer is given up; longer than the server's own limit."""
TOO_MANY = 429
Prompt = str | list[int]
"""Text, or token ids."""


class LoadError(Exception):
    """The server cannot be measured; the message says what it answered."""


@dataclass(frozen=True)
class Load:
    """What clients ask for.

    Attributes:
        model: as the server calls it.
        prompts: of the requests; they are asked in turn, one before the clock starts, and go on from rate to rate. One
            that comes again is found in the server's caches.
        requests: how many there are for each rate.
        tokens: of each answer.
        seed: of the arrivals and of what is sampled.
    """

    model: str
    prompts: Sequence[Prompt]
    requests: int
    tokens: int
    seed: int = 0


@dataclass(frozen=True)
class Served:
    """What `motley bench serve` tells of a rate. Times are in milliseconds, by percentile.

    Attributes:
        rate: requests per second that came.
        output_tokens_per_s: from the first arrival to the end of the last answer.
        ttft_ms: from when a request was due to the first piece of its answer.
        gap_ms: between two pieces of an answer.
        cached_tokens: of prompts, that had been computed before.
        accepted_drafts: tokens that were guessed rightly.
        refused: requests that the server had no room for (429).
    """

    rate: float
    requests: int
    output_tokens_per_s: float
    ttft_ms: dict[str, float]
    gap_ms: dict[str, float]
    cached_tokens: int
    accepted_drafts: int
    refused: int


@dataclass
class _Answer:
    """One request: when it was due and when pieces of its answer came, in seconds since the first arrival."""

    due: float
    heard: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    refused: bool = False


def random_prompts(vocabulary: int, requests: int, tokens: int, shared: int, seed: int = 0) -> list[Prompt]:
    """Token ids at random; the first `shared` of `tokens` are the same in all prompts."""
    rng = np.random.default_rng(seed)
    beginning = rng.integers(0, vocabulary, shared).tolist()
    return [beginning + rng.integers(0, vocabulary, tokens - shared).tolist() for _ in range(requests)]


async def measure_load(
    url: str, api_key: str, load: Load, rates: Sequence[float], heard: Callable[[int, int], None] = lambda *_: None
) -> list[Served]:
    """Have the server at `url` answer `load` at each rate, one after the other.

    Args:
        rates: requests per second.
        heard: is told how many answers of how many have ended.

    Raises:
        LoadError: it refuses a request for another reason than that there are too many, or breaks an answer off.
    """
    total, ended = load.requests * len(rates), 0

    def end() -> None:
        nonlocal ended
        ended += 1
        heard(ended, total)

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
    async with aiohttp.ClientSession(url, headers=headers, connector=connector, timeout=timeout) as http:
        await _ask(http, _body(load, 0), _Answer(0.0), time.perf_counter())  # whatever is slow the first time
        return [
            _summary(load, rate, await _at_rate(http, load, rate, 1 + load.requests * earlier, end))
            for earlier, rate in enumerate(rates)
        ]


async def _at_rate(
    http: aiohttp.ClientSession, load: Load, rate: float, first: int, end: Callable[[], None]
) -> list[_Answer]:
    """Have all requests of a rate answered; the prompts from number `first` on are theirs."""
    gaps = np.random.default_rng(load.seed).exponential(1 / rate, load.requests)
    answers = [_Answer(float(due)) for due in np.cumsum(gaps) - gaps[0]]
    began = time.perf_counter()

    async def one(number: int, answer: _Answer) -> None:
        await asyncio.sleep(answer.due - (time.perf_counter() - began))
        await _ask(http, _body(load, number), answer, began)
        end()

    try:
        async with asyncio.TaskGroup() as clients:
            for number, answer in enumerate(answers, first):
                clients.create_task(one(number, answer))
    except* LoadError as errors:
        raise LoadError(str(errors.exceptions[0])) from errors
    return answers


def _body(load: Load, number: int) -> dict[str, Any]:
    return {
        "model": load.model,
        "prompt": load.prompts[number % len(load.prompts)],
        "max_tokens": load.tokens,
        "temperature": 0,
        "seed": load.seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _ask(http: aiohttp.ClientSession, body: dict[str, Any], answer: _Answer, began: float) -> None:
    try:
        async with http.post("/v1/completions", json=body) as response:
            if response.status == TOO_MANY:
                answer.refused = True
                return
            if response.status != 200:
                raise LoadError(f"the server answers {response.status}: {await response.text()}")
            async for line in response.content:
                data = line.decode().strip()
                if data == "data: [DONE]":
                    return
                if data.startswith("data: "):
                    _hear(json.loads(data.removeprefix("data: ")), answer, time.perf_counter() - began)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise LoadError(f"the server breaks off: {error or type(error).__name__}") from error
    raise LoadError("an answer ended without [DONE]")


def _hear(event: dict[str, Any], answer: _Answer, now: float) -> None:
    if "error" in event:
        raise LoadError(f"an answer ended with an error: {event['error'].get('message', event['error'])}")
    if any(choice["text"] for choice in event["choices"]):
        answer.heard.append(now)
    answer.usage = event.get("usage") or answer.usage


def _summary(load: Load, rate: float, answers: Sequence[_Answer]) -> Served:
    answered = [answer for answer in answers if answer.heard]
    if not answered:
        raise LoadError("the server refused all requests, or answered without text")
    seconds = max(answer.heard[-1] for answer in answered)
    tokens = sum(answer.usage.get("completion_tokens", 0) for answer in answered)
    gaps_s = np.concatenate([np.diff(answer.heard) for answer in answered])
    return Served(
        rate=rate,
        requests=load.requests,
        output_tokens_per_s=round(tokens / seconds, 2),
        ttft_ms=percentiles([1e3 * (answer.heard[0] - answer.due) for answer in answered]),
        gap_ms=percentiles((1e3 * gaps_s).tolist()),
        cached_tokens=sum(_detail(answer, "prompt_tokens_details", "cached_tokens") for answer in answered),
        accepted_drafts=sum(
            _detail(answer, "completion_tokens_details", "accepted_prediction_tokens") for answer in answered
        ),
        refused=sum(answer.refused for answer in answers),
    )


def _detail(answer: _Answer, of: str, name: str) -> int:
    return int((answer.usage.get(of) or {}).get(name) or 0)
