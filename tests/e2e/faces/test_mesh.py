"""A mesh of real processes through its public faces: the HTTP API and the command line."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from motley.cli.errors import CliError
from motley.cli.reaching.client import Client
from motley.daemon.node.survey import read_before, speeds
from motley.daemon.weights.cache import ShareCache
from tests.e2e.node import measure_less
from tests.e2e.processes import BUNDLED, END_S, START_S, Mesh, MotleyProcess, chatting_model, command, mesh, motley
from tests.ports import unanswered_port

GREEDY = {"model": BUNDLED.name, "prompt": "ROMEO:", "max_tokens": 24, "temperature": 0}

SOAK = pytest.mark.soak


async def text_of(url: str, **changes: object) -> str:
    async with Client(url) as client:
        answer = await client.call("POST", "/v1/completions", {**GREEDY, **changes})
        text: str = answer["choices"][0]["text"]
        return text


async def test_every_split_writes_the_same_and_the_openai_client_can_talk_to_it(there: Mesh) -> None:
    texts = set()
    for nodes, shares in ((["a"], [1]), (["c", "a"], [1, 4]), (["a", "b", "c"], [3, 2, 1]), (["b", "a"], [1, 0])):
        session = await there.session(nodes=nodes, shares=shares)
        assert [rank["node"] for rank in session["ranks"]] == nodes
        texts.add(await text_of(there.url))
        if len(nodes) == 3:
            await official_client(there.url)
        async with Client(there.url) as client:
            await client.call("DELETE", f"/api/sessions/{session['id']}")
    assert len(texts) == 1
    assert not any(node.workers() for node in there.nodes.values()), "a closed session left a worker behind"


@pytest.mark.parametrize("cache_format", [pytest.param("fp16", marks=SOAK), "int8"])
async def test_narrow_caches_write_the_same_at_every_split_and_from_known_prefixes(
    cache_format: str, there: Mesh
) -> None:
    texts = set()
    for nodes, shares in ((["a"], [1]), (["b", "c"], [3, 2])):
        session = await there.session(nodes=nodes, shares=shares, cache_format=cache_format)
        assert session["cache_format"] == cache_format
        texts |= {await text_of(there.url), await text_of(there.url)}
        async with Client(there.url) as client:
            await client.call("DELETE", f"/api/sessions/{session['id']}")
    assert len(texts) == 1


async def official_client(url: str) -> None:
    import openai  # takes a second, of every process that collects tests

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == [BUNDLED.name]
        asked = {"model": BUNDLED.name, "prompt": "JULIET:", "max_tokens": 12, "seed": 3, "temperature": 0.8}
        whole = await client.completions.create(**asked)
        pieces = []
        usage = None
        async for chunk in await client.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            pieces += [choice.text for choice in chunk.choices]
        assert "".join(pieces) == whole.choices[0].text
        assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 12)
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1, "its last token was computed"
        several = await client.completions.create(**{**asked, "prompt": ["JULIET:", "ROMEO:"]}, n=2)
        for index, prompt, seed in ((0, "JULIET:", 3), (1, "JULIET:", 4), (2, "ROMEO:", 3), (3, "ROMEO:", 4)):
            alone = await client.completions.create(**{**asked, "prompt": prompt, "seed": seed})
            assert several.choices[index].text == alone.choices[0].text
        with pytest.raises(openai.BadRequestError, match=r"you requested 10\d\d tokens") as refusal:
            await client.completions.create(model=BUNDLED.name, prompt="JULIET:", max_tokens=1024)
        assert refusal.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="maximum context length is 1024") as refusal:
            await client.completions.create(model=BUNDLED.name, prompt="word " * 3000)
        assert refusal.value.code == "context_length_exceeded"


async def test_a_chat_template_makes_a_text_of_a_chat_and_without_one_it_is_refused(
    there: Mesh, tmp_path: Path
) -> None:
    import openai

    chatting = chatting_model(tmp_path)
    for model in (chatting, BUNDLED):
        assert (await there.session(model=str(model), nodes=["a"]))["chats"] == (model == chatting)
    chat = [{"role": "system", "content": "A play."}, {"role": "user", "content": "JULIET:"}]
    same = {"max_tokens": 12, "seed": 3, "temperature": 0.8}
    async with openai.AsyncOpenAI(base_url=f"{there.url}/v1", api_key="unused", max_retries=0) as client:
        text = await client.completions.create(model=BUNDLED.name, prompt="system: A play.\nuser: JULIET:\n", **same)
        answer = await client.chat.completions.create(model=chatting.name, messages=chat, **same)
        assert answer.choices[0].message.content == text.choices[0].text
        with pytest.raises(openai.BadRequestError, match="no chat template") as refusal:
            await client.chat.completions.create(model=BUNDLED.name, messages=chat)
        assert (refusal.value.code, refusal.value.param) == ("no_chat_template", "messages")


async def test_requests_share_a_context_that_is_too_small_for_all(there: Mesh) -> None:
    """Those that came last step back and compute their tokens again; nobody's text changes."""
    prompts = [f"{name}:" for name in ("ROMEO", "KING", "JULIET", "DUKE", "NURSE")]
    sampled = {"temperature": 0.9, "seed": 5, "max_tokens": 50, "ignore_eos": True, "frequency_penalty": 0.5}
    await there.session(nodes=["a", "b"], context=110)
    alone = [await text_of(there.url, prompt=prompt, **sampled) for prompt in prompts]
    together = await asyncio.gather(*(text_of(there.url, prompt=prompt, **sampled) for prompt in prompts))
    assert together == alone


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"quantisation": "int8"}, marks=SOAK),
        {"exact": True},
        pytest.param({"cache_format": "int8"}, marks=SOAK),
    ],
    ids=str,
)
async def test_a_context_four_times_the_caches_in_memory_writes_the_same_text(how: dict[str, Any], there: Mesh) -> None:
    """What does not fit lies on both nodes' disks. A prompt that begins alike finds it there."""
    lines = "ROMEO:\nO, she doth teach the torches to burn bright!\n"
    asked = {"prompt": lines * 6, "max_tokens": 115, "ignore_eos": True}
    texts = []
    for caches in ({"context": 256}, {"context": 256, "cache_tokens": 64, "cache_disk_tokens": 192}):
        session = await there.session(nodes=["a", "b"], **how, **caches)
        texts.append([await text_of(there.url, **asked), await text_of(there.url, **asked)])
        async with Client(there.url) as client:
            told = (await client.call("GET", f"/api/sessions/{session['id']}"))["activity"]
            await client.call("DELETE", f"/api/sessions/{session['id']}")
    assert {*texts[0]} == {*texts[1]}
    assert len({*texts[0]}) == 1
    assert 250 < told["prompt_tokens"] / 2 + 115 <= 256, "it fills what there is"
    assert (told["far_blocks"], told["far_blocks_used"] > 4, told["trouble"]) == (6, True, "")
    assert told["cached_tokens"] >= 128


