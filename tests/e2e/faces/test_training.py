"""A training as a job of a mesh of real processes, where torch, transformers and peft are installed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from motley.cli.reaching.client import Client
from motley.training.files import CURVE, Curve
from tests.e2e.processes import BUNDLED, Mesh, in_thread, mesh

for _name in ("torch", "transformers", "peft"):
    pytest.importorskip(_name)

DOCUMENTS = Path(__file__).parents[2] / "training" / "documents.txt"
"""Another author's text than the bundled model's."""
ALICE = DOCUMENTS.with_name("alice.txt")
"""Another one's, and longer: Lewis Carroll's first book of Alice, of 1865."""
SETTINGS = ("--batch", "4", "--rate", "5e-3", "--context", "64", "--warm-up", "2", "--rank", "4")


READS_THE_WIRE = """
import os, sys

if "motley.training.mesh.process" in sys.orig_argv:
    import motley.transport

    class Heard:
        def __init__(self, stream):
            self.stream = stream
            self.file = open(f"{os.environ['WIRE']}/{os.environ['NODE']}-{os.getpid()}", "ab", buffering=0)

        def __getattr__(self, name):
            return getattr(self.stream, name)

        def send(self, data):
            sent = self.stream.send(data)
            self.file.write(data[:sent])
            return sent

    connect = motley.transport.connect_mesh
    motley.transport.connect_mesh = lambda *args, **told: connect(*args, wrap=lambda peer, each: Heard(each), **told)
"""
"""Run first by every Python of a node: of a training's worker, all that it sends to others is kept, before TLS."""


def written(folder: Path) -> Path:
    """Pieces of other authors' texts, 100 characters each."""
    text, file = DOCUMENTS.read_text(), folder / "documents.jsonl"
    file.write_text("\n".join(json.dumps({"text": text[at : at + 100]}) for at in range(0, len(text), 100)))
    return file


@asynccontextmanager
async def three_machines(folder: Path, models: Path | None = None, **memory: str) -> AsyncIterator[Mesh]:
    """A mesh of nodes a, b and c, each with a lease, a cache and memory of its own; a has a folder of models."""
    (folder / "wire").mkdir()
    (folder / "sitecustomize.py").write_text(READS_THE_WIRE)
    reading = {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "WIRE": str(folder / "wire")}
    async with mesh(folder) as there:
        for name, size in memory.items():
            own = models if name == "a" else None
            where = {"MOTLEY_LEASE": str(folder / name / "lease.json"), "NODE": name, **reading}
            await there.join(name, size, folder / name / "cache", models=own, **where)
        yield there


async def until(there: Mesh, job: str, what: str, true: Any, seconds: float = 240.0) -> dict[str, Any]:
    """A job, once something is true of it."""
    async with Client(there.url) as client, asyncio.timeout(seconds):
        while True:
            told = await client.call("GET", f"/api/jobs/{job}")
            if true(told):
                return told
            assert told["state"] in ("running", "done"), (what, told["why"], told["log"])
            await asyncio.sleep(0.1)


def member(job: dict[str, Any], node: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in job["members"] if each["node"] == node and not each["leads"])
    return found


async def test_nodes_train_alone_and_one_that_is_killed_resumes(tmp_path: Path) -> None:
    """Of three nodes one has too little memory; a worker is killed, then its whole node; the adapter is served."""
    data, out = written(tmp_path), tmp_path / "out"
    async with three_machines(tmp_path, a="4GB", b="3GB", c="300MB") as there:
        await there.session(nodes=["a"], adapters=2)
        words = ("--out", str(out), "--mode", "merge", "--nodes", "a,b,c", "--serve", "papers", "--steps", "40")
        told = await in_thread(
            *("train", str(BUNDLED), str(data), *words, *SETTINGS, "--keep-every", "2", "--detach", "--json"),
            *("--url", there.url),
            MOTLEY_LEASE=str(tmp_path / "a" / "lease.json"),
        )
        assert told[0] == 0, told[2]
        number = json.loads(told[1].splitlines()[-1])["id"]

        def at(node: str, step: int) -> Any:
            return lambda job: (member(job, node)["latest"] or {"step": 0})["step"] >= step

        await until(there, number, "it trains", at("b", 4))
        lease = json.loads((tmp_path / "b" / "lease.json").read_bytes())
        assert lease["device"] == "cpu"
        assert f"({number})" in lease["holder"]["name"]
        worker = next(each for each in there.nodes["b"].family() if "training" in " ".join(each.cmdline()))
        worker.kill()
        killed = await until(there, number, "its death is known", lambda job: member(job, "b")["deaths"] == 1)
        assert killed["state"] == "running"
        await until(there, number, "it resumes", at("b", 12))
        await there.nodes["b"].kill()
        await until(there, number, "its node is away", lambda job: member(job, "b")["state"] == "away")
        await there.join("b", "3GB", tmp_path / "b" / "cache", MOTLEY_LEASE=str(tmp_path / "b" / "lease.json"))
        done = await until(there, number, "it is served", lambda job: job["served_as"])

        result = done["result"]
        before, after = result["perplexity"]
        assert after < 0.9 * before
        assert {node: each.get("wire_bytes") for node, each in result["nodes"].items()} == {"a": 0, "b": 0, "c": None}
        assert all(result["nodes"][node]["dealt_bytes"] > 20_000 for node in "ab"), "and bytes are counted"
        assert "too little memory" in member(done, "c")["why"]
        assert result["nodes"]["b"]["began_at"] >= 10, "it went on from its checkpoint"
        assert sum(each.get("examples", 0) for each in result["nodes"].values()) == result["learnt"]
        for name in "abc":
            if name != "c":
                await _removed(tmp_path / name / "lease.json")
            await _removed(tmp_path / name / "cache" / "training" / name / number)
        async with Client(there.url) as client:
            asked = {"model": done["served_as"], "prompt": "We", "max_tokens": 8, "temperature": 0}
            answer = await client.call("POST", "/v1/completions", asked)
        assert answer["usage"]["completion_tokens"] > 0
        _, shown, _ = await in_thread("jobs", "show", number, "--url", there.url)
        assert "perplexity of" in shown


