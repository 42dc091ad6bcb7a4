"""Expected shapes against the checkpoints that transformers wrote."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields

import pytest

from motley.daemon.models.description.model import Model, expected_shapes, parameters, tensors
from motley.daemon.models.description.operations.attention import Attend
from motley.daemon.models.description.operations.experts import Experts, Route
from motley.daemon.models.description.operations.rows import Gated
from motley.daemon.models.files import open_model
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.safetensors_checkpoint import SafetensorsCheckpoint
from motley.daemon.weights.located import Located
from tests.models.cases import KINDS, MADE_OF_OTHERS, TELLING, Case, elements_in_files, golden_case, golden_cases


@pytest.mark.parametrize("case", golden_cases(), ids=str)
def test_every_tensor_is_expected_and_fits(case: Case) -> None:
    with open_model(case.folder) as opened:  # which expects them
        assert opened.model == case.model
    assert parameters(case.model) == elements_in_files(case)


def test_a_config_that_tells_of_other_shapes_is_refused() -> None:
    case = golden_case("llama-biases-odd-sizes")
    smaller = case.changed(intermediate_size=95)
    with (
        SafetensorsCheckpoint(case.folder) as checkpoint,
        pytest.raises(CheckpointError, match=r"the config makes it"),
    ):
        checkpoint.expect(expected_shapes(smaller))


def test_absent_tensors_are_all_named() -> None:
    case = golden_case("llama-llama3-rope-tied")
    untied = case.changed(tie_word_embeddings=False)
    with (
        SafetensorsCheckpoint(case.folder) as checkpoint,
        pytest.raises(CheckpointError, match=r"'lm_head.weight' is absent"),
    ):
        checkpoint.expect(expected_shapes(untied))


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe"])
def test_an_expert_that_is_missing_is_named(name: str) -> None:
    case = golden_case(name)
    experts = case.model.experts
    assert experts
    more = case.changed(**dict.fromkeys(("num_experts", "num_local_experts"), experts.count + 1))
    with Located(SafetensorsCheckpoint(case.folder), tensors(more)) as source, pytest.raises(CheckpointError) as caught:
        source.expect(expected_shapes(more))
    assert f"'model.layers.0.mlp.experts.{experts.count}.gate_proj.weight' is absent" in str(caught.value)


def test_every_family_has_a_telling_case() -> None:
    telling = {case.model.family for case in golden_cases() if str(case) in TELLING}
    assert telling == {case.model.family for case in golden_cases()} - MADE_OF_OTHERS
    assert {str(case) for case in golden_cases()} >= TELLING


def kinds(model: Model) -> Iterator[str]:
    """The operations of a model, and what attention, experts and their routing have that others of them do without."""
    for operation in model.operations:
        yield type(operation).__name__
        if isinstance(operation, Gated):
            yield operation.activation
        if isinstance(operation, Attend):
            yield from (f"attends without {name}" for name in ("v", "rope") if getattr(operation, name) is None)
            yield from (["attends to a window"] if operation.window else [])
        for each in (operation.routing if isinstance(operation, Route) else operation,):
            if isinstance(operation, Attend | Experts | Route):
                optional = (field for field in fields(each) if field.default is not MISSING)
                yield from (
                    f"{type(each).__name__}.{it.name}" for it in optional if getattr(each, it.name) != it.default
                )
    yield from (["several rotations"] if len(model.ropes) > 1 else [])


def test_every_kind_of_operation_is_in_a_case_that_every_commit_tries() -> None:
    of_all = {kind for case in golden_cases() for kind in kinds(case.model)}
    assert of_all == {kind for name in KINDS for kind in kinds(golden_case(name).model)}
    assert len(of_all) > 40
