"""A session's draft model: from the request or the command line to rank 0, and what it takes of that rank's node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from motley.orchestrator.mesh.links import LinkTable
from motley.orchestrator.planning.cost import Workload
from motley.orchestrator.serving.plans.ranks import Team
from motley.orchestrator.session_request import SessionRequest
from motley.protocol.mesh_pb2 import Describe, Described, Engine, Failure, Gpu
from motley.protocol.versions import OLDEST
from tests.orchestrator.conftest import small_profile

Motley = Callable[..., Awaitable[tuple[int, str, str]]]
CACHES = 100 * 4 * 64
"""Bytes of the caches of either model, at least, where one has 100 tokens."""


class Describing:
    """Answers what models cost, and remembers what it was asked."""

    def __init__(self, draft_context: int = 2048) -> None:
        self.asked: list[Describe] = []
        self._draft_context = draft_context

    def __call__(self, order: Describe) -> Described:
        self.asked.append(order)
        profile = small_profile(order.model.source)
        if order.tokens_of:
            profile.context_length = self._draft_context
        return Described(profile=profile)


async def test_only_rank_0_is_told_of_it_and_its_tokenizer_is_compared(mesh: Any, new_node: Any) -> None:
    first, second = await mesh.join(new_node("pc")), await mesh.join(new_node("laptop"))
    first.on_describe = describe = Describing(draft_context=60)
    session = await mesh.serve(draft_model="small", nodes=["pc", "laptop"], context=100, cache_tokens=200)
    assert (session["draft_model"], session["draft_engine"]) == ("small", "")
    assert [(order.model.source, order.tokens_of) for order in describe.asked if not order.only_here] == [
        ("bard", ""),
        ("small", "bard"),
    ]
    orders = [node.commands[0].assign for node in (first, second)]
    assert [order.HasField("draft") for order in orders] == [True, False]
    draft = orders[0].draft
    assert (draft.model.source, draft.size, len(draft.shares), draft.engine) == ("small", 1, 1, "onnxruntime")
    assert draft.context == 60, "its own, which is shorter"
    assert draft.cache_blocks * draft.cache_block_tokens >= 200
    (share,) = draft.shares
    assert (share.attention.stop, share.mlp.stop, share.vocabulary.stop) == (4, 16, 8), "all of it"


async def test_it_takes_memory_of_the_node_of_rank_0(mesh: Any, new_node: Any) -> None:
    """Each of both models needs 10 kB for itself, 60 kB for its weights, and caches."""
    enough = 2 * (70_000 + CACHES + 32 * 4 * 64)
    node = await mesh.join(new_node("pc", memory=enough))
    node.on_describe = Describing()
    await mesh.serve(name="with", draft_model="small", context=100)
    status, body = await mesh.call("POST", "/api/sessions", {"model": "bard", "name": "more", "context": 100})
    assert (status, body["error"]["code"]) == (422, "insufficient_memory"), "nothing is left for another session"


async def test_one_that_leaves_no_room_for_a_rank_is_refused_by_name(mesh: Any, new_node: Any) -> None:
    node = await mesh.join(new_node("pc", memory=90_000))
    node.on_describe = Describing()
    status, body = await mesh.call("POST", "/api/sessions", {"model": "bard", "draft_model": "small", "context": 100})
    assert (status, body["error"]["code"], body["error"]["param"]) == (422, "insufficient_memory", "draft_model")
    assert "pc: the draft model small needs" in body["error"]["message"]
    assert not node.commands


async def test_on_a_gpu_it_takes_the_memory_of_that(mesh: Any, new_node: Any) -> None:
    made = new_node("pc")
    made.capabilities.engines.append(Engine(name="cuda", on_gpu=True))
    made.capabilities.gpus.append(Gpu(name="a GPU", memory_bytes=10**9, free_bytes=1000))
    node = await mesh.join(made)
    node.on_describe = Describing()
    asked = {"model": "bard", "draft_model": "small", "draft_engine": "cuda", "context": 100}
    status, body = await mesh.call("POST", "/api/sessions", asked)
    assert (status, body["error"]["param"]) == (422, "draft_model")
    assert "a GPU (1.00 kB of 1.00 GB free" in body["error"]["message"]


async def test_a_refusal_of_the_node_names_the_field(mesh: Any, new_node: Any) -> None:
    node = await mesh.join(new_node("pc"))

    def describe(order: Describe) -> Described:
        if order.tokens_of:
            return Described(failure=Failure(code="unlike_tokenizers", message="token 5 is another"))
        return Described(profile=small_profile())

    node.on_describe = describe
    status, body = await mesh.call("POST", "/api/sessions", {"model": "bard", "draft_model": "small"})
    assert (status, body["error"]["code"], body["error"]["param"]) == (422, "unlike_tokenizers", "draft_model")
    for fields, param in (
        ({"draft_engine": "cuda"}, "draft_engine"),
        ({"draft_model": "small", "experts": "parallel"}, "draft_model"),
        ({"draft_model": "small", "draft_engine": "abacus"}, "draft_engine"),
    ):
        status, body = await mesh.call("POST", "/api/sessions", {"model": "bard", **fields})
        assert (status, body["error"]["param"]) == (400, param)
    assert not node.commands


async def test_the_command_line_asks_for_it_and_minds_another(mesh: Any, new_node: Any, motley: Motley) -> None:
    node = await mesh.join(new_node("pc"))
    node.on_describe = Describing()
    status, _, said = await motley("run", "bard", "Hello", "--draft-model", "small", "--no-recover")
    assert status == 0, said
    (session,) = (await mesh.call("GET", "/api/sessions"))[1]["sessions"]
    assert session["draft_model"] == "small"
    assert "context 2048, small guesses tokens, ready" in (await motley("status"))[1]
    assert (await motley("run", "bard", "Hello"))[0] == 0
    status, _, said = await motley("run", "bard", "Hello", "--draft-model", "another")
    assert (status, "loaded with draft model small: leave out --draft-model, or" in said) == (1, True), said


async def test_the_models_own_head_is_described_and_planned_as_a_draft_model(mesh: Any, new_node: Any) -> None:
    """It is read where the model is, so no tokenizer is compared; its memory is rank 0's."""
    node, other = await mesh.join(able(new_node("pc"))), await mesh.join(new_node("laptop"))
    node.on_describe = describe = Describing()
    session = await mesh.serve(draft_model="own", nodes=["pc", "laptop"], context=100)
    assert session["draft_model"] == "own"
    asked = [(order.model.source, order.model.ahead) for order in describe.asked if not order.only_here]
    assert asked == [("bard", False), ("bard", True)]
    assert not any(order.tokens_of for order in describe.asked)
    first, second = node.commands[0].assign, other.commands[0].assign
    assert (first.model.ahead, first.draft.model.ahead, first.draft.model.source) == (False, True, "bard")
    assert not second.HasField("draft")


