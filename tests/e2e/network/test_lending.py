"""A model's folder on one machine is enough: the others read of it what their shares need."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from motley.bench.random_models.writing import synthesise
from motley.cli.reaching.client import Client
from motley.daemon.lending.mirror import FOLDER
from motley.orchestrator.known_models.shapes import SHAPES
from tests.e2e.answers.test_experts import SMALL
from tests.e2e.losses.test_survival import GREEDY, SAMPLED, streamed, undisturbed
from tests.e2e.processes import BUNDLED, Mesh, chatting_model, mesh

CHAT = {"messages": [{"role": "user", "content": "Speak!"}], "max_tokens": 20, "ignore_eos": True, "temperature": 0}

REVISION = "0123456789abcdef0123456789abcdef01234567"


async def chat(there: Mesh, name: str) -> str:
    async with Client(there.url) as client:
        answer = await client.call("POST", "/v1/chat/completions", {**CHAT, "model": name})
        text: str = answer["choices"][0]["message"]["content"]
        return text


def taken(cache: Path) -> int:
    """Bytes on the disk of what a node has borrowed."""
    return sum(file.stat().st_blocks * 512 for file in (cache / FOLDER).rglob("*.safetensors") if file.is_file())


def as_fetched(model: Path, hub: Path) -> str:
    """Put a model where one that was fetched from the hub is; returns what it is asked for by."""
    own = hub / "models--owner--bard"
    shutil.copytree(model, own / "snapshots" / REVISION)
    (own / "refs").mkdir()
    (own / "refs" / "main").write_text(REVISION)
    return "owner/bard"


@pytest.mark.soak
async def test_a_model_is_fetched_from_the_hub_by_one_machine(tmp_path: Path) -> None:
    """The other reads there what its share needs."""
    name = as_fetched(chatting_model(tmp_path), tmp_path / "hub")
    async with mesh(tmp_path) as there:
        for node, hub in (("a", "hub"), ("b", "empty")):
            where = {"HF_HUB_CACHE": str(tmp_path / hub), "HF_HUB_OFFLINE": "1"}
            await there.join(node, cache=tmp_path / f"cache-{node}", **where)
        await there.session(model=name, nodes=["a", "b"], shares=[2, 3], exact=True, name="lent")
        await there.session(model=str(BUNDLED), nodes=["a"], exact=True, name="own")
        found = [await undisturbed(there.url, {**GREEDY, "model": each}) for each in ("lent", "own")]
        assert found[0] == found[1]
    assert 0 < taken(tmp_path / "cache-b") < (BUNDLED / "model.safetensors").stat().st_size
    assert not taken(tmp_path / "cache-a")


@pytest.mark.soak
async def test_a_folder_on_one_machine_is_enough(tmp_path: Path) -> None:
    """For rank 0, too, whose node has the tokenizer and the template from there, and the draft model. Nobody's text
    changes, neither when a borrower dies in the middle of an answer, nor when the lender does, of which nothing more is
    needed then."""
    owner = tmp_path / "owner"
    owner.mkdir()
    shutil.move(chatting_model(tmp_path), owner / "bard")
    nowhere = tmp_path / "nowhere"
    nowhere.mkdir()
    async with mesh(tmp_path) as there:
        caches = {name: tmp_path / f"cache-{name}" for name in "abc"}
        for name, models in (("a", owner), ("b", nowhere), ("c", nowhere)):
            await there.join(name, cache=caches[name], models=models)
        own = await there.session(model=str(BUNDLED), nodes=["a", "b"], shares=[2, 3], exact=True, name="own")
        texts = [await undisturbed(there.url, {**body, "model": "own"}) for body in (GREEDY, SAMPLED)]
        how: dict[str, Any] = {"model": "bard", "exact": True, "name": "lent", "shares": [2, 3], "draft_model": "bard"}
        await there.session(nodes=["b", "c"], **how)
        assert [await undisturbed(there.url, {**body, "model": "lent"}) for body in (GREEDY, SAMPLED)] == texts
        spoken = await chat(there, "lent")
        whole = (BUNDLED / "model.safetensors").stat().st_size
        assert 0 < taken(caches["c"]) < whole <= taken(caches["b"]), "b has all of the draft model besides"

        def die(name: str) -> None:
            workers = there.nodes[name].workers()
            workers[0].kill()  # its only rank

        text, _ = await streamed(there.url, {**GREEDY, "model": "lent"}, 20, lambda: die("c"))
        assert text == texts[0]
        assert await chat(there, "lent") == spoken
        async with Client(there.url) as client:
            await client.call("DELETE", f"/api/sessions/{own['id']}")
        await there.nodes.pop("a").kill()
        assert await undisturbed(there.url, {**SAMPLED, "model": "lent"}) == texts[1]


async def test_expert_hosts_borrow_the_experts_that_they_hold(tmp_path: Path) -> None:
    """The trunk and the hosts are on machines without files; when one is lost, the other fetches what is missing."""
    owner, nowhere = tmp_path / "owner", tmp_path / "nowhere"
    for folder in (owner, nowhere):
        folder.mkdir()
    synthesise(SHAPES["mixtral-quarter"] | SMALL, owner / "moe")
    body = {**GREEDY, "max_tokens": 60}
    async with mesh(tmp_path) as there:
        caches = {name: tmp_path / f"cache-{name}" for name in "abc"}
        for name, models in (("a", owner), ("b", nowhere), ("c", nowhere)):
            await there.join(name, cache=caches[name], models=models)
        how: dict[str, Any] = {"model": "moe", "experts": "parallel", "exact": True, "context": 512}
        await there.session(nodes=["a"], name="own", **how)
        made = await there.session(nodes=["b", "c"], name="lent", **how)
        assert {host["node"] for host in made["hosts"]} == {"b", "c"}
        own = await undisturbed(there.url, {**body, "model": "own"})
        assert await undisturbed(there.url, {**body, "model": "lent"}) == own
        whole = (owner / "moe" / "model.safetensors").stat().st_size
        assert all(0 < taken(caches[name]) < whole for name in "bc")
        trunk = made["ranks"][0]["node"]
        (other,) = {"b", "c"} - {trunk}
        before = taken(caches[trunk])

        def die() -> None:
            for process in there.nodes[other].family():
                process.kill()

        text, _ = await streamed(there.url, {**body, "model": "lent"}, 20, die)
        assert text == own
        assert taken(caches[trunk]) > before
