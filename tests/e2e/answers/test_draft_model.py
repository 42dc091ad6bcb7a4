"""A draft model in a mesh of real processes: no text changes, and what cannot guess for a model is refused by name."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from motley.cli.errors import CliError
from motley.cli.reaching.client import Client
from tests.e2e.processes import BUNDLED, Mesh

UNLIKE = BUNDLED.parent / "shakespeare-moe-1.5m"
"""Another model with the same tokenizer."""
GREEDY = {"model": BUNDLED.name, "prompt": "ROMEO:", "max_tokens": 40, "temperature": 0}
SAMPLED = {**GREEDY, "temperature": 1.2, "seed": 7, "top_p": 0.95}
PENALISED = {**SAMPLED, "frequency_penalty": 0.6, "logit_bias": {"7": 3}, "stop": ["\n\n"]}


async def answers(there: Mesh, *, together: bool = False, **session: Any) -> tuple[list[str], dict[str, int]]:
    """What the model says to all of these, one after another or together, and what its session has come to."""
    made = await there.session(nodes=["a", "b"], **session)
    async with Client(there.url) as client:
        asks = [client.call("POST", "/v1/completions", asked) for asked in (GREEDY, SAMPLED, PENALISED)]
        told = await asyncio.gather(*asks) if together else [await ask for ask in asks]
        texts = [each["choices"][0]["text"] for each in told]
        told = await client.call("GET", f"/api/sessions/{made['id']}")
        await client.call("DELETE", f"/api/sessions/{made['id']}")
    activity: dict[str, int] = told["activity"]
    return texts, activity


async def test_a_draft_model_changes_no_text(there: Mesh) -> None:
    """The model itself is always right, unlike repetitions in the text, if it has any."""
    texts, looked_up = await answers(there, shares=[1, 1])
    same, itself = await answers(there, shares=[1, 1], draft_model=str(BUNDLED))
    others, other = await answers(
        there, together=True, stages=[1, 1], exact=True, draft_model=str(UNLIKE), draft_engine="onnxruntime"
    )
    assert texts == same == others
    missed = looked_up["tried_drafts"] - looked_up["accepted_drafts"]
    assert itself["tried_drafts"] > looked_up["tried_drafts"]
    assert itself["tried_drafts"] - itself["accepted_drafts"] <= missed
    assert other["tried_drafts"] > 0, "how many, and how many wrongly, depends on how quick the machine is"


async def test_a_draft_model_with_another_tokenizer_is_refused_by_its_first_token_that_differs(
    there: Mesh, tmp_path: Path
) -> None:
    unlike = tmp_path / "unlike"
    shutil.copytree(UNLIKE, unlike)
    tokenizer = json.loads((unlike / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = (next(text for text, token in vocabulary.items() if token == number) for number in (70, 71))
    vocabulary[first], vocabulary[second] = 71, 70
    (unlike / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        CliError, match=r"unlike cannot guess for shakespeare-2.6m.* token 70 is '.+' there and '.+' in"
    ):
        await there.session(nodes=["a"], draft_model=str(unlike))


async def test_a_draft_model_that_cannot_be_is_refused_by_name(there: Mesh, tmp_path: Path) -> None:
    with pytest.raises(CliError, match="nothing-here"):
        await there.session(nodes=["a"], draft_model=str(tmp_path / "nothing-here"))
    with pytest.raises(CliError, match="no engine 'abacus'"):
        await there.session(nodes=["a"], draft_model=str(UNLIKE), draft_engine="abacus")
    with pytest.raises(CliError, match="draft_engine is for a draft model"):
        await there.session(nodes=["a"], draft_engine="reference")
    await there.join("small", memory="400MB")
    with pytest.raises(
        CliError, match=r"small: the draft model shakespeare-moe-1.5m needs .*, and a rank of shakespeare-2.6m at least"
    ):
        await there.session(nodes=["small"], draft_model=str(UNLIKE))
    async with Client(there.url) as client:
        assert not await client.sessions()
