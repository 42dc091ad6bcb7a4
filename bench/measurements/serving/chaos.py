"""What a mesh is worth when machines come and go: answers under way while they are killed, stopped and started again.

Every answer must be complete, and the text of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from motley.bench.measurements.percentiles import percentiles

GAP_S = (1.0, 6.0)
"""Seconds from one event to the next, at least and at most."""
SILENCE_S = 0.5
"""A shorter silence is nothing to notice."""
AGAIN_S = 0.2
"""A client whose connection has died tries again so soon."""
ANSWER_S = 300.0
"""An answer that takes longer is lost."""
PROMPTS = ("ROMEO:", "JULIET:", "KING RICHARD III:", "First Citizen:", "DUKE VINCENTIO:", "HAMLET:")

Do = Callable[[str], Coroutine[Any, Any, None]]
"""Something that is done to a machine, by name; it ends when the machine is as before."""


@dataclass(frozen=True)
class Chaos:
    """What `motley bench chaos` tells.

    Attributes:
        events: things that were done to machines.
        answers: that were asked for.
        equal: those that were the text of an undisturbed run.
        lost: those that broke off.
        recovery_s: silences in the middle of answers of at least `SILENCE_S`, in seconds, by percentile.
        by_event: how often each thing was done.
    """

    events: int
    answers: int
    equal: int
    lost: int
    recovery_s: dict[str, float]
    by_event: dict[str, int]


@dataclass
class _Run:
    """A measurement under way.

    Attributes:
        ends: when it does, by `time.perf_counter`.
        heard: when a piece of any answer came.
        events: what was done.
    """

    ends: float
    heard: list[list[float]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    equal: int = 0
    lost: list[str] = field(default_factory=list)


async def measure_chaos(
    url: str,
    model: str,
    deeds: Mapping[str, Mapping[str, Do]],
    *,
    seconds: float,
    events: int,
    clients: int,
    tokens: int,
    seed: int,
    told: Callable[[str], None] = lambda _: None,
) -> Chaos:
    """Ask for answers all the time, and do something to a machine now and then, but never to all of them at once.

    Args:
        url: of the API.
        model: as it is called there; it must be served.
        deeds: what can be done, by name, to each machine, by name.
        seconds: after so many nothing more is done, ...
        events: ... or after so many events.
        clients: answers under way at a time, half of them sampled.
        tokens: of each answer.
        seed: of what is done when to whom.
        told: is told in words what happens.
    """
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(url, timeout=timeout) as http:
        bodies = [_body(model, prompt, tokens, sampled) for prompt in PROMPTS for sampled in (False, True)]
        expected = [await _ask(http, body, []) for body in bodies]
        run = _Run(time.perf_counter() + seconds)
        done = asyncio.Event()
        asking = [asyncio.create_task(_client(http, run, bodies, expected, first, done)) for first in range(clients)]
        try:
            await _disturb(run, deeds, events, random.Random(seed), told)
        finally:
            done.set()
            await asyncio.gather(*asking)
    gaps = [after - before for heard in run.heard for before, after in pairwise(heard)]
    recoveries = [gap for gap in gaps if gap >= SILENCE_S]
    for why in dict.fromkeys(run.lost):
        told(f"lost: {why}")
    return Chaos(
        events=len(run.events),
        answers=len(run.heard),
        equal=run.equal,
        lost=len(run.lost),
        recovery_s={**percentiles(recoveries or [0.0], (50, 99)), "max": round(max(recoveries, default=0.0), 2)},
        by_event={kind: run.events.count(kind) for kind in sorted(set(run.events))},
    )


async def _disturb(
    run: _Run,
    deeds: Mapping[str, Mapping[str, Do]],
    most: int,
    dice: random.Random,
    told: Callable[[str], None],
) -> None:
    """Do things to machines until it is enough; two machines are always left alone."""
    busy: dict[str, asyncio.Task[None]] = {}
    while len(run.events) < most and time.perf_counter() < run.ends:
        await asyncio.sleep(dice.uniform(*GAP_S))
        for name in [name for name, task in busy.items() if task.done()]:
            busy.pop(name).result()
        free = [name for name in deeds if name not in busy]
        if len(free) < 3:
            continue
        machine = dice.choice(free)
        what = dice.choice(sorted(deeds[machine]))
        told(f"{what} {machine}")
        run.events.append(what)
        busy[machine] = asyncio.create_task(deeds[machine][what](machine))
    await asyncio.gather(*busy.values())


async def _client(
    http: aiohttp.ClientSession,
    run: _Run,
    bodies: Sequence[dict[str, Any]],
    expected: Sequence[str],
    first: int,
    done: asyncio.Event,
) -> None:
    """Ask for one answer after the other until nothing more is done."""
    number = first
    while not done.is_set():
        heard: list[float] = []
        run.heard.append(heard)
        try:
            text = await _ask(http, bodies[number % len(bodies)], heard)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            run.lost.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(1.0)
        else:
            run.equal += text == expected[number % len(bodies)]
        number += 1


def _body(model: str, prompt: str, tokens: int, sampled: bool) -> dict[str, Any]:
    how = {"temperature": 0.9, "top_p": 0.95, "seed": 11} if sampled else {"temperature": 0}
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, **how}


async def _ask(http: aiohttp.ClientSession, body: dict[str, Any], heard: list[float]) -> str:
    """The text of an answer, which is taken up again when its connection dies.

    Raises:
        ValueError: it broke off; the message says why.
        TimeoutError: it took longer than `ANSWER_S`.
    """
    key, events = secrets.token_hex(8), dict[int, str]()
    async with asyncio.timeout(ANSWER_S):
        while True:
            headers = {"Idempotency-Key": key, "Last-Event-ID": str(max(events, default=0))}
            with suppress(aiohttp.ClientError):
                async with http.post("/v1/completions", json=body, headers=headers) as response:
                    if response.status != 200:
                        raise ValueError(f"{response.status}: {await response.text()}")
                    if await _is_read(response, events, heard):
                        return "".join(events[number] for number in sorted(events))
            await asyncio.sleep(AGAIN_S)


async def _is_read(response: aiohttp.ClientResponse, events: dict[int, str], heard: list[float]) -> bool:
    """Read events, by number; whether they came to the last one.

    Raises:
        ValueError: one tells of an error.
    """
    number = 0
    async for line in response.content:
        name, _, data = line.decode().strip().partition(": ")
        if name == "id":
            number = int(data)
        if data == "[DONE]":
            return True
        if data.startswith("{"):
            event = json.loads(data)
            if "error" in event:
                raise ValueError(event["error"]["message"])
            heard.append(time.perf_counter())
            events[number] = "".join(choice["text"] for choice in event["choices"])
    return False
