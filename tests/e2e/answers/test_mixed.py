"""Sessions of real daemons whose ranks have engines and quantisations of their own."""

from __future__ import annotations

import pytest

from motley.cli.errors import CliError
from motley.cli.reaching.client import Client
from tests.e2e.processes import BUNDLED, Mesh, command, said_json

LINE = "ROMEO:\nLook, good sir, you are"
GREEDY = {"model": BUNDLED.name, "prompt": LINE, "max_tokens": 12, "temperature": 0, "logprobs": 5}
CLOSE = 0.5
"""Between log-probabilities of fp32 and of a session of which some ranks hold int8 or int4."""


async def answer(client: Client) -> tuple[str, dict[str, float]]:
    """The text, and the likeliest first tokens."""
    body = await client.call("POST", "/v1/completions", GREEDY)
    (choice,) = body["choices"]
    return choice["text"], choice["logprobs"]["top_logprobs"][0]


async def test_every_rank_holds_and_computes_in_its_own_way(there: Mesh) -> None:
    async with Client(there.url) as client:
        session = await there.session(nodes=["a"])
        _, expected = await answer(client)
        await client.call("DELETE", f"/api/sessions/{session['id']}")
        for nodes, shares, own in (
            (["a", "b"], [1, 1], {"quantisations": {"b": "int8"}}),
            (["b", "a"], [2, 1], {"quantisations": {"b": "int8"}, "engines": {"a": "reference"}}),
            (["a", "b", "c"], [1, 1, 2], {"engines": {"a": "reference"}, "quantisations": {"b": "int8", "c": "int4"}}),
        ):
            session = await there.session(nodes=nodes, shares=shares, **own)
            assert [(rank["node"], rank["engine"], rank["quantisation"]) for rank in session["ranks"]] == [
                (
                    node,
                    own.get("engines", {}).get(node, "onnxruntime"),
                    own["quantisations"].get(node, "fp32"),
                )
                for node in nodes
            ]
            text, told = await answer(client)
            again, told_again = await answer(client)  # of which the prompt is in the caches
            assert (again, told_again) == (text, pytest.approx(told, abs=1e-5))
            both = told.keys() & expected.keys()
            assert len(both) >= 3
            assert [told[token] for token in both] == pytest.approx([expected[token] for token in both], abs=CLOSE)
            assert told != expected
            await client.call("DELETE", f"/api/sessions/{session['id']}")


def test_the_command_line(there: Mesh) -> None:
    wanted = ("run", str(BUNDLED), "ROMEO:", "--raw", "--max-tokens", "4", "--url", there.url)
    wanted = (*wanted, "--nodes", "a,b")
    mixed = ("--quant", "fp32", "--quant", "int8@b", "--engine", "reference@a")
    said = said_json(*wanted, *mixed)
    assert said["usage"]["completion_tokens"] == 4
    (session,) = said_json("status", "--url", there.url)["sessions"]
    ranks = {rank["node"]: (rank["engine"], rank["quantisation"]) for rank in session["ranks"]}
    assert ranks == {"a": ("reference", "fp32"), "b": ("onnxruntime", "int8")}
    said_json(*wanted, *mixed)
    for unlike, why in (
        (("--quant", "int4@b"), "loaded as int8 on b: leave out --quant"),
        (("--engine", "onnxruntime@a"), "loaded by reference on a: leave out --engine"),
        (("--engine", "reference"), "loaded by onnxruntime: leave out --engine"),
    ):
        status, _, err = command(*wanted, *unlike)
        assert (status, why in err) == (1, True), err
    for wrong, why in (
        (("--quant", "int3@b"), "'int3' is not one of 'stored', 'fp32', 'fp16', 'int8', 'int4'"),
        (("--quant", "int8@b", "--quant", "int4@b"), "it is given twice for node 'b'"),
        (("--engine", "@b"), "'@b' is no value, and no VALUE@NODE"),
    ):
        status, _, err = command(*wanted, *wrong)
        assert (status, why in err) == (2, True), err
    status, out, _ = command("status", "--url", there.url)
    assert status == 0
    assert "(reference, fp32)" in out
    assert "(onnxruntime, int8)" in out
    assert "fp32 and int8, context 1024" in out


async def test_a_gpu_engine_on_a_machine_without_a_gpu_is_refused_by_name(there: Mesh) -> None:
    async with Client(there.url) as client:
        nodes = (await client.call("GET", "/api/nodes"))["nodes"]
        if any(node["gpus"] for node in nodes):
            pytest.skip("there is a GPU here")
        with pytest.raises(
            CliError, match=r"node 'a' cannot run engine 'cuda': it shows no GPU.*start it again.*; it can run: onnx"
        ):
            await there.session(engines={"a": "cuda"})