async def test_layers_with_a_window_keep_a_few_positions_and_write_the_same_text(there: Mesh, tmp_path: Path) -> None:
    """Alone, with others and where a prefix is found; in much less memory than what all tokens take."""
    model = shutil.copytree(BUNDLED, tmp_path / "windowed")
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 40}
    (model / "config.json").write_text(json.dumps(config))
    prompts = [line * 24 for line in ("ROMEO:\nO, she doth teach!\n", "JULIET:\nAy me!\n", "KING:\nCome hither.\n")]
    asked = [{"model": model.name, "prompt": prompt, "max_tokens": 60, "ignore_eos": True} for prompt in prompts]
    texts, planned = [], []
    for tokens in (1024, 8192):  # of the fewer, all are kept in all layers
        session = await there.session(model=str(model), nodes=["a", "b"], context=1024, cache_tokens=tokens)
        alone = [await text_of(there.url, **each) for each in asked]
        assert await asyncio.gather(*(text_of(there.url, **each) for each in asked)) == alone
        texts.append(alone)
        async with Client(there.url) as client:
            told = (await client.call("GET", f"/api/sessions/{session['id']}"))["activity"]
            await client.call("DELETE", f"/api/sessions/{session['id']}")
        planned.append(sum(rank["memory"]["planned_bytes"] for rank in session["ranks"]))
    assert texts[0] == texts[1]
    assert (told["blocks"], told["windowed_blocks"]) == (256, 64)
    assert told["cached_tokens"] > 0.4 * told["prompt_tokens"], "the second time they were found"
    a_token = 2 * 4 * 3 * 32 * 6
    assert planned[1] - planned[0] == (64 * 32 - 1024) * a_token


