"""Answers outlive machines: whichever dies in the middle of one, its text is that of an undisturbed run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from motley.cli.reaching.client import Client
from tests.e2e.processes import MotleyProcess, mesh, motley

HOW = {"model": "shakespeare-2.6m", "prompt": "ROMEO:", "max_tokens": 100, "ignore_eos": True}
GREEDY = {**HOW, "temperature": 0}
SAMPLED = {**HOW, "temperature": 0.9, "top_p": 0.95, "seed": 7, "presence_penalty": 0.4, "logprobs": 1}


async def undisturbed(url: str, body: dict[str, Any]) -> str:
    async with Client(url) as client:
        text: str = (await client.call("POST", "/v1/completions", body))["choices"][0]["text"]
        return text


async def streamed(url: str, body: dict[str, Any], at: int, do: Callable[[], None]) -> tuple[str, int]:
    """The text of an answer, and how many tokens it has by the log-probabilities; something is done after some of it
    has come."""
    pieces: list[str] = []
    tokens = 0
    async with Client(url) as client:
        async for event in client.stream("/v1/completions", body):
            for choice in event["choices"]:
                pieces.append(choice["text"])
                tokens += len((choice.get("logprobs") or {}).get("tokens", ()))
            if len(pieces) == at:
                do()
    return "".join(pieces), tokens


def worker_of(node: MotleyProcess) -> psutil.Process:
    """The process of the only rank of a node."""
    (worker,) = node.workers()
    return worker


async def test_an_answer_goes_on_whoever_dies(tmp_path: Path) -> None:
    """A rank's process, rank 0's, a whole machine, a machine with rank 0, one after the other."""
    async with mesh(tmp_path, "a", "b", "c", "d") as there:
        session = await there.session(nodes=["a", "b", "c"], exact=True)
        texts = {name: await undisturbed(there.url, body) for name, body in (("g", GREEDY), ("s", SAMPLED))}

        def die(name: str, whole: bool) -> Callable[[], None]:
            def do() -> None:
                node = there.nodes[name]
                for process in node.family() if whole else [worker_of(node)]:
                    process.kill()

            return do

        lost = []
        for first, whole in ((False, False), (True, False), (False, True), (True, True)):
            async with Client(there.url) as client:
                ranks = (await client.call("GET", f"/api/sessions/{session['id']}"))["ranks"]
            name = ranks[0 if first else -1]["node"]  # a busy machine may have been left out of a plan
            lost.append((name, whole))
            (greedy, _), (sampled, told) = await asyncio.gather(
                streamed(there.url, GREEDY, 20, die(name, whole)), streamed(there.url, SAMPLED, 1000, lambda: None)
            )
            assert greedy == texts["g"]
            assert sampled == texts["s"]
            assert told == SAMPLED["max_tokens"]
            if whole:
                del there.nodes[name]
        async with Client(there.url) as client:
            state = await client.call("GET", f"/api/sessions/{session['id']}")
        assert state["state"] == "ready"
        assert state["epoch"] == 5
        assert [loss["node"] for loss in state["losses"]] == [name for name, _ in lost]
        assert not {rank["node"] for rank in state["ranks"]} & {name for name, whole in lost if whole}


@pytest.mark.soak
async def test_an_answer_goes_on_when_a_stage_dies(tmp_path: Path) -> None:
    """A rank of the second stage dies, which is started again or done without, then the machine of the first one."""
    async with mesh(tmp_path, "a", "b", "c") as there:
        session = await there.session(nodes=["a", "b", "c"], stages=[1, 2], exact=True)
        assert session["kind"] == "mixed"
        layers = [rank["share"]["layers"] for rank in session["ranks"]]
        assert layers[0] == [0, layers[1][0]]
        assert layers[1] == layers[2] == [layers[0][1], 6]
        expected = await undisturbed(there.url, SAMPLED)

        def die(node: MotleyProcess, whole: bool) -> Callable[[], None]:
            return lambda: [process.kill() for process in (node.family() if whole else [worker_of(node)])] and None

        assert (await streamed(there.url, SAMPLED, 20, die(there.nodes["c"], whole=False)))[0] == expected
        async with Client(there.url) as client:
            anew = await client.call("GET", f"/api/sessions/{session['id']}")
        assert anew["epoch"] == 2
        assert anew["kind"] in ("mixed", "pipeline")
        assert (await streamed(there.url, SAMPLED, 20, die(there.nodes["a"], whole=True)))[0] == expected
        del there.nodes["a"]


@pytest.mark.soak
async def test_a_machine_that_is_asked_to_leave_leaves_and_nobody_notices(tmp_path: Path) -> None:
    """The one with rank 0, in the middle of an answer; later another joins, and a better plan has it take part."""
    async with mesh(tmp_path, "a", "b") as there:
        session = await there.session(nodes=["a", "b"], exact=True)
        expected = await undisturbed(there.url, SAMPLED)
        asked: list[asyncio.Task[tuple[int, str, str]]] = []

        def leave() -> None:
            asked.append(asyncio.create_task(motley("leave", "a", MOTLEY_URL=there.url)))

        text, told = await streamed(there.url, SAMPLED, 20, leave)
        assert (text, told) == (expected, SAMPLED["max_tokens"])
        assert await asked[0] == (0, "a leaves; without it go on: shakespeare-2.6m\n", "")
        leaver = there.nodes.pop("a")
        assert await leaver.wait() == 0
        assert any("left the mesh, as `motley leave` asked" in line for line in leaver.lines)
        await there.join("c")
        status, out, _ = await motley("rebalance", session["id"], "--force", MOTLEY_URL=there.url)
        assert (status, out.startswith("planned anew, forecast ")) == (0, True)
        assert await undisturbed(there.url, SAMPLED) == expected
        status, out, err = await motley("leave", "b", MOTLEY_URL=there.url)
        assert (status, out) == (0, "b leaves; without it go on: shakespeare-2.6m\n"), err
        assert await undisturbed(there.url, SAMPLED) == expected
        async with Client(there.url) as client:
            state = await client.call("GET", f"/api/sessions/{session['id']}")
        assert (state["epoch"], state["losses"]) == (4, [])
        assert [rank["node"] for rank in state["ranks"]] == ["c"]
