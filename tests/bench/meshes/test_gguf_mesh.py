"""A GGUF file from the file to the text: rank processes of this machine, against the folder it was made from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from motley.bench.meshes.local_mesh import LocalMesh, MeshSpec
from motley.daemon.models.cutting.units import units
from motley.daemon.models.files import load_tokenizer, read_model
from motley.plugins.engine import F32
from motley.plugins.reference.engine import ReferenceEngine
from tests.models.cases import LocalSession, uneven_shares
from tests.models.to_gguf import to_gguf

SHAKESPEARE = Path(__file__).parents[3] / "cli/models/shakespeare-2.6m"
PROMPT = "ROMEO:\nLook,"


async def written(model: Path) -> str:
    tokenizer = load_tokenizer(model)
    async with LocalMesh(MeshSpec(model, weights=(2, 1), context=256)) as mesh:
        said = await mesh.decode(tokenizer.encode(PROMPT), 24)
    return tokenizer.decode([token for tokens in said for token in tokens.ids])


async def test_float16_weights_write_the_same_text(tmp_path: Path) -> None:
    """The folder's weights are float16 too."""
    file = to_gguf(SHAKESPEARE, tmp_path / "m.gguf", lambda name: Type.F16)
    assert await written(file) == await written(SHAKESPEARE)


@pytest.mark.parametrize(("type_", "bound"), [(Type.Q8_0, 0.01), (Type.Q4_0, 0.15)])
def test_quantised_weights_compute_nearly_the_same(type_: Type, bound: float, tmp_path: Path) -> None:
    """Bounds: RMS errors of 0.5 % and 9 % in each weight, over six layers, relative to the RMS of the logits."""
    file = to_gguf(SHAKESPEARE, tmp_path / "m.gguf", lambda name: type_)
    tokens = load_tokenizer(SHAKESPEARE).encode(PROMPT)

    def logits(model: Path) -> F32:
        shares = uneven_shares(units(read_model(model), "fp32", 32), 2)
        with LocalSession(model, ReferenceEngine, shares, tmp_path / model.stem) as ranks:
            return ranks.step(tokens, 0)

    expected = logits(SHAKESPEARE)
    error = np.sqrt(np.square(logits(file) - expected).mean() / np.square(expected).mean())
    assert 0 < error < bound
