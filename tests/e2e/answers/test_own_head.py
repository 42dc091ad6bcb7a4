"""A model's own head guesses tokens in a mesh of real processes: no text changes, and what cannot be is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from motley.cli.errors import CliError
from motley.cli.reaching.client import Client
from tests.e2e.answers.test_recurrent import save_letters, text_of
from tests.e2e.losses.test_survival import streamed, undisturbed, worker_of
from tests.e2e.processes import BUNDLED, Mesh, mesh
from tests.models.own_heads import HEADS, Ahead, head_of, tensors_of, that_knows, write

CYCLE = 60
"""Tokens that the text goes round, more than it has: so nothing that it has is a guess how it goes on."""
GREEDY = {"model": "ahead", "prompt": text_of([5, 6, 7]), "max_tokens": 48, "temperature": 0, "ignore_eos": True}
# Most tokens of this model are equally likely: which of them top_p leaves, rounding would say.
SAMPLED = {**GREEDY, "temperature": 2, "seed": 7}
PENALISED = {**SAMPLED, "frequency_penalty": 0.6, "repetition_penalty": 1.1, "logit_bias": {"9": 3}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = that_knows(tmp_path / "ahead", CYCLE)
    save_letters(folder, HEADS[0].case.model.vocabulary)
    return folder


async def answers(there: Mesh, *, together: bool = False, **session: Any) -> tuple[list[str], dict[str, int]]:
    """What the model says to all of these, one after another or together, and what its session has come to."""
    made = await there.session(**session)
    async with Client(there.url) as client:
        asks = [client.call("POST", "/v1/completions", asked) for asked in (GREEDY, SAMPLED, PENALISED)]
        told = await asyncio.gather(*asks) if together else [await ask for ask in asks]
        texts = [each["choices"][0]["text"] for each in told]
        told = await client.call("GET", f"/api/sessions/{made['id']}")
        await client.call("DELETE", f"/api/sessions/{made['id']}")
    activity: dict[str, int] = told["activity"]
    return texts, activity


async def test_the_own_head_guesses_and_changes_no_text(there: Mesh, model: Path) -> None:
    """Beside others, and of one whose first rank has the smaller share; also by the reference."""
    both: dict[str, Any] = {"model": str(model), "nodes": ["a", "b"], "shares": [1, 3]}
    texts, without = await answers(there, **both)
    assert texts[0] == text_of([token % CYCLE for token in range(8, 56)])
    same, own = await answers(there, draft_model="own", together=True, **both)
    alone, reference = await answers(there, draft_model="own", model=str(model), nodes=["a"], engine="reference")
    assert texts == same == alone
    for each in (own, reference):
        assert without["accepted_drafts"] < each["accepted_drafts"] < each["tried_drafts"]


@pytest.mark.parametrize("ahead", [pytest.param(each, marks=pytest.mark.soak) for each in HEADS[1:]], ids=str)
async def test_a_head_that_knows_nothing_changes_no_text(ahead: Ahead, there: Mesh, tmp_path: Path) -> None:
    """Of every family, also where the model's layers have recurrent states."""
    case = ahead.case
    folder = write(tmp_path / "ahead", case, tensors_of(case) | head_of(ahead))
    save_letters(folder, case.model.vocabulary)
    session = await there.session(model=str(folder), nodes=["a", "b"], shares=[1, 2], draft_model="own")
    prompt, answer = text_of(case.tokens[: case.prompt]), text_of(case.tokens[case.prompt :])
    asked = {"model": "ahead", "prompt": prompt, "max_tokens": len(answer), "temperature": 0, "ignore_eos": True}
    async with Client(there.url) as client:
        told = await client.call("POST", "/v1/completions", asked)
        activity = (await client.call("GET", f"/api/sessions/{session['id']}"))["activity"]
        await client.call("DELETE", f"/api/sessions/{session['id']}")
    assert told["choices"][0]["text"] == answer
    assert activity["tried_drafts"] > 0


@pytest.mark.soak
async def test_answers_go_on_when_the_rank_of_the_head_dies(model: Path, tmp_path: Path) -> None:
    """The new one has rows from there on."""
    async with mesh(tmp_path, "a", "b") as there:
        session = await there.session(model=str(model), nodes=["a", "b"], shares=[1, 1], draft_model="own", exact=True)
        plain = await undisturbed(there.url, {**SAMPLED, "drafts": False})
        async with Client(there.url) as client:
            ranks = (await client.call("GET", f"/api/sessions/{session['id']}"))["ranks"]
        dies = worker_of(there.nodes[ranks[0]["node"]])
        assert (await streamed(there.url, SAMPLED, 20, dies.kill))[0] == plain
        async with Client(there.url) as client:
            told = await client.call("GET", f"/api/sessions/{session['id']}")
    assert told["epoch"] == 2
    assert told["activity"]["accepted_drafts"] > 0


async def test_what_cannot_be_is_refused_by_name(there: Mesh, model: Path) -> None:
    with pytest.raises(CliError, match="of models of type llama no head is read that predicts tokens further ahead"):
        await there.session(model=str(BUNDLED), nodes=["a"], draft_model="own")
    with pytest.raises(CliError, match="stages are without the model's own head"):
        await there.session(model=str(model), nodes=["a", "b"], stages=2, draft_model="own")