async def test_a_chain_that_breaks_goes_on_without_who_is_gone(tmp_path: Path) -> None:
    """Three nodes have the layers, one is killed for good; the curve is that of one process. Only the owner has the
    model's files; what crosses is read, and no token and no label is among it."""
    from motley.training.settings import Settings
    from motley.training.training import read_data, train
    from tests.training.chain_process import is_shown

    shutil.copytree(BUNDLED, tmp_path / "models" / "bard")
    data, out = written(tmp_path), tmp_path / "out"
    steps = 16
    settings = Settings(steps=steps, batch=4, rate=5e-3, context=64, warm_up=2, rank=4)
    async with three_machines(tmp_path, tmp_path / "models", a="3GB", b="3GB", c="3GB") as there:
        words = ("--out", str(out), "--mode", "chain", "--nodes", "b,c", "--steps", str(steps), "--keep-every", "2")
        told = await in_thread(
            *("train", "bard", str(data), *words, *SETTINGS, "--detach", "--json", "--url", there.url),
            *("--patience", "2s"),
            MOTLEY_LEASE=str(tmp_path / "a" / "lease.json"),
        )
        assert told[0] == 0, told[2]
        number = json.loads(told[1].splitlines()[-1])["id"]

        def led_to(step: int) -> Any:
            return lambda job: (job["members"][0]["latest"] or {"step": 0})["step"] >= step

        await until(there, number, "it trains", led_to(5))
        await there.nodes["c"].kill()
        done = await until(there, number, "it is done", lambda job: job["state"] == "done")
        alone = await asyncio.to_thread(train, BUNDLED, data, tmp_path / "alone", settings)
        assert done["epoch"] > 1
        assert [each["node"] for each in done["members"]] == ["a", "b"]
        assert sum(stop - start for start, stop in done["result"]["layers"].values()) == 6
        losses = [point.loss for point in Curve(out / CURVE).read() if point.loss is not None]
        assert losses == pytest.approx([point.loss for point in alone.points if point.loss is not None], rel=1e-4)
        assert done["result"]["perplexity"] == pytest.approx(alone.perplexity, rel=1e-3)
        assert (out / "adapter" / "adapter_model.safetensors").is_file()
        assert all(f"{node}: fetches the model from a" in done["log"] for node in "bc")
        sent = {file.name[0]: file.read_bytes() for file in sorted((tmp_path / "wire").iterdir())}
        assert sent.keys() == {"a", "b", "c"}
        assert b'"forward"' in sent["a"], "the wire was read"
        examples = read_data(BUNDLED, data, settings).learnt[:6]
        for node, each in sent.items():
            assert not is_shown(examples, each, every=24), node
        assert is_shown(examples, examples[0].tokens.tobytes(), every=24), "it would have been seen"
        assert "self-evident" not in json.dumps(done), "nor is it told to the orchestrator"


