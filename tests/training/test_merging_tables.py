"""Merging adapters that have embeddings and heads of their own, or add to these: as the mesh computes with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.daemon.adapters.reading import read_adapter as read_for_mesh
from motley.daemon.models.cutting.units import units
from motley.daemon.models.files import open_model
from motley.plugins.adapted_engine import AdapterProduct
from motley.plugins.engine import F32
from motley.plugins.reference.engine import ReferenceEngine
from motley.training.adapters import merge, read_adapter
from motley.training.errors import TrainingError
from motley.training.settings import How
from motley.training.tensors import tensors_of, write_tensors
from tests.adapters.adapted import AdaptedSession, write_adapter
from tests.models.cases import Case, LocalSession, golden_case, uneven_shares

WEIGHTS = "model.safetensors"
BOTH = ("model.embed_tokens", "lm_head")
UNTIED, TIED = golden_case("llama-mha"), golden_case("llama-mqa")


def in_floats(case: Case, folder: Path) -> Path:
    """A copy of a case's model of which merging rounds nothing."""
    shutil.copytree(case.folder, folder)
    tensors = {name: np.array(own, np.float32) for name, own in tensors_of(case.folder / WEIGHTS).items()}
    write_tensors(folder / WEIGHTS, tensors)
    return folder


def with_adapter(case: Case, folder: Path, ranks: Path) -> F32:
    """The logits of a case's tokens with an adapter."""
    shares = uneven_shares(units(case.model, "fp32", 32), 2)
    with AdaptedSession(case.folder, ReferenceEngine, shares, ranks) as session:
        session.load(1, read_for_mesh(folder, case.model))
        return session.adapted(case.tokens, 1).copy()


def of_checkpoint(folder: Path, tokens: list[int], ranks: Path) -> F32:
    with open_model(folder) as opened:
        shares = uneven_shares(units(opened.model, "fp32", 32), 2)
    with LocalSession(folder, ReferenceEngine, shares, ranks) as session:
        return session.step(tokens, 0).copy()


@pytest.mark.parametrize("how", [How.LINEAR, How.TIES, How.DARE])
@pytest.mark.parametrize(
    ("case", "settings"),
    [
        (UNTIED, {"whole": BOTH}),
        (UNTIED, {"rows": True, "head": True}),
        (TIED, {"whole": BOTH}),
        (TIED, {"whole": BOTH[:1]}),
        (TIED, {"whole": BOTH[1:]}),
        (TIED, {"rows": True}),
        (TIED, {"rows": True, "head": True}),
        (TIED, {"whole": BOTH[:1], "ensure_weight_tying": True}),
        (TIED, {"whole": BOTH[1:], "ensure_weight_tying": True}),
    ],
    ids=str,
)
def test_a_checkpoint_with_an_adapter_in_it_computes_as_the_mesh_does_with_that(
    case: Case, settings: dict[str, Any], how: How, tmp_path: Path
) -> None:
    """A head that was the embedding table is a tensor of its own where only one of both has changed."""
    adapter = write_adapter(tmp_path / "adapter", case.model, 3, **settings)
    merge([adapter], how, tmp_path / "whole", density=1.0, into=in_floats(case, tmp_path / "base"))
    expected = with_adapter(case, adapter, tmp_path / "ranks")
    assert np.abs(expected[:-1] - case.logits).max() > 0.1 * np.abs(case.logits).max()
    got = of_checkpoint(tmp_path / "whole", case.tokens, tmp_path / "own ranks")
    np.testing.assert_allclose(got, expected, atol=5e-5 * float(np.abs(expected).max()))
    with open_model(tmp_path / "whole") as opened:
        assert opened.model.tied == bool(case.model.tied and settings.get("ensure_weight_tying"))


def test_means_of_tables_and_of_what_is_added_to_them(tmp_path: Path) -> None:
    first, second = (
        write_adapter(tmp_path / str(seed), UNTIED.model, seed, whole=BOTH[1:], rows=True) for seed in (1, 2)
    )
    merge([first, second], How.LINEAR, tmp_path / "both", weights=[1, 3])
    one, other, both = (read_adapter(each) for each in (first, second, tmp_path / "both"))
    np.testing.assert_allclose(
        both.tables["lm_head"], 0.25 * one.tables["lm_head"] + 0.75 * other.tables["lm_head"], atol=1e-6
    )
    name = BOTH[0]
    np.testing.assert_allclose(
        both.changes[name].dense, 0.25 * one.changes[name].dense + 0.75 * other.changes[name].dense, atol=1e-5
    )
    assert json.loads((tmp_path / "both" / "adapter_config.json").read_text())["modules_to_save"] == ["lm_head"]
    read = read_for_mesh(tmp_path / "both", UNTIED.model)
    assert [*read.whole] == ["lm_head.weight"]
    assert isinstance(read.embedding, AdapterProduct)
    assert read.embedding.down.shape == (8, UNTIED.model.vocabulary)
    base = in_floats(UNTIED, tmp_path / "base")
    merge([first, second], How.LINEAR, tmp_path / "once", weights=[1, 3], into=base)
    merge([tmp_path / "both"], How.LINEAR, tmp_path / "later", into=base)
    once, later = (tensors_of(tmp_path / own / WEIGHTS) for own in ("once", "later"))
    for tensor, values in once.items():
        np.testing.assert_allclose(later[tensor], values, atol=1e-5)


def test_what_the_model_s_table_is_needed_for_says_so(tmp_path: Path) -> None:
    whole = write_adapter(tmp_path / "whole", UNTIED.model, 1, whole=BOTH[:1])
    plain = write_adapter(tmp_path / "plain", UNTIED.model, 2)
    for how in (How.TIES, How.DARE):
        with pytest.raises(TrainingError, match=r"whole tables \(modules_to_save\): merge --into the model"):
            merge([whole, whole], how, tmp_path / "out")
    with pytest.raises(TrainingError, match=r"plain: has no whole table of model.embed_tokens .* --into the model"):
        merge([whole, plain], How.LINEAR, tmp_path / "out")
    merge([whole, plain], How.LINEAR, tmp_path / "out", into=UNTIED.folder)
    tied = write_adapter(tmp_path / "tied", UNTIED.model, 2, whole=BOTH[:1], ensure_weight_tying=True)
    with pytest.raises(TrainingError, match="differ in ensure_weight_tying"):
        merge([whole, tied], How.LINEAR, tmp_path / "other")

    def save(tensors: dict[str, Any]) -> None:
        tensors["base_model.model.lm_head.base_layer.weight"] = np.zeros((2, 2), np.float32)

    saved = write_adapter(tmp_path / "saved", UNTIED.model, 2, head=True, change=save)
    with pytest.raises(TrainingError, match="save_embedding_layers=False"):
        merge([saved], How.LINEAR, tmp_path / "other")
