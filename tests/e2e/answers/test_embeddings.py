"""Embeddings of a mesh of real processes: as OpenAI's client wants them, and the same however the model is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from motley.cli.reaching.client import Client
from motley.daemon.models.files import load_tokenizer
from tests.e2e.processes import BUNDLED, Mesh, motley

TEXTS = ["ROMEO:", "But soft, what light through yonder window breaks? " * 3, "x"]


async def test_embeddings_are_the_same_on_one_rank_and_on_two(there: Mesh) -> None:
    import openai  # takes a second, of every process that collects tests

    found = []
    sessions: list[dict[str, Any]] = [
        {"nodes": ["a"], "engine": "onnxruntime"},
        {"nodes": ["a", "b"], "shares": [3, 1], "engine": "onnxruntime", "sequences": 2},
        {"nodes": ["c", "b"], "shares": [1, 2], "engine": "reference"},
    ]
    async with (
        Client(there.url) as mesh,
        openai.AsyncOpenAI(base_url=f"{there.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        for wanted in sessions:
            session = await there.session(**wanted, quantisation="fp32", embeddings="mean", name="embedder")
            told = await client.embeddings.create(model="embedder", input=TEXTS)
            assert [each.index for each in told.data] == [0, 1, 2]
            found.append(np.array([each.embedding for each in told.data]))
            ids = [load_tokenizer(BUNDLED).encode(text) for text in TEXTS]
            assert told.usage.prompt_tokens == told.usage.total_tokens == sum(map(len, ids))
            by_ids = await client.embeddings.create(model="embedder", input=ids, encoding_format="float")
            assert np.allclose([each.embedding for each in by_ids.data], found[-1], atol=1e-6)
            with pytest.raises(openai.BadRequestError, match="embed texts; ask POST /v1/embeddings"):
                await client.completions.create(model="embedder", prompt="Hi")
            with pytest.raises(openai.BadRequestError, match=r"maximum context length is .* and the input has"):
                await client.embeddings.create(model="embedder", input=[[1] * 5000])
            await mesh.call("DELETE", f"/api/sessions/{session['id']}")
    assert all(np.abs(other - found[0]).max() < 1e-5 for other in found[1:])
    assert np.allclose(np.linalg.norm(found[0], axis=1), 1)
    assert found[0][0] @ found[0][1] < 0.999, "unlike texts have unlike embeddings"
    status, out, err = await motley(
        "run", str(BUNDLED), TEXTS[0], "--url", there.url, "--embeddings", "last", "--raw", "--quant", "fp32"
    )
    assert status == 0, err
    last = np.array([float(number) for number in out.strip("[]\n").split(",")])
    assert abs(np.linalg.norm(last) - 1) < 1e-5
    assert np.abs(last - found[0][0]).max() > 1e-3