async def test_the_command_line_asks_for_the_own_head_whatever_folder_is_called_so(
    mesh: Any, new_node: Any, motley: Motley, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await mesh.join(able(new_node("pc")))
    node.on_describe = Describing()
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path)
    status, _, said = await motley("run", "bard", "Hello", "--draft-model", "own")
    assert status == 0, said
    assert node.commands[0].assign.draft.model.ahead
    assert "its own head guesses tokens" in " ".join((await motley("status"))[1].split())


async def test_the_own_head_takes_memory_of_rank_0(mesh: Any, new_node: Any) -> None:
    node = await mesh.join(able(new_node("pc", memory=90_000)))
    node.on_describe = Describing()
    status, body = await mesh.call("POST", "/api/sessions", {"model": "bard", "draft_model": "own", "context": 100})
    assert (status, body["error"]["code"], body["error"]["param"]) == (422, "insufficient_memory", "draft_model")


async def test_who_cannot_have_the_own_head_guess_is_named(mesh: Any, new_node: Any) -> None:
    """The engine of rank 0, that of the head, and a node of an older version."""
    made = able(new_node("pc"))
    made.capabilities.engines.append(Engine(name="plain"))
    node = await mesh.join(made)
    node.on_describe = Describing()
    older = able(new_node("older"))
    older.protocol = OLDEST
    await mesh.join(older)
    for fields, param, words in (
        ({"engine": "plain"}, "draft_model", "'plain' of node 'pc' cannot hand a model's own head what it guesses"),
        ({"draft_engine": "plain"}, "draft_engine", "engines there that can: onnxruntime"),
        ({"nodes": ["older"]}, "draft_model", "'older' cannot have the model's own head guess tokens: its Motley is"),
    ):
        asked = {"model": "bard", "draft_model": "own", "nodes": ["pc"], **fields}
        status, body = await mesh.call("POST", "/api/sessions", asked)
        assert (status, body["error"]["param"]) == (400, param), body
        assert words in body["error"]["message"]
    assert not node.commands


def able(node: Any) -> Any:
    """The node, of which the engine can tell more than logits."""
    node.capabilities.engines[0].embeds = True
    return node


def test_no_stages_are_planned_for_the_own_head() -> None:
    """What its first node needs is made by the last layers."""
    team = Team([], [], [], 100)
    for draft, stages in (("own", 1), ("small", 0)):
        request = SessionRequest("bard", draft_model=draft)
        assert team.chooser(request, LinkTable(lambda: 0.0), Workload(wire="fp32"), with_draft=True).stages == stages
