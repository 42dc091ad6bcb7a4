"""Adapters of routed experts: each row of an expert with its own, at any split, and stacked as PEFT writes them."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from motley.daemon.adapters.reading import read_adapter
from motley.daemon.models.cutting.units import units
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.plugins.engine import EngineOptions
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from tests.adapters.adapted import AdaptedSession, baked, expert_matrices, random_adapter, write_adapter
from tests.models.cases import LocalSession, golden_case, uneven_shares


@pytest.mark.parametrize("quantisation", ["fp32", "int8"])
def test_experts_with_adapters_are_as_with_these_in_their_weights(quantisation: str, tmp_path: Path) -> None:
    case = golden_case("olmoe")
    adapter = random_adapter(tmp_path / "adapter", case.model, seed=1, experts=True)
    assert {each.name for each in expert_matrices(case.model)} <= adapter.products.keys()
    alone = uneven_shares(units(case.model, quantisation, 32), 1)
    with (
        baked(case.folder, adapter, quantisation) as model,
        LocalSession(model, ReferenceEngine, uneven_shares(units(case.model, "fp32", 32), 1), tmp_path / "baked") as it,
    ):
        expected = it.step(case.tokens, 0)
    only = random_adapter(tmp_path / "attention", case.model, seed=1)
    with AdaptedSession(case.folder, ReferenceEngine, alone, tmp_path / "alone", quantisation) as session:
        session.load(1, only)
        assert np.abs(session.adapted(case.tokens, 1) - expected).max() > 0.05 * np.abs(expected).max()
    shares = uneven_shares(units(case.model, quantisation, 32), 3)
    engines = [ReferenceEngine] if quantisation == "int8" else [ReferenceEngine, OnnxRuntimeEngine]
    for engine in engines:
        folder = tmp_path / engine.__name__
        with AdaptedSession(case.folder, engine, shares, folder, quantisation, slots=2) as session:
            session.load(1, adapter)
            got = session.adapted(case.tokens, 1)
            assert np.abs(got - expected).max() < 2e-5 * np.abs(expected).max()


def test_experts_rows_of_several_adapters_have_the_bits_that_they_have_alone(tmp_path: Path) -> None:
    case = golden_case("olmoe")
    shares = uneven_shares(units(case.model, "int8", 32), 3)
    options = EngineOptions(max_rows=64)
    with AdaptedSession(
        case.folder, OnnxRuntimeEngine, shares, tmp_path / "ranks", "int8", slots=2, options=options
    ) as session:
        for slot, only in ((1, ()), (2, ("up_proj", "down_proj"))):
            session.load(slot, random_adapter(tmp_path / str(slot), case.model, slot, experts=True, only=only))
        span, texts = session.sequences.span, {0: case.tokens[:3], 1: case.tokens[3:6], 2: case.tokens[6:9]}
        apart = {}
        for slot, text in texts.items():
            apart[slot] = session.adapted(text, slot).copy()
            session.sequences.close(0)
        for slots, halved in (((0, 1, 2, 1, 2, 0), True), ((2, 2, 1), False)):
            spans = [span(at, 0, 3, 3)._replace(adapter=slot) for at, slot in enumerate(slots)]
            got = session.run(spans, [token for slot in slots for token in texts[slot]], halved)
            np.testing.assert_array_equal(got, np.concatenate([apart[slot] for slot in slots]))
            for at, _ in enumerate(slots):
                session.sequences.close(at)


def stack(folder: Path, count: int, rank: int) -> None:
    """Write the matrices of an adapter's experts as PEFT does those of stacked ones, where a gate and what is beside it
    have one A."""
    tensors = load_file(folder / "adapter_model.safetensors")
    modules = sorted({name.split(".experts.")[0] for name in tensors if re.search(r"\.experts\.\d", name)})
    for module in modules:
        own = partial("{}.experts.{}.{}.lora_{}.weight".format, module)
        for wrapper, names in ((".base_layer", ("gate_proj", "up_proj")), ("", ("down_proj",))):
            a = np.concatenate([tensors[own(number, names[0], "A")] for number in range(count)])
            b = [np.concatenate([tensors[own(number, name, "B")] for name in names]) for number in range(count)]
            tensors[f"{module}.experts{wrapper}.lora_A.weight"] = a
            tensors[f"{module}.experts{wrapper}.lora_B.weight"] = np.stack(b, axis=-1).reshape(len(b[0]), rank * count)
    kept = {name: each for name, each in tensors.items() if not re.search(r"\.experts\.\d", name)}
    save_file(kept, folder / "adapter_model.safetensors")


def test_stacked_experts(tmp_path: Path) -> None:
    model = golden_case("olmoe").model
    count, rank = model.experts_of(0).count, 4  # type: ignore[union-attr]
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    targets = {"target_modules": ["q_proj"], "target_parameters": parameters}

    def share_a(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            if ".up_proj.lora_A" in name:
                tensors[name] = tensors[name.replace("up_proj", "gate_proj")]

    only = ("q_proj", "gate_proj", "up_proj", "down_proj")
    folder = write_adapter(tmp_path / "apart", model, 1, rank, experts=True, only=only, change=share_a)
    apart = read_adapter(folder, model)
    stacked = write_adapter(tmp_path / "stacked", model, 1, rank, experts=True, only=only, change=share_a, **targets)
    stack(stacked, count, rank)
    got = read_adapter(stacked, model)
    assert got.products.keys() == apart.products.keys()
    for name, product in apart.products.items():
        for own, other in zip(got.products[name], product, strict=True):
            np.testing.assert_array_equal(own, other)
    tensors = load_file(stacked / "adapter_model.safetensors")
    name = next(name for name in tensors if "base_layer.lora_B" in name)
    save_file(tensors | {name: tensors[name][:-1].copy()}, stacked / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.base_layer.*they are of none of .*gate_up_proj"):
        read_adapter(stacked, model)
    del tensors[name], tensors[name.replace("lora_B", "lora_A")]
    save_file(tensors, stacked / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"no matrices for .*gate_up_proj, which target_parameters names"):
        read_adapter(stacked, model)
