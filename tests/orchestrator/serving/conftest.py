"""Three nodes that stop in the middle of an answer, so that something can happen then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from motley.protocol.mesh_pb2 import Delta, Generate

from ..conftest import DEADLINE_S

WORDS = ["Once", " upon", " a", " time"]
STREAM = {"model": "bard", "prompt": "Tell:", "stream": True}


async def two_words_at_a_time(generate: Generate) -> AsyncIterator[Delta]:
    """Goes on from what was written; after two words a node never says more, unless these are the last."""
    done = len(generate.written)
    for number, word in enumerate(WORDS[done : done + 2], start=done):
        last = number == len(WORDS) - 1
        told = {"finish": "stop", "prefill_s": 1000.0} if last else {}
        yield Delta(text=word, ids=[number], prompt_tokens=2, completion_tokens=number + 1, **told)
    if done + 2 < len(WORDS):
        await asyncio.Event().wait()


@pytest.fixture
async def trio(mesh: Any, new_node: Any) -> list[Any]:
    joined = []
    for number, name in enumerate(["pc", "laptop", "box"]):
        node = new_node(name, bandwidth=(10 - number) * 1e9)
        node.answer = two_words_at_a_time
        joined.append(await mesh.join(node))
    return joined


async def text_of(mesh: Any) -> asyncio.Task[str]:
    """The text of a streamed answer, once two words of it have come."""
    two = asyncio.Event()

    async def read() -> str:
        words = []
        async with mesh.http.post("/v1/completions", json=STREAM) as response:
            async for line in response.content:
                text = line.decode()
                for word in (word for word in WORDS if f'"{word}"' in text):
                    words.append(word)
                    if len(words) == 2:
                        two.set()
                if '"error"' in text:
                    words.append(text)
        return "".join(words)

    task = asyncio.create_task(read())
    async with asyncio.timeout(DEADLINE_S):
        await two.wait()
    return task