@pytest.mark.soak
async def test_exact_answers_do_not_depend_on_the_split_or_the_company(there: Mesh) -> None:
    """To the last bit of every log-probability; in company, some step back and compute their tokens again."""
    prompts = [f"{name}:" for name in ("ROMEO", "KING", "JULIET")]
    sampled = {**GREEDY, "temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 40, "logprobs": 3}
    async with Client(there.url) as client:

        async def choice_of(prompt: str) -> object:
            answer = await client.call("POST", "/v1/completions", {**sampled, "prompt": prompt})
            return answer["choices"][0]

        seen = []
        for nodes, shares in ((["a"], [1]), (["c", "a"], [1, 4]), (["a", "b", "c"], [3, 2, 1])):
            session = await there.session(nodes=nodes, shares=shares, quantisation="int8", exact=True, context=90)
            if not seen:
                seen.append([await choice_of(prompt) for prompt in prompts])
            seen.append(await asyncio.gather(*map(choice_of, prompts)))
            await client.call("DELETE", f"/api/sessions/{session['id']}")
        assert all(answers == seen[0] for answers in seen)


async def test_large_prompts_do_not_keep_a_node_from_showing_life(there: Mesh) -> None:
    session = await there.session(nodes=["a"])

    async def ask() -> str:
        with pytest.raises(CliError) as refusal:
            await text_of(there.url, prompt="word " * 200_000)
        return str(refusal.value)

    assert all("maximum context length" in words for words in await asyncio.gather(*(ask() for _ in range(6))))
    assert await text_of(there.url)
    async with Client(there.url) as client:
        assert (await client.call("GET", f"/api/sessions/{session['id']}"))["state"] == "ready"


async def test_the_reference_engine_serves_too(there: Mesh) -> None:
    session = await there.session(engine="reference", nodes=["a", "b"])
    by_reference = await text_of(there.url, max_tokens=6)
    async with Client(there.url) as client:
        await client.call("DELETE", f"/api/sessions/{session['id']}")
    await there.session(nodes=["b"])
    assert await text_of(there.url, max_tokens=6) == by_reference


@pytest.mark.parametrize("wire", [pytest.param("bf16", marks=SOAK), "int8"])
async def test_sums_may_travel_narrow(wire: str, there: Mesh) -> None:
    session = await there.session(nodes=["a", "b", "c"], wire=wire)
    assert session["wire"] == wire
    text = await text_of(there.url)
    assert text == await text_of(there.url)
    async with Client(there.url) as client:
        with pytest.raises(CliError, match="wire"):
            await client.call("POST", "/api/sessions", {"model": str(BUNDLED), "wire": "fp8"})


async def test_requests_that_share_steps_are_answered_as_if_each_were_alone(there: Mesh) -> None:
    await there.session(nodes=["a", "b"])
    alone = [await text_of(there.url, prompt=prompt) for prompt in ("ROMEO:", "KING:", "O ")]
    together = await asyncio.gather(*(text_of(there.url, prompt=prompt) for prompt in ("ROMEO:", "KING:", "O ")))
    assert together == alone


async def test_the_session_tells_what_its_requests_have_been_spared(there: Mesh) -> None:
    """The same in all as the answers tell one by one."""
    session = await there.session(nodes=["a", "b"])
    opening = "ROMEO:\nO, she doth teach the torches to burn bright!\n" * 4

    async with Client(there.url) as client:

        async def usage_of(prompt: str, **changes: object) -> dict[str, Any]:
            answer = await client.call("POST", "/v1/completions", {**GREEDY, "prompt": prompt, **changes})
            usage: dict[str, Any] = answer["usage"]
            return usage

        assert session["activity"] is None
        usages = [await usage_of(f"{opening}{name}:", max_tokens=4) for name in ("JULIET", "KING")]
        told = (await client.call("GET", f"/api/sessions/{session['id']}"))["activity"]
        assert (told["active"], told["waiting"], told["blocks_used"], told["generated_tokens"]) == (0, 0, 0, 8)
        assert told["blocks_kept"] > 0
        assert told["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert told["cached_tokens"] == sum(cached)
        assert told["cached_tokens"] >= 64, "the second has found what both have in common"

        # An answer that says the same token for ever is guessed.
        await usage_of("KING:", max_tokens=60, ignore_eos=True, logit_bias={"5": 100})
        after = (await client.call("GET", f"/api/sessions/{session['id']}"))["activity"]
        assert after["generated_tokens"] == 68
        assert 20 < after["accepted_drafts"] <= after["tried_drafts"]


@pytest.mark.soak
async def test_a_killed_daemon_ends_its_request_and_its_worker_and_the_others_serve_on(tmp_path: Path) -> None:
    """Twice: a whole machine that is gone, and a daemon alone, whose worker has nobody to work for."""
    async with mesh(tmp_path, "a", "b", "c") as there:
        for victim, alone in (("b", False), ("c", True)):
            nodes = [name for name in "abc" if name in there.nodes]
            session = await there.session(nodes=nodes, recover=False)
            killed = there.nodes.pop(victim)
            daemon, *workers = killed.family()
            assert workers
            async with Client(there.url) as client:
                answer = client.stream("/v1/completions", {**GREEDY, "max_tokens": 1000, "ignore_eos": True})
                await anext(answer)
                for process in [daemon] if alone else [daemon, *workers]:
                    process.kill()
                with pytest.raises(CliError, match=rf"rank 1|'{victim}'|node {victim}"):
                    async for _ in answer:
                        pass
                state = await client.call("GET", f"/api/sessions/{session['id']}")
                assert state["state"] == "failed"
                await client.call("DELETE", f"/api/sessions/{session['id']}")
            _, left = await asyncio.to_thread(psutil.wait_procs, workers, END_S)
            assert not left
        await there.session(nodes=["a"])
        assert await text_of(there.url)


@pytest.mark.soak
async def test_whoever_is_ended_politely_in_an_answer_is_no_crash(tmp_path: Path) -> None:
    async with mesh(tmp_path, "a", "b") as there:
        for who, words in (
            ("b", r"^node 'b' \(rank 1\) has left: its daemon was ended there"),
            ("", "^the orchestrator is shutting down$"),
        ):
            session = await there.session(nodes=["a", "b"] if who else ["a"], recover=False)
            ended = there.nodes[who] if who else there.orchestrator
            async with Client(there.url) as client:
                answer = client.stream("/v1/completions", {**GREEDY, "max_tokens": 1000, "ignore_eos": True})
                await anext(answer)
                ended.process.send_signal(signal.SIGINT)
                with pytest.raises(CliError, match=words):
                    async for _ in answer:
                        pass
                if who:
                    await client.call("DELETE", f"/api/sessions/{session['id']}")
            assert await ended.wait() == 130


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
async def test_an_interrupt_ends_everything_that_was_started(how: signal.Signals, tmp_path: Path) -> None:
    where = ("--host", "127.0.0.1", "--port", "0", "--http-port", "0", "--state", str(tmp_path))
    up = await MotleyProcess.start("up", *where, "--threads", "1", "--cache", str(tmp_path / "cache"))
    url = (await up.line(r"API: (http://\S+)/v1"))[1]
    async with Client(url) as client:
        (node,) = (await client.call("GET", "/api/nodes"))["nodes"]
        assert node["state"] == "alive", "it was told too early that it is up"
        status, _, err = await motley("up", *where)
        assert status == 1
        assert f"runs already on this machine with the state folder {tmp_path} (process {up.process.pid})" in err
        await client.call("POST", "/api/sessions?wait=ready", {"model": str(BUNDLED)})
    family = up.family()
    assert len(up.workers()) == 1
    assert await up.end(how) == 130
    assert not [process for process in family if process.is_running()]
    (share,) = ShareCache(tmp_path / "cache").entries()
    assert {file.name for file in (tmp_path / "cache").iterdir()} == {
        share.key,
        speeds.FILE,
        speeds.LOCK,
        read_before.FOLDER,
    }


@pytest.mark.soak
async def test_a_node_comes_back_to_an_orchestrator_that_was_restarted(tmp_path: Path) -> None:
    """And one that has never seen it waits for it, unless it is interrupted."""
    async with mesh(tmp_path, "a") as there:
        await there.orchestrator.end()
        await there.nodes["a"].line("lost the orchestrator")
        how = ("--memory", "2GB", "--threads", "1", "--cache", str(there.cache), "--token", there.token)
        for name in ("late", "never"):
            joining = ("join", there.target, "--name", name, *how)
            there.nodes[name] = await MotleyProcess.start(*joining, entry="tests.e2e.node")
        for name in ("late", "never"):
            await there.nodes[name].line("waiting for the orchestrator: cannot reach an orchestrator at")
        assert await there.nodes.pop("never").end(signal.SIGINT) == 130
        port = there.target.rpartition(":")[2]
        where = ("--host", "127.0.0.1", "--port", port, "--http-port", "0", "--state", str(tmp_path / "state"))
        again = await MotleyProcess.start("up", "--no-node", *where)
        try:
            there.url = (await again.line(r"API: (http://\S+)/v1"))[1]
            deadline = time.monotonic() + START_S
            async with Client(there.url) as client:
                while len((await client.call("GET", "/api/nodes"))["nodes"]) < 2:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.1)
            await there.session(nodes=["a", "late"])
            assert await text_of(there.url)
        finally:
            await again.end()


def test_joining_badly_ends_with_one_clear_line(there: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_less(monkeypatch.setattr)
    secret, fingerprint = there.token.split(".")
    good = there.target
    with socket.create_server(("127.0.0.1", 0)) as mute, unanswered_port() as unused:
        for arguments, token, words in (
            ((good,), "wrong." + fingerprint, "wrong join token"),
            ((good,), f"{secret}.{'0' * 64}", "not the one this join token is from"),
            ((good,), "nonsense", "not a join token"),
            ((good, "--name", "a"), there.token, "--name"),
            ((f"127.0.0.1:{unused}",), there.token, "is `motley up` running there"),
            ((f"127.0.0.1:{mute.getsockname()[1]}",), there.token, "no answer from"),
            (("nonsense:",), there.token, "HOST:PORT"),
            ((good, "--memory", "much"), there.token, "much"),
        ):
            with monkeypatch.context() as patch:
                if words == "no answer from":  # the only one that is waited for
                    patch.setattr("motley.daemon.node.joining.trust.CONNECT_S", 3.0)
                status, _, err = command("join", *arguments, "--wait", "0", MOTLEY_TOKEN=token)
            assert (status, words in err) == (1, True), err


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for option, other in (("--port", "--http-port"), ("--http-port", "--port")):
            where = ("--host", "127.0.0.1", option, port, other, "0", "--state", str(tmp_path))
            status, _, err = command("up", "--no-node", *where)
            assert status == 1
            assert re.search(rf"port {port} .*{option}", err)


async def test_bad_models_are_refused_by_name(there: Mesh, tmp_path: Path) -> None:
    async with Client(there.url) as client:
        with pytest.raises(CliError, match=r"nowhere"):
            await client.call("POST", "/api/sessions", {"model": str(tmp_path / "nowhere")})
        broken = tmp_path / "broken"
        broken.mkdir()
        for file in BUNDLED.iterdir():
            (broken / file.name).write_bytes(file.read_bytes()[:100_000])
        with pytest.raises(CliError, match=r"model\.safetensors"):
            await client.call("POST", "/api/sessions", {"model": str(broken)})
        with pytest.raises(CliError, match="allows 1024"):
            await client.call("POST", "/api/sessions", {"model": str(BUNDLED), "context": 2**20})
        await there.join("small", memory="206MB")
        with pytest.raises(CliError, match=r"small: 206.00 MB available, .* needed, .* missing"):
            await client.call("POST", "/api/sessions", {"model": str(BUNDLED), "nodes": ["small"]})