async def test_two_owners_of_data_lead_in_turn_and_both_have_the_adapter(tmp_path: Path) -> None:
    """What is offered at one machine is trained on by whoever knows the offer; both texts stay where they are."""
    from motley.training.settings import Settings
    from motley.training.training import read_data
    from tests.training.chain_process import is_shown

    lines = written(tmp_path).read_text().splitlines()
    texts = {"a": tmp_path / "a.jsonl", "b": tmp_path / "b.jsonl"}
    texts["a"].write_text("\n".join(lines[::2]))
    texts["b"].write_text("\n".join(lines[1::2]))
    async with three_machines(tmp_path, a="3GB", b="3GB", c="3GB") as there:

        def words(node: str) -> tuple[str, ...]:
            return "train", str(BUNDLED), str(texts[node]), "--out", str(tmp_path / f"out-{node}"), "--json"

        offering = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "motley.cli.main", *words("b"), "--offer"),
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"MOTLEY_LEASE": str(tmp_path / "b" / "lease.json")},
        )
        try:
            assert offering.stdout is not None
            (offer,) = json.loads(await offering.stdout.readline())["offers"]
            options = ("--mode", "chain", "--nodes", "c", "--with", offer, "--turn", "2", "--last", "1", "--steps", "6")
            lease = str(tmp_path / "a" / "lease.json")
            told = await in_thread(*words("a"), *SETTINGS, *options, "--detach", "--url", there.url, MOTLEY_LEASE=lease)
            assert told[0] == 0, told[2]
            number = json.loads(told[1].splitlines()[-1])["id"]
            done = await until(there, number, "it is done", lambda job: job["state"] == "done")
            said, _ = await asyncio.wait_for(offering.communicate(), 60.0)
        finally:
            if offering.returncode is None:
                offering.kill()
    assert json.loads(said) == {"adapter": str(tmp_path / "out-b" / "adapter")}, "and with that the offer is over"
    assert done["result"]["owners"] == ["a", "b"]
    assert done["result"]["layers"].keys() == {"a", "c"}
    assert sum(stop - start for start, stop in done["result"]["layers"].values()) == 5, "and the last is at both owners"
    before, after = done["result"]["perplexity"]
    assert after < before
    adapters = [(tmp_path / f"out-{node}" / "adapter" / "adapter_model.safetensors").read_bytes() for node in "ab"]
    assert adapters[0] == adapters[1]
    sent = b"".join(file.read_bytes() for file in (tmp_path / "wire").iterdir())
    assert sent.count(b'"forward"') > 6, "the wire was read"
    for node in "ab":
        examples = read_data(BUNDLED, texts[node], Settings(context=64)).learnt[:6]
        assert not is_shown(examples, sent, every=24), node


@pytest.mark.soak
@pytest.mark.timeout(2400)
async def test_perplexity_falls_alike_in_one_process_with_little_memory_by_merging_and_in_a_chain(
    tmp_path: Path,
) -> None:
    """On what is held out of a book, within 2 %."""
    from motley.training.memory.switches import parse_switches
    from motley.training.settings import Settings
    from motley.training.training import train

    text, data = ALICE.read_text()[:60_000], tmp_path / "alice.jsonl"
    data.write_text("\n".join(json.dumps({"text": text[at : at + 200]}) for at in range(0, len(text), 200)))
    settings = Settings(steps=60, batch=8, rate=2e-3, context=96, held_out=0.1)
    alone = await asyncio.to_thread(train, BUNDLED, data, tmp_path / "alone", settings)
    assert alone.perplexity is not None
    fall = alone.perplexity[0] - alone.perplexity[1]
    assert fall > 0.5 * alone.perplexity[0]
    tight = replace(settings, memory=parse_switches("tight"))
    little = await asyncio.to_thread(train, BUNDLED, data, tmp_path / "little", tight)
    assert little.perplexity is not None
    assert little.perplexity[0] - little.perplexity[1] == pytest.approx(fall, rel=0.02)
    told = ("--steps", "60", "--batch", "8", "--rate", "2e-3", "--context", "96", "--held-out-share", "0.1")
    async with three_machines(tmp_path, a="4GB", b="4GB", c="4GB") as there:
        for mode in ("merge", "chain"):
            words = ("--out", str(tmp_path / mode), "--mode", mode, "--nodes", "b,c", "--detach", "--json")
            lease = str(tmp_path / "a" / "lease.json")
            said = await in_thread(
                "train", str(BUNDLED), str(data), *words, *told, "--url", there.url, MOTLEY_LEASE=lease
            )
            assert said[0] == 0, said[2]
            number = json.loads(said[1].splitlines()[-1])["id"]
            done = await until(there, number, "it is done", lambda job: job["state"] == "done", seconds=900.0)
            before, after = done["result"]["perplexity"]
            assert before == pytest.approx(alone.perplexity[0], rel=1e-4)
            assert before - after == pytest.approx(fall, rel=0.02), mode


async def _removed(folder: Path) -> None:
    async with asyncio.timeout(20):
        while True:
            if not await asyncio.to_thread(folder.exists):
                return
            await asyncio.sleep(0.1)
