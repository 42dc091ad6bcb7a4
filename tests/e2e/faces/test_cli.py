"""The command line's promises: what `--json` ends with, help with examples, exit statuses."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from motley.bench.reports.standard import Standard
from motley.cli.errors import EXPECTED
from motley.cli.reaching.client import Client
from motley.cli.reaching.place import USUAL_URL
from tests.e2e.node import measure_less
from tests.e2e.processes import (
    BUNDLED,
    COMMAND_S,
    END_S,
    START_S,
    Mesh,
    MotleyProcess,
    command,
    last_json,
    mesh,
    motley,
    said_json,
)

USAGE = [
    (("cache", "rm"), "name the models or shares to remove, as `motley cache ls` shows them, or say --all"),
    (("cache", "rm", "abc", "--all"), "or say --all"),
    (("cache", "rm", "xyz"), "no model is called so, and no key begins with 'xyz'"),
    (("cache", "ls", "no-such-model"), "there are no shares of a model 'no-such-model'"),
    (("join", "127.0.0.1:9", "--token", "x", "--cache-limit", "lots"), "--cache-limit: "),
    (("join", "127.0.0.1:9", "--token", "x", "--memory", "6"), "--memory: '6' is 6 bytes: write a number and a unit"),
    (("join", "127.0.0.1:9", "--token", "x", "--name", " "), "--name is blank"),
    (("join", "127.0.0.1:9", "--token", "x", "--wait", "0", "--memory", "900TB"), "--memory 900TB is cut to the "),
    (("join", "127.0.0.1:9", "--token", "x", "--wait", "0", "--threads", "999"), "--threads 999 is cut to the "),
    (("join", "127.0.0.1:9", "--token", "x", "--wait", "0", "--threads", "0"), "each rank computes with every core, "),
    (
        ("join", "127.0.0.1:9", "--token", "x", "--wait", "0", "--advertise", "192.0.2.7"),
        "192.0.2.7 is no address of this machine",
    ),
    (("join", "127.0.0.1:9", "--token", "x", "--advertise", "no..name"), "--advertise: 'no..name' is no address"),
    (("up", "--advertise", "0.0.0.0"), "--advertise: 0.0.0.0 is the address of no machine"),
    (("up", "--memory", "1MB"), "--memory: 1MB holds nothing: a rank takes 201 MB before its weights"),
    (("up", "--name", ""), "--name is blank"),
    (("status", "--url", "http://127.0.0.1:9"), "no orchestrator answers at http://127.0.0.1:9"),
    (("status", "--url", "gopher:/x"), "'gopher:/x' is not an address"),
    (("run", "x", ""), "the prompt is empty"),
    (("run", "x", "-"), "standard input is empty"),
    (("run", "x", "y", "--top-p", "3"), "--top-p must be at most 1, not 3.0"),
    (("run", "x", "y", "--top-k", "-1"), "--top-k must be at least 0, not -1"),
    (("run", "x", "y", "--raw", "--stop", ""), "--stop[0] must not be empty"),
    (("run", "x", "y", "--nodes", "a,,b"), "--nodes wants names like gaming-pc,laptop"),
    (("run", "x", "y", "--shares", "0,0"), "--shares wants non-negative numbers that are not all zero"),
    (("run", "x", "y", "--url", "http://127.0.0.1:9"), "no orchestrator answers"),
    (("bench", "latency", "--model", "/nowhere/at/all"), "/nowhere/at/all"),
    (("bench", "latency", "--model", str(BUNDLED), "--ranks", "2", "--shares", "1,2,3"), "3 shares for 2 ranks"),
    (("bench", "latency", "--model", str(BUNDLED), "--shares", "a"), "--shares wants numbers"),
    (("bench", "latency", "--model", str(BUNDLED), "--block", "24"), "24"),
    (("bench", "latency", "--model", str(BUNDLED), "--engine", "abacus"), "no engine is called 'abacus'"),
    (("bench", "latency", "--model", str(BUNDLED), "--exact", "--engine", "reference"), "cannot keep exact=true"),
    (("bench", "latency", "--model", str(BUNDLED), "--prompt-tokens", "2000"), "1024"),
    (("bench", "latency", "--model", str(BUNDLED), "--prompt-tokens", "64,x"), "--prompt-tokens wants whole numbers"),
    (("bench", "latency", "--model", str(BUNDLED), "--ranks", "2,17"), "--ranks wants numbers from 1 to 16"),
    (("bench", "latency", "--model", str(BUNDLED), "--ranks", "1,2", "--shares", "1"), "one number of --ranks"),
    (("bench", "latency", "--model", str(BUNDLED), "--quant", "int3"), "--quant knows stored, fp32, fp16, int8, int4"),
    (("bench", "latency", "--model", str(BUNDLED), "--link", "1Gbit"), "write 0.1ms,1Gbit"),
    (("bench", "latency", "--model", str(BUNDLED), "--csv", "/nowhere/x.csv"), "--csv: there is no folder"),
    (("bench", "precision", "--model", str(BUNDLED), "--plot", "/nowhere/x.png"), "--plot: there is no folder"),
    (("bench", "precision", "--plot", "drift.png"), "give it with --model"),
    (("bench", "precision", "--model", "/nowhere/at/all"), "/nowhere/at/all"),
    (("bench", "report", "--readme", "/nowhere/README.md"), "/nowhere/README.md cannot be read"),
    (("bench", "collectives", "--sizes", "10"), "multiples of 4"),
    (("bench", "collectives", "--op", "all_reduce,reduce"), "--op knows all_reduce, reduce_scatter"),
    (("bench", "collectives", "--wire", "fp8"), "--wire knows fp32, bf16, int8"),
    (("bench", "collectives", "--link", "1Gbit"), "write 0.1ms,1Gbit"),
    (("bench", "moe", "--like", "gpt-9"), "no shape is called 'gpt-9'"),
    (("bench", "moe", "--like", "gpt-9", "--config", "x"), "either --like NAME or --config FILE"),
    (("demo", "--moe", "--ranks", "2"), "at least 3 --ranks"),
    (("demo", "--survive", "--ranks", "1"), "at least 2 --ranks"),
    (("demo", "--survive", "--moe"), "leave out one"),
    (("demo", "--kill", "leader"), "--survive"),
    (("demo", "--survive", "--kill", "nobody"), "no such machine"),
    (("bench", "synth", "--out", "x"), "--like NAME or --config FILE"),
    (("bench", "synth", "--like", "gpt-9", "--out", "x"), "no shape is called 'gpt-9'; known: tinyllama-1.1b"),
    (("bench", "synth", "--config", "/nowhere", "--out", "x"), "cannot read a model config"),
]

IMPORTING = 20_000_000
"""Bytes that no interpreter takes before its first import, and ours exceed."""


def resident(process: psutil.Process) -> int:
    """Bytes; 0 once it has ended."""
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


@pytest.mark.parametrize(
    "words",
    [
        ("up",),
        ("join",),
        ("run",),
        ("status",),
        ("stop",),
        ("demo",),
        ("bench", "latency"),
        ("bench", "synth"),
        ("bench", "collectives"),
        ("bench", "precision"),
        ("cache", "ls"),
        ("cache", "rm"),
        ("bench", "report"),
        ("bench", "moe"),
        ("bench", "serve"),
        ("bench", "throughput"),
        ("experts",),
        ("bench",),
        ("cache",),
    ],
    ids=" ".join,
)
def test_help_shows_an_example(words: tuple[str, ...]) -> None:
    status, out, _ = command(*words, "--help")
    assert status == 0
    assert f"motley {' '.join(words)}" in out.partition("Example")[2]


async def test_a_process_says_the_same_and_ends_with_the_status() -> None:
    assert await motley("run", str(BUNDLED), "") == command("run", str(BUNDLED), "")
    status, out, err = await motley("up", "--help")
    assert (status, err) == (0, "")
    assert "motley up" in out.partition("Example")[2]
    status, out, err = await motley("run", str(BUNDLED), "ROMEO:", "--quant", "int3")
    assert (status, out) == (2, "")
    assert "Invalid value for '--quant'" in err


async def test_demo(tmp_path: Path) -> None:
    answer = await last_json("demo", "--tokens", "40", "--prompt", "JULIET:")
    assert answer["ranks"] == 3
    assert answer["tokens"] == 40
    assert answer["identical_to_single_process"] is True
    assert len(answer["text"]) > 40
    assert set(answer["ms_per_token"]) == {"p50", "p99"}
    assert 0 < answer["ms_per_token"]["p50"] <= answer["ms_per_token"]["p99"]
    fractions = [share["fraction"] for share in answer["shares"]]
    assert sum(fractions) == pytest.approx(1)
    assert len(set(fractions)) > 1


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kill", "killed"),
    [pytest.param((), "machine-c", marks=pytest.mark.soak), (("--kill", "leader"), "machine-a")],
)
async def test_demo_of_survival(kill: tuple[str, ...], killed: str) -> None:
    answer = await last_json("demo", "--survive", "--tokens", "60", *kill)
    assert answer["killed"] == [killed]
    assert answer["identical_to_undisturbed"] is True
    assert answer["silence_s"] > 0


@pytest.mark.soak
async def test_demo_of_experts() -> None:
    answer = await last_json("demo", "--moe", "--tokens", "60")
    assert (answer["ranks"], answer["experts"], answer["replicas"], answer["tokens"]) == (4, 8, 2, 60)
    (killed,) = answer["killed"]
    assert killed in ("machine-a", "machine-b", "machine-c", "machine-d")
    assert answer["stall_ms"] > 0
    assert len(answer["text"]) > 60
    assert answer["identical_to_single_process"] is True


@pytest.mark.soak
async def test_bench_latency(tmp_path: Path) -> None:
    answer = await last_json(
        *("bench", "latency", "--model", str(BUNDLED), "--ranks", "3", "--shares", "3,2,1"),
        *("--quant", "int8", "--prompt-tokens", "20", "--tokens", "10"),
    )
    assert (answer["engine"], answer["quant"], answer["ranks"]) == ("onnxruntime", "int8", 3)
    assert set(answer["ms_per_token"]) == {"mean", "p50", "p95", "p99"}
    assert answer["collectives_per_token"] == 12
    assert [share["mlp"] for share in answer["shares"]] == sorted((s["mlp"] for s in answer["shares"]), reverse=True)
    assert len(answer["peak_rss_mb"]) == len(answer["shard_mb"]) == 3
    assert min(answer["peak_rss_mb"]) > 10
    for key in ("prefill_tokens_per_s", "ttft_ms", "compute_ms", "wire_ms", "wait_ms"):
        assert answer[key] > 0
    # What a token takes is where it went.
    steps, leader = answer["timeline"]["step_ms"], answer["timeline"]["ranks"][0]
    parts = zip(leader["compute_ms"], leader["wire_ms"], leader["wait_ms"], strict=True)
    explained = [sum(of_token) / step_ms for of_token, step_ms in zip(parts, steps, strict=True)]
    assert 0.5 < statistics.median(explained) < 1.01
    assert answer["ratio"] == pytest.approx(answer["ms_per_token"]["p50"] / answer["bound_ms"], rel=0.1)
    assert [len(rank["wait_ms"]) for rank in answer["timeline"]["ranks"]] == [10] * 3


@pytest.mark.soak
def test_bench_latency_sweeps(tmp_path: Path) -> None:
    csv, plot = tmp_path / "tokens.csv", tmp_path / "where.png"
    command = (
        *("bench", "latency", "--model", str(BUNDLED), "--ranks", "1,2", "--quant", "int4"),
        *("--prompt-tokens", "8,16", "--tokens", "3", "--link", "none", "--csv", str(csv), "--plot", str(plot)),
    )
    answer = said_json(*command)
    settings = [(row["ranks"], row["prompt_tokens"]) for row in answer["rows"]]
    assert settings == [(1, 8), (1, 16), (2, 8), (2, 16)]
    assert len(csv.read_text().splitlines()) == 1 + 2 * 3 * (1 + 2)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
async def test_bench_latency_draws_the_tokens_in_the_terminal() -> None:
    status, out, err = await motley("bench", "latency", "--model", str(BUNDLED), "--ranks", "2", "--tokens", "5")
    assert (status, out) == (0, "")
    assert re.search(r"\d MB of weights per token: too few \(below 100 MB\)", err)
    assert "x the bound of" not in err
    assert "rank 1  █" in err
    assert "█ compute  ▓ wire  ▒ wait  ░ lead, mean ms" in err


@pytest.mark.soak
def test_bench_collectives() -> None:
    answer = said_json("bench", "collectives", "--ranks", "3", "--sizes", "4,8192", "--rounds", "20")
    assert [(row["op"], row["bytes"], row["ranks"]) for row in answer["rows"]] == [
        ("all_reduce", size, 3) for size in (4, 8192)
    ]
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in answer["rows"])


@pytest.mark.soak
def test_bench_precision() -> None:
    answer = said_json("bench", "precision", "--ranks", "2")
    assert {row["format"] for row in answer["wire_formats"]} == {"fp32", "bf16", "int8"}
    assert all(0 < row["mean_error"] < row["max_error"] for row in answer["wire_formats"])


def test_bench_precision_of_a_model(tmp_path: Path) -> None:
    plot = tmp_path / "drift.png"
    answer = said_json("bench", "precision", "--model", str(BUNDLED), "--ranks", "3", "--plot", str(plot))
    assert set(answer) == {"layers", "final_fp32_error", "final_fp16_error", "caches"}
    assert [row["format"] for row in answer["caches"]] == ["fp32", "fp16", "int8"]
    assert 0 == answer["caches"][0]["mean_kl"] < answer["caches"][1]["mean_kl"] < answer["caches"][2]["mean_kl"] < 1e-3
    assert [layer["layer"] for layer in answer["layers"]] == list(range(6))
    assert all({"fp32_error", "fp16_error", "max_activation"} <= set(layer) for layer in answer["layers"])
    assert answer["final_fp32_error"] == answer["layers"][-1]["fp32_error"]
    assert 0 < answer["final_fp32_error"] < 1e-6 < answer["final_fp16_error"] < 1e-2
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
@pytest.mark.parametrize(
    "standard",
    [
        Standard(prompt=8, contexts=(20, 60), tokens=8, pairs=1, sizes=[8192]),
        pytest.param(Standard(), marks=pytest.mark.soak),
    ],
    ids=["short", "whole"],
)
def test_bench_report(standard: Standard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.bench.reports.standard.Standard", lambda: standard)
    readme = tmp_path / "README.md"
    readme.write_text("# Ours\n<!-- performance:begin -->\n<!-- performance:end -->\nMore.\n")
    out = tmp_path / "results"
    answer = said_json(
        *("bench", "report", "--model", str(BUNDLED), "--readme", str(readme), "--out", str(out)),
    )
    (picture,), (numbers,) = out.glob("*.png"), out.glob("*.json")
    assert json.loads(numbers.read_text("utf-8")) == answer
    assert [(row["quant"], row["ranks"]) for row in answer["latency"]] == [
        (quant, ranks) for quant in ("int4", "int8") for ranks in (1, 2)
    ]
    text = readme.read_text("utf-8")
    assert f"(results/{picture.name})" in text
    assert "6 layers x 192" in text
    assert BUNDLED.name not in text
    assert text.startswith("# Ours\n<!-- performance:begin -->\nMeasured on ")
    assert text.endswith("<!-- performance:end -->\nMore.\n")


def test_bench_synth_makes_a_model_that_runs(tmp_path: Path) -> None:
    config = json.loads((BUNDLED / "config.json").read_text())
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps({**config, "num_hidden_layers": 2, "tie_word_embeddings": False}))
    folder = str(tmp_path / "model")
    status, _, err = command("bench", "synth", "--config", str(shape), "--out", folder)
    assert status == 0, err
    answer = said_json("bench", "latency", "--model", folder, "--quant", "int4", "--tokens", "4")
    assert answer["ranks"] == 1


def test_run_and_status_against_a_mesh(there: Mesh) -> None:
    run = ("run", str(BUNDLED), "ROMEO:", "--raw", "--quant", "fp32", "--max-tokens", "12", "--temperature", "0")
    first = said_json(*run, "--nodes", "a,b", MOTLEY_URL=there.url)
    again = said_json("run", BUNDLED.name, *run[2:], MOTLEY_URL=there.url)
    assert first["text"] == again["text"]
    assert first["finish_reason"] == "length"
    assert first["usage"]["completion_tokens"] == 12
    _, streamed, _ = command("run", BUNDLED.name, "-", *run[3:], stdin="ROMEO:", MOTLEY_URL=there.url)
    assert streamed == first["text"] + "\n"

    status = said_json("status", MOTLEY_URL=there.url)
    assert {node["name"] for node in status["nodes"] if node["state"] == "alive"} == {"a", "b", "c"}
    assert [session["state"] for session in status["sessions"]] == ["ready"]
    _, out, _ = command("status", MOTLEY_URL=there.url)
    assert f"{BUNDLED.name}: fp32, context 1024, ready" in out
    assert re.search(r"0 requests under way, 0 waiting; 0 of \d+ blocks in use, [1-9]\d* kept; \d+ of \d+ prompt", out)
    returned, _, err = command(*run[:4], "--quant", "int4", MOTLEY_URL=there.url)
    assert returned == 1
    assert f"loaded as fp32: leave out --quant, or close it first with `motley stop {BUNDLED.name}`" in err

    assert command("stop", BUNDLED.name, MOTLEY_URL=there.url)[0] == 0
    gone = command("stop", BUNDLED.name, MOTLEY_URL=there.url)
    assert gone[0] == 1
    assert "there is no session" in gone[2]


async def test_the_orchestrator_says_who_comes_and_goes(there: Mesh) -> None:
    late = await there.join("late")
    await there.orchestrator.line(r"^\S+ \S+ node late joined \(127\.0\.0\.1\)$")
    await late.end()
    await there.orchestrator.line(r"^\S+ \S+ node late has left: its daemon was ended there$")


@pytest.mark.soak
async def test_an_answer_that_breaks_off_ends_its_line(tmp_path: Path) -> None:
    async with mesh(tmp_path, "a") as there:
        await there.session(exact=True, recover=False)
        _, out, _ = await motley("status", MOTLEY_URL=there.url)
        assert f"{BUNDLED.name}: fp32, exact, context" in out
        run = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "motley.cli.main", "run", BUNDLED.name, "ROMEO:", "--raw", "--max-tokens", "1000"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "MOTLEY_URL": there.url},
        )
        assert run.stdout is not None
        text = await run.stdout.read(1)
        await there.nodes["a"].kill()
        async with asyncio.timeout(COMMAND_S):
            rest, err = await run.communicate()
        assert run.returncode == 1
        assert err.decode().startswith("motley: node 'a' (rank 0) is lost")
        assert (text + rest).decode().endswith("\n")


async def test_a_killed_orchestrator_is_told_in_one_line(tmp_path: Path) -> None:
    async with mesh(tmp_path, "a") as there:
        await there.session()
        run = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "motley.cli.main", "run", BUNDLED.name, "ROMEO:", "--raw", "--max-tokens", "1000"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "MOTLEY_URL": there.url},
        )
        assert run.stdout is not None
        text = await run.stdout.read(1)
        there.orchestrator.process.kill()
        async with asyncio.timeout(COMMAND_S):
            rest, err = await run.communicate()
        assert run.returncode == 1
        assert err.decode() == f"motley: the orchestrator at {there.url} has gone or cannot be reached any more\n"
        assert (text + rest).decode().endswith("\n")


async def test_cache(there: Mesh, tmp_path: Path) -> None:
    where = ("--cache", str(tmp_path / "cache"))
    nothing = {"shares": [], "damaged": [], "prefixes": [], "borrowed": []}
    assert said_json("cache", "ls", *where) == {"folder": where[1], "bytes": 0, **nothing}
    await there.join("cached", cache=tmp_path / "cache")
    session = await there.session(nodes=["cached"], quantisation="int8", keep_prefixes=True)
    (share,) = said_json("cache", "ls", *where)["shares"]
    assert (share["model"], share["quantisation"], share["block"]) == (str(BUNDLED), "int8", 128)
    assert share["fraction"] == pytest.approx(1)
    status, out, err = command("cache", "rm", share["key"][:8], *where)
    assert (status, out) == (1, "removed 0 of 1 share, 0 bytes\n")
    assert f"in use by a rank: {share['key'][:8]}" in err
    async with Client(there.url) as client:
        await client.call("DELETE", f"/api/sessions/{session['id']}")
    listed = said_json("cache", "ls", *where)
    (prefixes,) = listed["prefixes"]
    assert listed["bytes"] - prefixes["bytes"] == share["bytes"] > 2e6
    assert prefixes["bytes"] > 1e6
    assert [entry["key"] for entry in listed["shares"]] == [share["key"]]
    _, out, _ = command("cache", "ls", BUNDLED.name, *where)
    assert share["key"][:8] in out
    assert "100 %" in out
    _, out, _ = await motley("cache", "ls", *where, COLUMNS="80")
    assert re.search(r"│ …\S*/shakespeare-2.6m +│", out)
    assert max(map(len, out.splitlines())) <= 80
    _, out, _ = await motley("cache", "ls", *where, COLUMNS="")
    assert str(BUNDLED) in out
    damaged = Path(where[1]) / ("ab" * 32)
    damaged.mkdir()
    (damaged / "share.bin").write_bytes(bytes(3_000_000))
    assert said_json("cache", "ls", *where)["damaged"] == [{"key": damaged.name, "bytes": 3_000_000}]
    _, out, _ = command("cache", "ls", *where)
    assert re.search(r"damaged: abababab +│.* 3 MB", out)
    assert command("cache", "rm", "abab", *where)[1] == "removed 1 of 1 share, 3 MB\n"
    assert not damaged.exists()
    assert re.search(r"│ prefixes .* 1 │", command("cache", "ls", *where)[1])
    status, out, _ = command("cache", "rm", "--all", *where)
    assert (status, out) == (0, f"removed 1 of 1 share, {share['bytes'] / 1e6:.3g} MB\n")
    assert said_json("cache", "ls", *where) == {"folder": where[1], "bytes": 0, **nothing}


def test_run_without_a_mesh_is_a_mesh_of_one(tmp_path: Path) -> None:
    command = ("run", str(BUNDLED), "ROMEO:", "--raw", "--max-tokens", "8", "--seed", "1")
    answer = said_json(*command)
    assert answer["usage"]["completion_tokens"] == 8


def test_a_plan_without_a_mesh_says_where_none_answers() -> None:
    status, out, err = command("plan", str(BUNDLED))
    assert status == 0, err
    assert f"no mesh answers at {USUAL_URL}: planned for this machine" in err
    assert "memory" in out


@pytest.mark.parametrize(
    "asked", [("run", "ROMEO:", "--nodes", "pc"), ("plan", "--nodes", "pc"), ("plan", "--quant", "int8@pc")]
)
def test_who_names_nodes_is_not_served_by_this_machine_alone(asked: Sequence[str]) -> None:
    name, *rest = asked
    status, out, err = command(name, str(BUNDLED), *rest)
    assert (status, out) == (1, "")
    assert err.startswith(f"motley: no orchestrator answers at {USUAL_URL}")


def test_a_wrong_word_is_a_usage_error() -> None:
    for option, word, words in (
        ("--quant", "int3", "'stored', 'fp32', 'fp16', 'int8', 'int4'"),
        ("--experts", "nonsense", "'auto', 'sliced', 'parallel'"),
    ):
        status, _, err = command("run", str(BUNDLED), "ROMEO:", option, word)
        assert status == 2
        assert f"Invalid value for '{option}': '{word}' is not one of {words}." in err


def test_every_expected_error_exists() -> None:
    for name in EXPECTED:
        module, _, kind = name.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), kind), Exception)


@pytest.mark.soak
async def test_an_impatient_interrupt_still_ends_the_daemons(tmp_path: Path) -> None:
    demo = await MotleyProcess.start("demo", "--ranks", "2", "--tokens", "900")
    await demo.line("daemons joined")
    family = demo.family()
    assert len(family) >= 3  # and what the daemons have started by now
    for _ in range(3):
        demo.process.send_signal(signal.SIGINT)
    assert await demo.wait() == 130
    _, left = await asyncio.to_thread(psutil.wait_procs, family, END_S)
    assert not left


@pytest.mark.soak
@pytest.mark.parametrize("command", [("demo",), ("run", str(BUNDLED), "ROMEO:")], ids=lambda command: command[0])
async def test_an_early_interrupt_leaves_nothing_and_says_nothing(command: tuple[str, ...], tmp_path: Path) -> None:
    """From the terminal, so to the whole group, and while a child imports what it needs."""
    process = await MotleyProcess.start(*command, TMPDIR=str(tmp_path), own_group=True)
    deadline = time.monotonic() + START_S
    while not any(resident(child) > IMPORTING for child in process.family()[1:]):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    family = process.family()
    os.killpg(process.process.pid, signal.SIGINT)
    assert await process.wait() == 130
    assert not [line for line in process.lines if not re.match(r"starting machine-|no mesh answers at ", line)]
    assert os.listdir(tmp_path) == []
    _, left = await asyncio.to_thread(psutil.wait_procs, family, END_S)
    assert not left


async def test_a_killed_demo_takes_its_daemons_along(tmp_path: Path) -> None:
    demo = await MotleyProcess.start("demo", "--ranks", "2", "--tokens", "900", TMPDIR=str(tmp_path))
    await demo.line("daemons joined")
    family = demo.family()
    demo.process.kill()
    _, left = await asyncio.to_thread(psutil.wait_procs, family, END_S)
    assert not left


@pytest.mark.parametrize(
    ("wanted", "words"),
    USAGE,
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_done_is_said_in_one_line(
    wanted: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_less(monkeypatch.setattr)
    status, out, err = command(*wanted)
    assert status == 1
    assert words in err
    assert out == ""
