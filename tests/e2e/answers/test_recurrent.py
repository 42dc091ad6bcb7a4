"""A model with recurrent states in a mesh of real processes: transformers' greedy text, on two uneven ranks."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from motley.cli.errors import CliError
from motley.cli.reaching.client import Client
from motley.protocol import CACHE_BLOCK
from tests.e2e.losses.test_survival import streamed, undisturbed, worker_of
from tests.e2e.processes import Mesh, mesh
from tests.models.cases import Case, golden_case


def with_letters(case: Case, folder: Path) -> Path:
    """A golden model with a tokenizer: each of its tokens is a letter."""
    model = folder / str(case)
    shutil.copytree(case.folder, model)
    save_letters(model, case.model.vocabulary)
    return model


def save_letters(model: Path, vocabulary: int) -> None:
    """Give a model a tokenizer of so many letters."""
    tokenizer = Tokenizer(models.BPE(vocab={letter(token): token for token in range(vocabulary)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(model / "tokenizer.json"))


def letter(token: int) -> str:
    return chr(0x4E00 + token)


def text_of(tokens: list[int]) -> str:
    return "".join(map(letter, tokens))


SOAKED = [
    pytest.param(name, marks=pytest.mark.soak)
    for name in (
        "bailing-hybrid",
        "falcon-h1",
        "glm5-next",
        "granitemoehybrid",
        "kimi-linear",
        "lfm2-moe",
        "lfm3",
        "olmo-hybrid",
        "qwen3-5",
        "qwen3-next",
        "qwen4-exp-with-vision",
    )
]


@pytest.mark.parametrize("name", [*SOAKED, "nemotron-h", "qwen4-exp"])
async def test_two_uneven_ranks_write_what_transformers_does(name: str, there: Mesh, tmp_path: Path) -> None:
    """Also beside others, and a second time, from the state that is remembered after the prompt's only whole block."""
    case = golden_case(name)
    model = with_letters(case, tmp_path)
    session = await there.session(model=str(model), nodes=["a", "b"], shares=[3, 1], sequences=3)
    prompt, answer = case.tokens[: case.prompt], case.tokens[case.prompt :]
    prompts = [prompt, prompt[:20], prompt, prompt[5:], prompt]
    async with Client(there.url) as client:
        asked = [
            {"model": name, "prompt": text_of(each), "max_tokens": len(answer), "temperature": 0} for each in prompts
        ]
        answers = await asyncio.gather(*(client.call("POST", "/v1/completions", each) for each in asked))
        again = await client.call("POST", "/v1/completions", asked[0])
        await client.call("DELETE", f"/api/sessions/{session['id']}")
    for number in (0, 2, 4):
        assert answers[number]["choices"][0]["text"] == text_of(answer)
    assert again["choices"][0]["text"] == text_of(answer)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == CACHE_BLOCK


KINDS = [pytest.param(name, marks=pytest.mark.soak) for name in ("qwen3-5", "lfm2-moe", "qwen4-exp")]


@pytest.mark.parametrize("name", [*KINDS, "nemotron-h"])
async def test_states_survive_wrong_guesses_prefixes_and_losses(name: str, tmp_path: Path) -> None:
    """Of each kind of state: delta rule, short convolution, Mamba2; and of rows by the last tokens. Few letters are
    often guessed wrongly."""
    case = golden_case(name)
    model = with_letters(case, tmp_path)
    asked = {
        "model": name,
        "prompt": text_of(case.tokens[: case.prompt]),
        "max_tokens": 56,
        "ignore_eos": True,
        "temperature": 1.5,
        "logit_bias": {"5": 60, "6": 60, "9": 60},
    }
    async with mesh(tmp_path, "a", "b") as there:
        session = await there.session(model=str(model), nodes=["a", "b"], shares=[3, 1], sequences=2, exact=True)
        bodies = [{**asked, "seed": seed} for seed in range(3)]
        plain = [await undisturbed(there.url, {**body, "drafts": False}) for body in bodies]
        assert len(set(plain)) == 3
        assert list(await asyncio.gather(*(undisturbed(there.url, body) for body in bodies))) == plain
        async with Client(there.url) as client:
            again = await client.call("POST", "/v1/completions", bodies[0])
            told = await client.call("GET", f"/api/sessions/{session['id']}")
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == CACHE_BLOCK
        assert again["choices"][0]["text"] == plain[0]
        assert told["activity"]["tried_drafts"] > told["activity"]["accepted_drafts"] > 0

        for lost, rank in ((1, -1), (2, 0)):  # a busy machine may be left out of the plan after a loss
            async with Client(there.url) as client:
                ranks = (await client.call("GET", f"/api/sessions/{session['id']}"))["ranks"]
            dies = worker_of(there.nodes[ranks[rank]["node"]])
            assert (await streamed(there.url, bodies[lost], 20, dies.kill))[0] == plain[lost]
        async with Client(there.url) as client:
            told = await client.call("GET", f"/api/sessions/{session['id']}")
        assert told["epoch"] == 3


async def test_what_such_a_model_cannot_do_is_refused_by_name(there: Mesh, tmp_path: Path) -> None:
    model = with_letters(golden_case("qwen3-5"), tmp_path)
    with pytest.raises(CliError, match="qwen3-5 has layers with recurrent states, of which no prefixes can be kept"):
        await there.session(model=str(model), nodes=["a"], keep_prefixes=True)
    with pytest.raises(CliError, match="qwen3-5 has layers with recurrent states: it can be no draft model"):
        await there.session(model=str(model), nodes=["a"], draft_model=str(model))
