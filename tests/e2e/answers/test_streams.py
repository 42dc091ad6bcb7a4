"""Models with several residual streams in a mesh of real processes: transformers' greedy text, on uneven ranks and in
stages, between which all streams go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from motley.cli.reaching.client import Client
from tests.e2e.answers.test_recurrent import text_of, with_letters
from tests.e2e.processes import Mesh
from tests.models.cases import golden_case

SOAKED = ("glm5-next", "qwen4-exp")
LAYOUTS = [{"stages": [1, 2]}, {"shares": [3, 1, 2], "quantisation": "fp32"}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["stages", "shares"])
@pytest.mark.parametrize("name", ["hy-v4", *(pytest.param(each, marks=pytest.mark.soak) for each in SOAKED)])
async def test_streams_reach_every_rank(name: str, layout: dict[str, Any], there: Mesh, tmp_path: Path) -> None:
    case = golden_case(name)
    session = await there.session(model=str(with_letters(case, tmp_path)), nodes=["a", "b", "c"], sequences=2, **layout)
    prompt, answer = case.tokens[: case.prompt], case.tokens[case.prompt :]
    asked = {"model": name, "prompt": text_of(prompt), "max_tokens": len(answer), "temperature": 0}
    async with Client(there.url) as client:
        answers = await asyncio.gather(*(client.call("POST", "/v1/completions", asked) for _ in range(2)))
        await client.call("DELETE", f"/api/sessions/{session['id']}")
    assert [each["choices"][0]["text"] for each in answers] == [text_of(answer)] * 2
